"""Embed images or texts once: each site's files become one Parquet file with a column of vectors.

A site is a folder of images (one folder per class), a table with a column of texts or of paths of images,
or an npz file of images. Rows are embedded in batches, and every finished batch is kept, so an
interrupted run resumes.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedgmm.data.encoders import Encoder, encoded, encoder, reads_texts
from fedgmm.data.tables.errors import TableError, listed, quoted
from fedgmm.data.tables.files import client_name
from fedgmm.data.tables.text_files import parse_text, sniff
from fedgmm.files import write_atomically
from fedgmm.support.checks import Count, Flag, check_fields, check_integer

IMAGE_ENDINGS = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp")
# others, such as EPS, would start a program on the file
_FORMATS = ("PNG", "JPEG", "BMP", "GIF", "TIFF", "WEBP", "PPM", "JPEG2000")
BATCH_ROWS = 128
"""Rows that are embedded together and kept when they are done."""

_ENCODER = b"fedgmm.encoder"  # in the metadata of the Parquet file
_CONTENT = b"fedgmm.content"
_SOURCE = b"fedgmm.source"
_DEFAULT_SIZE = 224

Progress = Callable[[str, int, int], None]
"""Called with a site, the number of its rows that are done, and the number of all its rows."""


class EmbeddingError(ValueError):
    """A source that cannot be embedded."""


@dataclass(frozen=True)
class EmbeddedSite:
    """The Parquet file of one site; ``skipped`` are rows that could not be read, with the reason."""

    name: str
    path: Path
    rows: int
    skipped: tuple[str, ...]

    @property
    def notes(self) -> list[str]:
        """A sentence about each row that was skipped."""
        return [f"{self.name}: skipped {line}." for line in self.skipped]


@dataclass(frozen=True)
class _Items:
    """The images or texts of a site.

    Attributes:
        columns: all other columns of the rows; the first identifies them.
        keys: texts that change whenever the item of a row changes.
        files: every item is a file, and its key ends with the size and the time of the file.
        load: returns the item of a row: a text, or an image ``(channels, height, width)`` uint8.
    """

    columns: pa.Table
    keys: Sequence[str]
    load: Callable[[int], Any]
    files: bool = False

    def marks(self) -> dict[str, str]:
        """Return a hash of id, size and time of each file, by id."""
        names = map(str, self.columns.columns[0].to_pylist())
        pairs = zip(names, self.keys, strict=True) if self.files else ()
        return {name: _hash(name, *key.rsplit(" ", 2)[1:])[:16] for name, key in pairs}


@dataclass(frozen=True)
class Embedding:
    """Settings of an embedding of images or texts; part of a run's configuration.

    Attributes:
        encoder: its name, see :func:`fedgmm.data.encoders.encoder`.
        weights: file of its weights.
        size: side in pixels of the images.
        text: the column of texts of tables.
        image: the column of tables that names files of images.
        device: of the encoder.
        download: allow the download of weights.
    """

    encoder: str = "resnet18"
    weights: str | None = None
    size: Count | None = None
    text: str | None = None
    image: str | None = None
    device: str = "auto"
    download: Flag = False

    def __post_init__(self) -> None:
        check_fields(self)

    def sites(
        self, sources: Sequence[str | Path], out: Path, progress: Progress | None = None
    ) -> list[EmbeddedSite]:
        """Embed sources, each of them one site."""
        names = ("weights", "size", "device", "download")
        made = encoder(self.encoder, **{name: getattr(self, name) for name in names})
        return [
            embed(source, out, made, text=self.text, image=self.image, progress=progress)
            for source in sources
        ]


class _UnreadableError(ValueError):
    """An item that cannot be used, with the reason."""


def embed(
    source: str | Path,
    out: str | Path,
    encoder: Encoder,
    *,
    text: str | None = None,
    image: str | None = None,
    progress: Progress | None = None,
) -> EmbeddedSite:
    """Write the vectors of one site; finished batches of an earlier attempt are used again.

    Args:
        source: a folder of images, whose folders are classes; a table; or an npz file with ``images``.
        out: the folder for ``SITE.parquet``.
        encoder: see :func:`fedgmm.data.encoders.encoder`.
        text: the column of texts of a table.
        image: the column of a table that names files of images, relative to the table.
        progress: called after every batch.
    """
    from pyarrow import parquet

    source, out = Path(source), Path(out)
    name = source.resolve().name if source.is_dir() else client_name(source)
    if source.is_file() and source.name.lower().endswith(".parquet"):
        with contextlib.suppress(OSError, pa.ArrowException):  # reading it again explains it
            given = parquet.read_metadata(source)
            if column_name(encoder) in given.schema.to_arrow_schema().names:
                return EmbeddedSite(name, source, given.num_rows, ())
    items = _items_of(source, encoder, text, image)
    path = out / f"{name}.parquet"
    content = _hash(encoder.name, *items.keys)
    if path.exists():
        rows_before, facts = 0, dict[bytes, bytes]()
        with contextlib.suppress(OSError, pa.ArrowException):
            before = parquet.read_metadata(path)
            rows_before, facts = before.num_rows, before.metadata or {}
        if _CONTENT not in facts:
            raise EmbeddingError(
                f"{path} is in the way and was not made by embed; move or rename it."
            )
        if facts[_CONTENT] == content.encode():
            return EmbeddedSite(name, path, rows_before, ())
    parts = out / f".{name}.parts"
    parts.mkdir(parents=True, exist_ok=True)
    vectors: list[NDArray[np.float16]] = []
    reasons: dict[int, str] = {}
    total = len(items.keys)
    for start in range(0, total, BATCH_ROWS):
        rows = range(start, min(start + BATCH_ROWS, total))
        found, unreadable = _batch(items, rows, encoder, parts)
        vectors.append(found)
        reasons |= unreadable
        if progress is not None:
            progress(name, rows.stop, total)
    widths = {part.shape[1] for part in vectors if len(part)}
    if not widths:
        first = next(iter(reasons.values()), "there are no rows")
        raise EmbeddingError(f"{source}: no row can be read; the first reason: {first}.")
    (width,) = widths
    kept = np.ones(total, dtype=bool)
    kept[list(reasons)] = False
    flat = np.concatenate([part.reshape(-1) for part in vectors if len(part)])
    column = pa.FixedSizeListArray.from_arrays(pa.array(flat, pa.float16()), width)
    table = items.columns.filter(pa.array(kept)).append_column(column_name(encoder), column)
    marks = list(items.marks().values())
    place = json.dumps(
        {"source": str(source.resolve()), "text": text, "image": image, "marks": marks}
    )
    facts = {_ENCODER: encoder.name.encode(), _CONTENT: content.encode(), _SOURCE: place.encode()}
    buffer = pa.BufferOutputStream()
    parquet.write_table(table.replace_schema_metadata(facts), buffer, compression="zstd")
    write_atomically(path, buffer.getvalue().to_pybytes())
    shutil.rmtree(parts)
    ids = items.columns.columns[0]
    skipped = tuple(f"{ids[row].as_py()}: {reason}" for row, reason in reasons.items())
    return EmbeddedSite(name, path, int(kept.sum()), skipped)


def column_name(encoder: Encoder) -> str:
    """Return the name of the column of vectors; encoders with other weights have other names.

    So tables of different encoders have no such column in common, and cannot be mixed.
    """
    kind = re.sub(r"\W+", "_", encoder.name.split()[0]).strip("_")
    return f"{kind}_{_hash(encoder.name)[:8]}"


def _batch(
    items: _Items, rows: range, encoder: Encoder, parts: Path
) -> tuple[NDArray[np.float16], dict[int, str]]:
    """Return vectors of the rows that can be read, and the reasons of the others."""
    loaded, reasons = [], {}
    file = parts / f"{_hash(encoder.name, *(items.keys[row] for row in rows))}.npz"
    # a part that is missing, or damaged in one of many ways, is made again
    with contextlib.suppress(Exception), np.load(file, allow_pickle=False) as held:
        again = zip(held["bad"], held["texts"], strict=True)
        return held["vectors"], {rows[int(i)]: str(text) for i, text in again}
    for row in rows:
        try:
            loaded.append(items.load(row))
        except _UnreadableError as error:
            reasons[row] = str(error)
    if loaded:
        batch = loaded if reads_texts(encoder) else torch.stack(loaded)
        numbers = encoded(batch, encoder).cpu().numpy()
        if np.abs(numbers).max() > np.finfo(np.float16).max:
            raise EmbeddingError(
                f"Encoder {encoder.name!r} gives numbers that float16 cannot hold."
            )
        vectors = numbers.astype(np.float16)
    else:
        vectors = np.empty((0, 0), dtype=np.float16)
    held_bytes = BytesIO()
    bad = np.array([row - rows.start for row in reasons], dtype=np.int64)
    texts = np.array(list(reasons.values()), dtype=np.str_)
    np.savez(held_bytes, vectors=vectors, bad=bad, texts=texts)
    write_atomically(file, held_bytes.getvalue())
    return vectors, reasons


def _hash(*texts: str) -> str:
    found = hashlib.sha256()
    for text in texts:
        data = text.encode("utf-8", "surrogateescape")
        found.update(len(data).to_bytes(8, "big") + data)
    return found.hexdigest()


# ---------------------------------------------------------------------- sources


@dataclass(frozen=True)
class Originals:
    """The images or texts that a table of vectors was made of, read again one by one.

    Attributes:
        id_column: the column of the table that identifies them.
        load: returns the text, or the image ``(channels, height, width)`` uint8, with an id. Raises
            ``ValueError`` with the reason if it cannot be read.
    """

    id_column: str
    load: Callable[[str], Any]


def originals(path: Path, size: int) -> Originals | None:
    """Return the images or texts behind a table of vectors; ``None`` if it does not name its source.

    The table may come from somebody else and name any place on this machine. So nothing is shown unless
    the table has hashes of what is there, which only its embedding can have written.

    Args:
        path: the Parquet file.
        size: side in pixels to which images are cut.

    Raises:
        EmbeddingError: the source is missing, or has changed.
    """
    from pyarrow import parquet

    facts: dict[bytes, bytes] = {}
    if path.suffix == ".parquet":
        with contextlib.suppress(OSError, pa.ArrowException):
            facts = parquet.read_metadata(path).metadata or {}
    if _SOURCE not in facts:
        return None
    try:
        place = json.loads(facts[_SOURCE])
        source, text, image = Path(place["source"]), place["text"], place["image"]
        known, before = {str(one) for one in place["marks"]}, facts[_CONTENT].decode()
        encoder_name = facts[_ENCODER].decode()
    except (ValueError, LookupError, TypeError):
        return None
    if source.exists() and not (source.is_dir() or source.is_file()):
        return None  # a device or a pipe
    items = _items_in(source, size, text, image)
    if not items.files and _hash(encoder_name, *items.keys) != before:
        raise EmbeddingError(
            f"{source} is not what the vectors of {path.name} were made of; embed it again."
        )
    marks = items.marks()
    row_of = {str(name): row for row, name in enumerate(items.columns.columns[0].to_pylist())}

    def load(name: str) -> Any:
        if name not in row_of:
            raise _UnreadableError("it is no longer there")
        if items.files and marks[name] not in known:
            raise _UnreadableError("it has changed since its vector was made")
        return items.load(row_of[name])

    return Originals(items.columns.column_names[0], load)


def _items_of(source: Path, encoder: Encoder, text: str | None, image: str | None) -> _Items:
    size = getattr(encoder, "size", _DEFAULT_SIZE)
    check_integer("size", size, 1)
    wants_texts = reads_texts(encoder)
    if wants_texts and text is None:
        raise EmbeddingError(
            f"Encoder {encoder.name.split()[0]!r} reads texts; name their column (--text)."
        )
    if not wants_texts and text is not None:
        raise EmbeddingError(
            f"Encoder {encoder.name.split()[0]!r} reads images and not the texts of a column; use "
            "'wordllama' or 'sentence-transformers:NAME' for texts."
        )
    return _items_in(source, size, text, image)


def _items_in(source: Path, size: int, text: str | None, image: str | None) -> _Items:
    if source.is_dir():
        if text is not None:
            raise EmbeddingError(f"{source} is a folder; texts are read from a table.")
        return _images_in_folder(source, size)
    if not source.exists():
        raise EmbeddingError(f"{source}: there is no such file or folder; check the name.")
    if source.name.lower().endswith(".npz"):
        return _images_in_npz(source)
    table = _read_table(source)
    column = image if text is None else text
    if column is None:
        raise EmbeddingError(
            f"{source}: name the column that holds the paths of the images (--image-column); if the file "
            "holds vectors, their encoder is not that of the model: embed again with the same encoder, "
            "weights and size."
        )
    if column not in table.column_names:
        known = listed(table.column_names)
        raise TableError(source, f"there is no column {quoted(column)}; the columns are {known}.")
    values = table.column(column).cast(pa.string()).to_pylist()
    if text is not None:
        return _texts(table.drop_columns([column]), values)
    paths = [source.parent / value if value else None for value in values]
    rest = table.drop_columns([column]).add_column(0, column, [pa.array(values)])
    return _Items(
        rest, [_key(path) for path in paths], lambda row: _image(paths[row], size), files=True
    )


def _texts(columns: pa.Table, values: Sequence[str | None]) -> _Items:
    def load(row: int) -> str:
        value = values[row]
        if value is None or not value.strip():
            raise _UnreadableError("the text is missing")
        return value

    numbers = pa.array([f"row {row + 1}" for row in range(len(values))])
    name = "id" if "id" not in columns.column_names else "row"
    return _Items(columns.add_column(0, name, numbers), [v or "" for v in values], load)


def _images_in_folder(folder: Path, size: int) -> _Items:
    paths = sorted(
        path
        for path in folder.rglob("*")
        if path.suffix.lower() in IMAGE_ENDINGS and not path.name.startswith(".")
    )
    if not paths:
        raise EmbeddingError(f"{folder}: the folder holds no image ({', '.join(IMAGE_ENDINGS)}).")
    inside = [path.relative_to(folder) for path in paths]
    columns = {"id": [str(path) for path in inside]}
    if all(len(path.parts) > 1 for path in inside):
        columns["label"] = [path.parts[0] for path in inside]
    elif any(len(path.parts) > 1 for path in inside):
        loose = next(path for path in inside if len(path.parts) == 1)
        raise EmbeddingError(
            f"{folder}: some images are in folders of classes, but {str(loose)!r} is not; move it."
        )
    keys = [_key(path) for path in paths]
    return _Items(pa.table(columns), keys, lambda row: _image(paths[row], size), files=True)


def _images_in_npz(path: Path) -> _Items:
    try:
        with np.load(path, allow_pickle=False) as held:
            arrays = {name: held[name] for name in held.files}
    except Exception:  # damaged archives fail in many ways
        raise EmbeddingError(f"{path} is not a readable npz file.") from None
    images = arrays.pop("images", None)
    if images is None or images.dtype != np.uint8 or images.ndim not in (3, 4):
        raise EmbeddingError(
            f"{path} needs an array 'images' of bytes, (n, height, width) or (n, height, width, 3)."
        )
    tensor = torch.from_numpy(images if images.ndim == 4 else images[..., None]).movedim(-1, 1)
    columns = {"id": [f"row {row + 1}" for row in range(len(images))]}
    for name, values in arrays.items():
        if values.shape != (len(images),):
            raise EmbeddingError(f"{path}: {name!r} must have one value per image.")
        columns["label" if name == "labels" else name] = values
    keys = [hashlib.sha256(image.tobytes()).hexdigest() for image in images]
    return _Items(pa.table(columns), keys, lambda row: tensor[row])


def _read_table(path: Path) -> pa.Table:
    from pyarrow import parquet

    if path.name.lower().endswith(".parquet"):
        try:
            return parquet.read_table(path)
        except (OSError, pa.ArrowException):
            raise TableError(path, "it cannot be read, or it is damaged.") from None
    dialect = sniff(path)
    header = {name: name for name in dialect.header}
    return parse_text(path, dialect, header, header)


def _key(path: Path | None) -> str:
    """Return a text that changes when a file changes."""
    try:
        found = path.stat() if path is not None else None
    except OSError:
        found = None
    return f"{path} missing" if found is None else f"{path} {found.st_size} {found.st_mtime_ns}"


def _image(path: Path | None, size: int) -> Tensor:
    """Decode an image: upright, in RGB, its middle square of ``size × size`` pixels."""
    from PIL import Image, ImageOps

    if path is None:
        raise _UnreadableError("the path is missing")
    try:
        with Image.open(path, formats=_FORMATS) as opened:
            upright = ImageOps.exif_transpose(opened).convert("RGB")
            fitted = ImageOps.fit(upright, (size, size), Image.Resampling.BILINEAR)
    except FileNotFoundError:
        raise _UnreadableError("there is no such file") from None
    except Image.DecompressionBombError:
        raise _UnreadableError("the image is too large") from None
    except Exception:  # a damaged image fails in many ways
        raise _UnreadableError("the image is damaged or its format is unknown") from None
    return torch.from_numpy(np.array(fitted)).movedim(-1, 0)
