"""Images are fetched from their official places, if that is allowed; here these are local files."""

from __future__ import annotations

import hashlib
import io
import tarfile
from http.client import IncompleteRead
from pathlib import Path

import pytest

from fedgmm.data.images import files as images
from fedgmm.data.images.files import ImageFileError, Source, load_images


def source_of(path, folder, members=(), **changes):
    content = path.read_bytes()
    facts = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()} | changes
    return Source(path.as_uri(), folder=folder, members=members, **facts)


@pytest.fixture
def archive(tmp_path):
    """A tar archive with two wanted files, one in a folder, and one that is not wanted."""
    path = tmp_path / "official" / "set.tar.gz"
    path.parent.mkdir()
    with tarfile.open(path, "w:gz") as tar:
        for name in ("in/train.bin", "test.bin", "../../outside.bin"):
            info = tarfile.TarInfo(name)
            info.size = 4
            tar.addfile(info, io.BytesIO(name[-4:].encode()))
    return path


def test_an_archive_is_fetched_checked_and_taken_apart(tmp_path, archive, monkeypatch):
    source = source_of(archive, "set", ("train.bin", "test.bin"))
    monkeypatch.setitem(images.SOURCES, "cifar10", (source,))
    seen = []
    images.fetch_files("cifar10", tmp_path / "data", lambda *step: seen.append(step))
    found = sorted(path.relative_to(tmp_path) for path in (tmp_path / "data").rglob("*.*"))
    assert found == [Path("data/set/test.bin"), Path("data/set/train.bin")]
    assert (tmp_path / "data/set/test.bin").read_bytes() == b".bin"
    assert seen[-1] == ("set.tar.gz", source.size, source.size)
    archive.unlink()  # nothing is fetched again
    images.fetch_files("cifar10", tmp_path / "data")


@pytest.mark.parametrize("changes", [{"sha256": "0" * 64}, {"size": 3}, {"size": 10**6}])
def test_another_file_than_the_official_one_is_not_kept(tmp_path, archive, monkeypatch, changes):
    source = source_of(archive, "set", ("train.bin",), **changes)
    monkeypatch.setitem(images.SOURCES, "cifar10", (source,))
    with pytest.raises(ImageFileError, match=r"set.tar.gz.*official"):
        load_images("cifar10", tmp_path / "data", download=True)
    assert not list((tmp_path / "data" / "set").iterdir())


def test_a_place_that_does_not_answer_is_named(tmp_path, archive, monkeypatch):
    source = source_of(archive, "set")
    archive.unlink()
    monkeypatch.setitem(images.SOURCES, "mnist", (source,))
    with pytest.raises(ImageFileError, match=r"set.tar.gz.*by hand"):
        load_images("mnist", tmp_path / "data", download=True)


@pytest.mark.parametrize("trouble", [IncompleteRead(b""), OSError(28, "No space left")], ids=str)
def test_trouble_on_the_way_names_the_place(tmp_path, archive, monkeypatch, trouble):
    def fail(*_args, **_options):
        raise trouble

    monkeypatch.setitem(images.SOURCES, "mnist", (source_of(archive, "MNIST/raw"),))
    monkeypatch.setattr(images.urllib.request, "urlopen", fail)
    with pytest.raises(ImageFileError, match="downloaded"):
        load_images("mnist", tmp_path / "data", download=True)


def test_nothing_is_fetched_unless_allowed(tmp_path, monkeypatch):
    def refuse(*_args, **_options):
        raise AssertionError("a download was tried")

    monkeypatch.setattr("urllib.request.urlopen", refuse)
    for name in images.IMAGE_NAMES:
        with pytest.raises(ImageFileError):
            load_images(name, tmp_path)
