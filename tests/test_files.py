"""Files are whole or not there, whatever happens while they are written."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from fedgmm.files import naming, private_folder, write_atomically, write_once


@pytest.fixture(autouse=True)
def flushed(disk, monkeypatch):
    """These files do go to the disk."""
    monkeypatch.setattr("os.fsync", disk)


def test_a_new_file_and_one_that_is_replaced(tmp_path):
    path = tmp_path / "numbers"
    write_atomically(path, b"first")
    assert path.read_bytes() == b"first"
    write_atomically(path, b"")
    assert path.read_bytes() == b""
    assert [path.name for path in tmp_path.iterdir()] == ["numbers"]


@pytest.mark.parametrize("error", [OSError("no space left"), KeyboardInterrupt()])
@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_failure_leaves_the_old_file_and_no_draft(tmp_path, monkeypatch, step, error):
    path = tmp_path / "numbers"
    write_atomically(path, b"old")

    def fail(*_, **__):
        raise error

    monkeypatch.setattr("os.fsync" if step == "fsync" else "pathlib.Path.replace", fail)
    with pytest.raises(type(error)):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert [path.name for path in tmp_path.iterdir()] == ["numbers"]


def test_the_draft_of_a_crash_is_written_over(tmp_path):
    (tmp_path / "numbers.part").write_bytes(b"half of someth")
    write_atomically(tmp_path / "numbers", b"whole")
    assert [path.name for path in tmp_path.iterdir()] == ["numbers"]


def test_numbers_reach_the_disk_before_the_name_and_the_name_after(tmp_path, monkeypatch):
    path = tmp_path / "numbers"
    path.write_bytes(b"old")
    seen, fsync = [], os.fsync

    def watched(handle):
        kind = "folder" if stat.S_ISDIR(os.fstat(handle).st_mode) else "file"
        seen.append((kind, path.read_bytes()))
        fsync(handle)

    monkeypatch.setattr("os.fsync", watched)
    write_atomically(path, b"new")
    if hasattr(os, "O_DIRECTORY"):
        assert seen == [("file", b"old"), ("folder", b"new")]


def test_a_file_system_that_cannot_flush_a_folder(tmp_path, monkeypatch):
    fsync = os.fsync

    def refuse_folders(handle):
        if stat.S_ISDIR(os.fstat(handle).st_mode):
            raise OSError("not supported")
        fsync(handle)

    monkeypatch.setattr("os.fsync", refuse_folders)
    write_atomically(tmp_path / "numbers", b"new")
    assert (tmp_path / "numbers").read_bytes() == b"new"


def test_a_missing_folder_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        write_atomically(tmp_path / "nowhere" / "numbers", b"")


def test_a_file_that_is_written_once_belongs_to_the_first(tmp_path):
    path = tmp_path / "numbers"
    write_once(path, b"first")
    write_once(path, b"second")
    assert path.read_bytes() == b"first"
    assert [path.name for path in tmp_path.iterdir()] == ["numbers"]


def test_a_file_system_without_links(tmp_path, monkeypatch):
    def refuse(*_):
        raise PermissionError("not supported")

    monkeypatch.setattr("os.link", refuse)
    test_a_file_that_is_written_once_belongs_to_the_first(tmp_path)


def test_a_failure_leaves_nothing_of_a_file_that_is_written_once(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError("no space left")

    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(OSError, match="no space left"):
        write_once(tmp_path / "numbers", b"new")
    assert not list(tmp_path.iterdir())


def test_a_full_disk_without_links_leaves_nothing_either(tmp_path, monkeypatch):
    path, opened = tmp_path / "numbers", Path.open

    def refuse(*_):
        raise PermissionError("not supported")

    def full(self, mode="r", *args, **named):
        file = opened(self, mode, *args, **named)
        if mode == "xb":
            file.close()  # nothing can be written
        return file

    monkeypatch.setattr("os.link", refuse)
    monkeypatch.setattr(Path, "open", full)
    with pytest.raises(ValueError, match="closed"):
        write_once(path, b"new")
    assert not list(tmp_path.iterdir())


WRITER = """
import sys
from pathlib import Path
from fedgmm.files import write_atomically
for _ in range(300):
    write_atomically(Path(sys.argv[1]), sys.argv[2].encode() * 2000, shared=True)
"""


def test_several_programs_may_write_a_shared_file(tmp_path):
    path = tmp_path / "file"
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER, str(path), letter]) for letter in "ab"
    ]
    while any(writer.poll() is None for writer in writers):
        if path.exists():
            assert path.read_bytes() in (b"a" * 2000, b"b" * 2000)
    assert [writer.returncode for writer in writers] == [0, 0]
    assert [file.name for file in tmp_path.iterdir()] == ["file"]


def test_folders_are_private_if_they_are_new(tmp_path):
    private_folder(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").stat().st_mode & 0o077 == 0
    (tmp_path / "shared").mkdir(mode=0o755)
    before = (tmp_path / "shared").stat().st_mode
    private_folder(tmp_path / "shared")
    assert (tmp_path / "shared").stat().st_mode == before


def test_a_full_disk_is_reported_with_the_path(tmp_path, monkeypatch):
    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("fedgmm.files.os.fsync", full)
    with pytest.raises(OSError, match="No space left") as error:
        write_atomically(tmp_path / "model.json", b"{}")
    assert "model.json" in str(error.value)
    assert list(tmp_path.iterdir()) == []


def test_a_really_full_disk(tmp_path):
    """Every write to /dev/full fails."""
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full")
    with pytest.raises(OSError, match="/dev/full"), naming(Path("/dev/full")):
        Path("/dev/full").write_bytes(b"x" * 100_000)
