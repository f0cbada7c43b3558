"""A ledger of privacy: every noisy release about a table, on the owner's disk, across runs and restarts.

The file ``ledger.jsonl`` only grows. Each line holds the hash of the line before, so an edited, missing or
reordered line is found. A second file, the *witness*, lies elsewhere and holds the number of lines and the
last hash of each ledger. So a shortened ledger, an older copy and a deleted ledger are found, too.

A release may leave after :meth:`Ledger.charge` returns. By then the line and the witness are on the disk.
A process that is killed in between has counted a release that never left, which is safe.

Two things cannot be found: the owner restores ledger and witness together, for example with a snapshot of
the whole disk, and the owner edits both on purpose. A ledger protects the owner, not others from the owner.

The limit counts all tables of a ledger together, because an edited or longer table has a new fingerprint
but mostly the same rows.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

from fedgmm.files import write_atomically
from fedgmm.privacy.accounting import Release, spent
from fedgmm.privacy.settings import UNITS
from fedgmm.support.checks import Positive, check_choice, check_fields, number

LEDGER = "ledger.jsonl"
"""Name of the ledger in the folder of a site or of a run."""

RUN_WITNESS = ".ledger.witness"
"""Name of the witness in the folder of a run in one process."""

_VERSION = 1
_TOLERANCE = 1e-9  # relative; the shares of a budget add up to the budget only to rounding


class LedgerError(ValueError):
    """A ledger that cannot be trusted, with the reason; nothing may leave."""


class BudgetError(ValueError):
    """A release that exceeds a limit."""


@dataclass(frozen=True)
class Budget:
    """An amount of privacy: the largest ``ε``, computed at a ``δ``."""

    epsilon: Positive
    delta: Annotated[float, number(above=0, below=1)]

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True)
class Entry:
    """One line of a ledger: noisy sums that were about to leave."""

    release: Release
    what: str  # such as "round 3"
    run: str
    table: str  # fingerprint
    unit: str  # of UNITS
    time: str = ""  # UTC


def witness_of(folder: Path, key: Path | None = None) -> Path:
    """Return the witness of a folder's ledger: beside the site's private key, or beside the folder."""
    if key is not None:
        return key.with_suffix(".ledger")
    folder = folder.resolve()
    return folder.with_name(f".{folder.name}.ledger")


class Ledger:
    """The ledger of one folder; methods raise ``LedgerError`` if it cannot be trusted.

    Args:
        folder: of a site or of a run; created with the first release.
        witness: a file in another folder, such as beside the site's private key. Several ledgers may
            share it.
    """

    def __init__(self, folder: Path, witness: Path) -> None:
        self.path, self.witness = Path(folder) / LEDGER, Path(witness)

    @classmethod
    def of_runs(cls, folder: Path) -> Ledger:
        """Return the ledger of the runs in one process whose checkpoints are in a folder.

        The witness is in the same folder, so that a run that is deleted leaves nothing behind.
        """
        return cls(folder, Path(folder) / RUN_WITNESS)

    @classmethod
    def found(cls, folder: Path) -> Ledger:
        """Return the ledger of a folder, with the witness that its first line names."""
        for home in (Path(folder), Path(folder) / "checkpoint"):
            if (home / RUN_WITNESS).is_file():
                return cls.of_runs(home)
        path = Path(folder) / LEDGER
        if not path.is_file():
            raise LedgerError(
                f"{folder} has no ledger: no noisy release has left it. Only runs with epsilon write one."
            )
        try:
            with path.open("rb") as file:
                return cls(folder, Path(json.loads(file.readline())["witness"]))
        except (ValueError, TypeError, KeyError):
            raise LedgerError(f"{path} is damaged in line 1; restore the newest copy.") from None

    # ------------------------------------------------------------------ reading

    def entries(self) -> list[Entry]:
        """Return all releases that were counted."""
        return self._verified()[0]

    def _verified(self) -> tuple[list[Entry], str, str, int]:
        """Return the entries, the ledger's id, the hash of the last line, and the bytes to keep."""
        witnesses = self._witnesses()
        if not self.path.exists():
            return self._new(witnesses)
        content = self.path.read_bytes()
        complete = content[: content.rfind(b"\n") + 1]
        lines = complete.splitlines()
        if not lines:  # killed while the first line was written
            return self._new(witnesses)
        identity, entries, hashes = self._chain(lines)
        known = witnesses.get(identity)
        if known is None:
            raise LedgerError(
                f"{self.path} has no witness in {self.witness}, so an older copy could not be recognised; "
                "restore that file from where the ledger was written."
            )
        count = known["count"]
        if count >= len(hashes) or hashes[count] != known["hash"]:
            raise LedgerError(
                f"{self.path} has {len(entries)} releases, but {self.witness} knows of {count}: it was "
                "shortened, or an older copy was put back; restore the newest copy."
            )
        # A line without its end was being written when the process was killed. Its release cannot have
        # left, because the witness is written in between.
        return entries, identity, hashes[-1], len(complete)

    def _new(self, witnesses: dict[str, Any]) -> tuple[list[Entry], str, str, int]:
        here = str(self.path.resolve())
        if any(one["path"] == here and one["count"] for one in witnesses.values()):
            raise LedgerError(
                f"{self.path} is missing, but {self.witness} knows of releases in it; restore the newest "
                "copy."
            )
        return [], "", "", 0

    def _chain(self, lines: list[bytes]) -> tuple[str, list[Entry], list[str]]:
        """Return the ledger's id, its entries, and the hashes of all lines; every line is checked."""
        identity, entries, hashes = "", [], [""]
        for place, line in enumerate(lines):
            try:
                record = json.loads(line)
                if record["before"] != hashes[-1] or record["number"] != place:
                    raise ValueError
                if place == 0:
                    if record["version"] != _VERSION:
                        raise LedgerError(f"{self.path} was written by another version of fedgmm.")
                    identity = str(record["ledger"])
                else:
                    entries.append(_entry(record))
            except LedgerError:
                raise
            except (ValueError, TypeError, KeyError):
                raise LedgerError(
                    f"{self.path} is damaged in line {place + 1}; restore the newest copy."
                ) from None
            hashes.append(hashlib.sha256(line).hexdigest())
        return identity, entries, hashes[1:]

    def _witnesses(self) -> dict[str, Any]:
        """Return for each ledger that the witness knows: count, hash, path and tables."""
        if not self.witness.exists():
            return {}
        try:
            found = json.loads(self.witness.read_bytes())
            return {
                str(name): {
                    "count": int(one["count"]),
                    "hash": str(one["hash"]),
                    "path": str(one["path"]),
                    "tables": [str(table) for table in one["tables"]],
                }
                for name, one in found["ledgers"].items()
            }
        except (ValueError, TypeError, KeyError, AttributeError):
            raise LedgerError(f"{self.witness} is damaged; restore the newest copy.") from None

    def spent(self, unit: str, delta: float) -> float:
        """Return the ``ε`` of all releases that concern a unit."""
        return spent(_releases(self.entries(), unit), delta)

    # ------------------------------------------------------------------ writing

    def check(self, unit: str, releases: Iterable[Release], limit: Budget | None) -> None:
        """Raise ``BudgetError`` if some releases would exceed the limit; nothing is counted."""
        _check_limit(self.entries(), unit, list(releases), limit)

    def charge(self, entry: Entry, limit: Budget | None = None, plan: Budget | None = None) -> None:
        """Count a release, on the disk, before it leaves.

        A release that would exceed the owner's ``limit`` for all runs, or the ``plan`` of this run, raises
        ``BudgetError``; it is not counted and must not leave. The time of the entry is set here.
        """
        from filelock import FileLock

        check_choice("unit", entry.unit, UNITS)
        self.witness.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{self.witness}.lock"):
            entries, identity, last, size = self._verified()
            for name, one in self._witnesses().items():
                if name != identity and entry.table in one["tables"]:
                    raise LedgerError(
                        f"Releases about this table are counted in {one['path']}; use that folder."
                    )
            _check_limit(entries, entry.unit, [entry.release], limit)
            own = [one for one in entries if one.run == entry.run]
            _check_limit(own, entry.unit, [entry.release], plan, "this run's budget")
            if not identity:
                identity = secrets.token_hex(16)
                witness = str(self.witness.resolve())
                header = {"version": _VERSION, "ledger": identity, "witness": witness}
                first = _line(0, "", header)
                last, size = _hash(first), len(first)
                # the witness first, because a ledger without one is refused
                self._write_witness(identity, 0, last, [])
                self.path.parent.mkdir(parents=True, exist_ok=True)
                write_atomically(self.path, first)
            line = _line(len(entries) + 1, last, _record(entry))
            with self.path.open("r+b") as file:
                file.truncate(size)
                file.seek(size)
                file.write(line)
                file.flush()
                os.fsync(file.fileno())
            tables = sorted({*(one.table for one in entries), entry.table})
            self._write_witness(identity, len(entries) + 1, _hash(line), tables)

    def _write_witness(self, identity: str, count: int, last: str, tables: list[str]) -> None:
        witnesses = self._witnesses()
        path = str(self.path.resolve())
        # what a killed process left before its first release
        witnesses = {
            name: one for name, one in witnesses.items() if one["path"] != path or one["count"]
        }
        witnesses[identity] = {"count": count, "hash": last, "path": path, "tables": tables}
        text = json.dumps({"version": _VERSION, "ledgers": witnesses}, indent=1)
        write_atomically(self.witness, text.encode())


