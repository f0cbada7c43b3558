"""The scripts of the gallery run, and each leaves a picture; pictures of the site are small."""

import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCRIPTS = sorted((ROOT / "examples").glob("*.py"))
PICTURES = ROOT / "docs" / "images" / "examples"
# processes of their own, or many training runs
SLOW = {"08_federation", "09_privacy"}


@pytest.mark.parametrize(
    "script",
    [
        pytest.param(path, marks=pytest.mark.slow if path.stem in SLOW else (), id=path.stem)
        for path in SCRIPTS
    ],
)
def test_an_example_ends_with_a_picture(script, tmp_path, monkeypatch):
    """All run in this process, which imports torch once."""
    monkeypatch.setenv("MPLBACKEND", "Agg")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    out = tmp_path / "picture.png"

    runpy.run_path(str(script))["main"](out)

    assert out.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert out.stat().st_size > 4_000


def test_every_example_has_its_small_picture_in_the_gallery():
    assert len(SCRIPTS) >= 8
    assert {path.stem for path in PICTURES.glob("*.png")} == {path.stem for path in SCRIPTS}
    assert all(path.stat().st_size < 60_000 for path in PICTURES.glob("*.png"))
