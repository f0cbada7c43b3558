"""Where a study on images is at work: the same study may be run in many places."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fedgmm.experiments.comparison import Tell


@dataclass(frozen=True)
class Workplace:
    """Where a study finds its images, keeps them encoded, and tells of its steps.

    Attributes:
        data_dir: the data folder; ``None`` means the one that ``FEDGMM_DATA`` names.
        cache: a folder for encoded images; ``None`` keeps nothing.
        tell: called with a line before each step.
    """

    data_dir: Path | None = None
    cache: Path | None = None
    tell: Tell = lambda _: None