@dataclass(frozen=True)
class Account:
    """Numbers of runs and releases about one table and unit, or about all tables, and their ``ε``."""

    table: str | None  # fingerprint; None for all tables together
    unit: str  # of UNITS
    runs: int
    releases: int
    epsilon: float


def accounts(entries: Iterable[Entry], delta: float) -> list[Account]:
    """Return what was spent, per table and unit, and per unit over all tables.

    An account of a unit includes releases about larger units, see :func:`_releases`.
    """
    entries = list(entries)
    found = []
    for unit in (unit for unit in UNITS if any(one.unit == unit for one in entries)):
        concern = [one for one in entries if UNITS.index(one.unit) >= UNITS.index(unit)]
        tables = list(dict.fromkeys(one.table for one in concern))
        for table in [*tables, None] if len(tables) > 1 else tables:
            own = [one for one in concern if table in (one.table, None)]
            releases = _releases(own, unit)
            runs, times = len({one.run for one in own}), sum(one.times for one in releases)
            found.append(Account(table, unit, runs, times, spent(releases, delta)))
    return found


def _releases(entries: Iterable[Entry], unit: str) -> list[Release]:
    """Return the releases that count for a unit; one about a larger unit counts with twice its ``μ``.

    A row that a client loses replaces the client's contribution by another one. That is a change by up to
    twice the contribution, because the old one goes and the new one comes.
    """
    place = UNITS.index(unit)
    return [
        one.release if one.unit == unit else replace(one.release, mu=2 * one.release.mu)
        for one in entries
        if UNITS.index(one.unit) >= place
    ]


