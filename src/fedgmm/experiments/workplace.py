"""Where a study on images is at work: the same study may be run in many places."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from fedgmm.data.embeddings import Progress
from fedgmm.data.images.files import ImageData, load_images
from fedgmm.runs.comparison import Notify


@dataclass(frozen=True)
class Workplace:
    """Where a study finds its images, keeps them encoded, and tells of its steps.

    Attributes:
        data_dir: the data folder; ``None`` means the one that ``FEDGMM_DATA`` names.
        cache: a folder for encoded images; ``None`` keeps nothing.
        notify: called with a line before each step.
        on_images: called with images as they were loaded, before anything is made of them.
    """

    data_dir: Path | None = None
    cache: Path | None = None
    notify: Notify = lambda _: None
    on_images: Callable[[ImageData], None] = lambda _: None

    def load(self, name: str) -> ImageData:
        """A data set of the data folder."""
        images = load_images(name, self.data_dir)  # type: ignore[arg-type]
        self.on_images(images)
        return images

    @property
    def tell_encoded(self) -> Progress | None:
        """Tells how many images are encoded, client by client; ``None`` where nothing is kept of them.

        Without a cache all are encoded in one go, which is faster.
        """
        if self.cache is None:
            return None
        return lambda done, total: self.notify(f"{done:,} of {total:,} images are encoded")
