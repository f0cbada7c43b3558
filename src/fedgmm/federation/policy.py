"""A site's own rules: what a server may ask, in which order, and a record of everything that left.

A server could learn rows by asking the same site many slightly different questions. So a site agrees to
one plan, with the first requests of a run, and keeps it on its own disk (``agreement.json``): how the table
is read and split, the options, the number of rounds, the preprocessing. It then replies to one start and
to one request per round, in order. A request may be repeated, because messages get lost, but only
unchanged, so that the reply is the same. Only the owner can make the site forget the plan.

Every request is written to ``audit.jsonl`` before its reply leaves, with the names and shapes of the
numbers in the reply, or with the reason of the refusal.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from fedgmm.federation.messages import Message, MessageError, one_line
from fedgmm.files import write_atomically

TRAINING_REQUESTS = ("start", "assigned", "round", "score", "finish")
"""Kinds of requests that belong to a run."""

_VERSION = 1
_MOST_STARTS = 3  # runs that end before their first round, such as when a server is restarted
_MOST_TRIALS = 16
_MOST_HELLOS = 3  # summaries: the first, and more columns as categories
_SMALLEST_TRAINING_SHARE = 1 / 3
_PHASES = {"warmup": 0, "main": 1}
_FREE = ("components", "learners", "rounds", "patience", "covariance_type", "device")
"""Options in which the trials of automatic sizes may differ from the run."""


class RefusedRequestError(MessageError):
    """A request that the site's rules do not allow; the text says which rule."""