def _check_limit(
    entries: list[Entry],
    unit: str,
    releases: list[Release],
    limit: Budget | None,
    name: str = "the limit",
) -> None:
    """Raise if more releases about a unit would exceed a limit.

    The limit holds for that unit, and for each smaller unit that has releases of its own.
    """
    if limit is None:
        return
    new = [Entry(release, "", "", "", unit) for release in releases]
    for one in UNITS[: UNITS.index(unit) + 1]:
        if one != unit and all(entry.unit != one for entry in entries):
            continue
        before = _releases(entries, one)
        epsilon = spent([*before, *_releases(new, one)], limit.delta)
        if epsilon > limit.epsilon * (1 + _TOLERANCE):
            raise BudgetError(
                f"it would spend ε = {epsilon:.3g} per {one} (δ = {limit.delta:g}), and {name} is "
                f"{limit.epsilon:g}, of which {spent(before, limit.delta):.3g} is spent."
            )


def _record(entry: Entry) -> dict[str, Any]:
    release = entry.release
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "mu": release.mu,
        "sampling": release.sampling,
        "times": release.times,
        "what": entry.what,
        "run": entry.run,
        "table": entry.table,
        "unit": entry.unit,
    }


def _entry(record: dict[str, Any]) -> Entry:
    release = Release(record["mu"], record["sampling"], record["times"])
    check_choice("unit", record["unit"], UNITS)
    texts = [str(record[name]) for name in ("what", "run", "table", "unit", "time")]
    return Entry(release, *texts)


def _line(place: int, before: str, record: dict[str, Any]) -> bytes:
    return json.dumps({"number": place, "before": before, **record}).encode() + b"\n"


def _hash(line: bytes) -> str:
    return hashlib.sha256(line.rstrip(b"\n")).hexdigest()