class Policy:
    """The rules of one site, with their state on its disk.

    Args:
        home: the site's folder.
        max_rounds: rounds that the owner allows; ``None`` allows those of the server's first plan.
    """

    def __init__(self, home: Path, max_rounds: int | None = None) -> None:
        self._agreement, self.log = home / "agreement.json", home / "audit.jsonl"
        self._max_rounds = max_rounds
        self._state = _nothing()
        if self._agreement.is_file():
            try:
                found = json.loads(self._agreement.read_bytes())
            except ValueError:
                found = None
            if not isinstance(found, dict) or found.get("version") != _VERSION:
                raise ValueError(
                    f"{self._agreement} is damaged or of another version; start the client with --forget "
                    "to agree to a new plan."
                )
            self._state = found

    def forget(self) -> None:
        """Forget the plan, so that the site can take part in another run; the record stays."""
        self._agreement.unlink(missing_ok=True)
        self._state = _nothing()

    # ------------------------------------------------------------------ requests

    def check(self, request: Message) -> None:
        """Raise unless the site may reply to a request; remember that it was asked.

        Raises:
            RefusedRequestError: the rule that the request breaks.
        """
        before = json.dumps(self._state)
        try:
            self._check(request)
        except RefusedRequestError:
            self._state = json.loads(before)
            raise
        if json.dumps(self._state) != before:
            write_atomically(self._agreement, json.dumps(self._state, indent=1).encode())

    def _check(self, request: Message) -> None:
        if request.kind == "hello":
            if request.facts.get("agree"):
                self._check_hello(request)
        elif request.kind in TRAINING_REQUESTS:
            self._check_run(request)

    def _check_hello(self, request: Message) -> None:
        table = request.facts.get("table")
        self._pin("table", table, "another way to read and split the table")
        self._pin("plan", request.facts.get("plan"), "another plan")
        split = table.get("split") if isinstance(table, Mapping) else None
        share = split[0] if isinstance(split, (list, tuple)) and split else 0.0
        if not isinstance(share, (int, float)) or share < _SMALLEST_TRAINING_SHARE:
            raise RefusedRequestError(
                f"the server asks for a training split of {share!r:.20}, and so few rows could be "
                "recognised; this site takes part with a third of its rows or more."
            )
        asked = _digest(request, ("table", "as_categories", "min_rows"))
        hellos = self._state["hellos"]
        if asked not in hellos and len(hellos) >= _MOST_HELLOS:
            raise RefusedRequestError("the server asked for too many summaries of the table.")
        if asked not in hellos:
            hellos.append(asked)

    def _check_run(self, request: Message) -> None:
        run, facts = str(request.facts.get("run")), request.facts
        options = facts.get("options")
        if not isinstance(options, Mapping):
            raise RefusedRequestError("the request has no training options.")
        self._pin("table", facts.get("table"), "another way to read and split the table")
        self._pin("preprocessing", _hash(facts.get("preprocessing")), "another preprocessing")
        common = {name: value for name, value in options.items() if name not in _FREE}
        self._pin("options", common, "other training options")
        kept = {name: value for name, value in options.items() if name not in ("rounds", "device")}
        setup = _hash([kept, facts.get("precision"), facts.get("min_rows")])
        state = self._state["runs"].get(run)
        if state is None:
            self._check_room()
            state = self._state["runs"][run] = {"setup": setup, "rounds": None, "asked": {}}
        if state["setup"] != setup:
            raise RefusedRequestError("the server changed the training options of its run.")
        if state["rounds"] != options.get("rounds"):
            state["rounds"] = self._checked_rounds(options.get("rounds"))
        self._in_order(request, state)

    def _check_room(self) -> None:
        """Raise unless the site may take part in one more run."""
        runs = self._state["runs"].values()
        trained = sum("round" in one["asked"] for one in runs)
        trials = bool((self._state.get("plan") or {}).get("trials"))
        most = 1 + _MOST_TRIALS if trials else 1
        if trained >= most or len(runs) - trained >= _MOST_STARTS:
            raise RefusedRequestError(
                "this site has agreed to another run; its owner can start the client with --forget to "
                "take part in a new one."
            )

    def _checked_rounds(self, rounds: Any) -> int:
        if type(rounds) is not int:
            raise RefusedRequestError("the request has no number of rounds.")
        planned = (self._state.get("plan") or {}).get("rounds")
        allowed = self._max_rounds or planned or self._state.get("rounds")
        if allowed is not None and rounds > allowed:
            raise RefusedRequestError(
                f"the server asks for {rounds} rounds, but this site agreed to {allowed}; its owner can "
                f"start the client with --max-rounds {rounds}."
            )
        self._state.setdefault("rounds", rounds)
        return rounds

    def _in_order(self, request: Message, state: dict[str, Any]) -> None:
        """Raise unless a request is the next one of its run, or an unchanged repetition."""
        kind, asked = request.kind, state["asked"]
        digest = _digest(request, ("phase", "round", "since", "clusters", "most_rows"))
        phase = _PHASES.get(str(request.facts.get("phase")), 1)
        number = request.facts.get("round", 0)
        if type(number) is not int:
            raise RefusedRequestError("the request has no number of a round.")
        if kind in ("round", "score") and number > (state["rounds"] or 0):
            raise RefusedRequestError(f"round {number} is beyond the last of the run.")
        if asked.get(kind, [None])[-1] == digest:
            return
        if kind in ("start", "assigned", "finish"):
            if kind in asked:
                raise RefusedRequestError(
                    f"the server asked for {kind!r} twice, with other numbers."
                )
            if kind != "finish" and "round" in asked and asked["round"][0] >= phase:
                raise RefusedRequestError(f"the server asked for {kind!r} after the first round.")
        elif kind in asked and [phase, number] <= asked[kind][:2]:
            raise RefusedRequestError(
                f"the server asked about round {number} again, with other numbers."
            )
        asked[kind] = [phase, number, digest]

    def _pin(self, name: str, value: Any, what: str) -> None:
        plain = json.loads(json.dumps(value))
        if plain is not None and self._state.setdefault(name, plain) != plain:
            raise RefusedRequestError(
                f"the server asks for {what} than this site agreed to; its owner can start the client "
                "with --forget to agree to a new plan."
            )

    # ------------------------------------------------------------------ the record

    def record(self, request: Message, reply: Message | None, refused: str | None = None) -> None:
        """Append a request and what left with its reply to the record."""
        entry: dict[str, Any] = {
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            "request": request.kind,
            **{n: request.facts[n] for n in ("run", "phase", "round") if n in request.facts},
        }
        if refused is not None:
            entry["refused"] = one_line(refused)
        if reply is not None:
            entry["bytes"] = reply.size
            entry["arrays"] = {name: list(array.shape) for name, array in reply.arrays.items()}
            entry["facts"] = sorted(set(reply.facts) - {"ticket"})
            if "rows" in reply.facts:
                entry["rows"] = reply.facts["rows"]
            summary = reply.facts.get("summary")
            if isinstance(summary, Mapping):
                entry["texts"] = {
                    column["name"]: sorted(column["categories"])
                    for column in summary["columns"]
                    if column["categories"]
                }
                entry["labels"] = sorted(summary["labels"])
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")


def _nothing() -> dict[str, Any]:
    """Return the state of a site that has agreed to nothing yet."""
    return {"version": _VERSION, "hellos": [], "runs": {}}


def read_record(home: Path) -> Iterator[dict[str, Any]]:
    """Yield the entries of a site's record.

    Raises:
        ValueError: there is no record.
    """
    path = home / "audit.jsonl"
    if not path.is_file():
        raise ValueError(f"{home} has no record of requests; name the folder of a site (--out).")
    with path.open(encoding="utf-8") as file:
        for line in file:
            try:
                yield json.loads(line)
            except ValueError:  # the last line, after a crash
                yield {"time": "", "request": "unreadable line"}


def _digest(request: Message, names: tuple[str, ...]) -> str:
    """Return a hash of a request's arrays and of some of its facts."""
    found = hashlib.sha256()
    found.update(request.kind.encode())
    for name in sorted(request.arrays):
        array = np.ascontiguousarray(request.arrays[name])
        found.update(f"{name} {array.dtype} {array.shape}\n".encode())
        found.update(array.tobytes())
    found.update(_hash({name: request.facts.get(name) for name in names}).encode())
    return found.hexdigest()


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
