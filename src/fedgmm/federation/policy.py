"""A site's own rules: what a server may ask, in which order, and a record of everything that left.

A server could learn rows by sending the same site many slightly different requests. So a site agrees to
one plan, with the first requests of a run, and keeps it on its own disk (``agreement.json``): how the table
is read and split, the options, the number of rounds, the preprocessing. It then replies to one start and
to one request per round, in order. A request may be repeated, because messages get lost, but only
unchanged, so that the reply is the same. Only the owner can make the site forget the plan.

The privacy of a run is part of the plan. The owner's limits (rounds, ``ε`` and ``δ``)
are stronger than any request. Those of privacy are for all runs together: a ledger on the site's disk
counts every noisy release before it leaves.

Every request is written to ``audit.jsonl`` before its reply leaves, with the names and shapes of the
numbers in the reply, or with the reason of the refusal.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

from fedgmm.federation.messages import Message, MessageError, digest_of, hash_of, one_line
from fedgmm.federation.settings import SiteSettings
from fedgmm.files import naming, private_folder, write_atomically
from fedgmm.privacy.accounting import Release, mu_of
from fedgmm.privacy.ledger import Budget, BudgetError, Entry, Ledger, witness_of
from fedgmm.privacy.settings import Privacy
from fedgmm.privacy.site_sets import Released
from fedgmm.training.selection import MOST_TRIALS

_EXACT = ("moments", "covariance", "start", "cells", "assigned", "round", "score")
"""Kinds of requests for sums without noise."""

TRAINING_REQUESTS = (*_EXACT[1:], "release", "finish")
"""Kinds of requests that belong to a run."""

_VERSION = 1
_MOST_STARTS = 3  # runs that end before their first round, such as when a server is restarted
_MOST_HELLOS = 3  # summaries: the first, and more columns as categories
_SMALLEST_TRAINING_SHARE = 1 / 3
_LARGEST_DELTA = 1e-5  # with --max-epsilon alone: with a large delta, epsilon means nothing
_PHASES = {"warmup": 0, "main": 1}
_FREE = ("components", "learners", "ridge", "rounds", "patience", "covariance_type", "device")
"""Options in which the trials of automatic sizes may differ from the run."""


class RefusedRequestError(MessageError):
    """A request that the site's rules do not allow; the text says which rule."""


class LimitError(RefusedRequestError):
    """A request beyond the owner's limits, so that asking again does not help."""


class Policy:
    """The rules of one site, with their state on its disk."""

    def __init__(self, settings: SiteSettings) -> None:
        home, self._limits = settings.out, settings
        self._agreement, self.log = home / "agreement.json", home / "audit.jsonl"
        self.ledger = Ledger(home, witness_of(home, settings.key))
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
        """Raise ``RefusedRequestError`` unless the site may reply; remember that it was asked."""
        before = json.dumps(self._state)
        try:
            self._check(request)
        except Exception:
            self._state = json.loads(before)
            raise
        self._save(before)

    def _save(self, before: str = "") -> None:
        """Write the state to the disk, unless it is as before."""
        now = json.dumps(self._state)
        if now != before:
            write_atomically(self._agreement, now.encode())

    def _check(self, request: Message) -> None:
        if self.privacy.is_noised and request.kind in _EXACT:
            raise RefusedRequestError(
                f"the server asks for {request.kind!r}, but the plan of this run has noisy sums only."
            )
        if request.kind == "release" and not self.privacy.is_noised:
            raise RefusedRequestError("the plan of this run has no differential privacy.")
        if request.kind == "hello":
            if request.facts.get("agree"):
                self._check_hello(request)
            else:  # a site that joins later agrees to the plan without a summary
                self._pin("plan", request.facts.get("plan"), "another plan")
        elif request.kind == "covariance":
            # table, split and preprocessing are those of the plan, so the reply is always the same
            if self._pinned_options(request).get("pca") is None:
                raise RefusedRequestError(
                    "the server asks for second moments, but its options have no pca."
                )
            self._check_privacy()
        elif request.kind in TRAINING_REQUESTS:
            self._check_run(request)
        elif request.kind == "moments":
            self._pin_table(request)
            self._check_privacy()

    def _check_hello(self, request: Message) -> None:
        self._pin_table(request)
        self._pin("plan", request.facts.get("plan"), "another plan")
        asked = digest_of(request, ("table", "as_categories", "min_rows"))
        hellos = self._state["hellos"]
        if asked not in hellos and len(hellos) >= _MOST_HELLOS:
            raise RefusedRequestError("the server asked for too many summaries of the table.")
        if asked not in hellos:
            self._check_privacy()
            hellos.append(asked)

    def _pin_table(self, request: Message) -> None:
        """Raise unless the table is read and split as in the plan, with enough training rows."""
        table = request.facts.get("table")
        self._pin("table", table, "another way to read and split the table")
        split = table.get("split") if isinstance(table, Mapping) else None
        share = split[0] if isinstance(split, (list, tuple)) and split else 0.0
        if not isinstance(share, (int, float)) or share < _SMALLEST_TRAINING_SHARE:
            raise RefusedRequestError(
                f"the server asks for a training split of {share!r:.20}, in which single rows could be "
                "recognised; this site takes part with at least a third of its rows."
            )

    def _pinned_options(self, request: Message) -> Mapping[str, Any]:
        """Return the options of a request about rows, which must keep to the plan."""
        facts = request.facts
        options = facts.get("options")
        if not isinstance(options, Mapping):
            raise RefusedRequestError("the request has no training options.")
        self._pin_table(request)
        self._pin("preprocessing", hash_of(facts.get("preprocessing")), "another preprocessing")
        common = {name: value for name, value in options.items() if name not in _FREE}
        self._pin("options", common, "other training options")
        if facts.get("privacy") != self._planned("privacy"):
            raise RefusedRequestError("the server asks for other privacy than its plan.")
        return options

    def _check_run(self, request: Message) -> None:
        run, facts = str(request.facts.get("run")), request.facts
        options = self._pinned_options(request)
        kept = {name: value for name, value in options.items() if name not in ("rounds", "device")}
        parts = [kept, facts.get("precision"), facts.get("min_rows")]
        if "projection" in facts:  # principal components stay the same in a run
            parts.append(facts["projection"])
        setup = hash_of(parts)
        state = self._state["runs"].get(run)
        if state is None:
            self._check_room()
            self._check_privacy()
            state = self._state["runs"][run] = {"setup": setup, "rounds": None, "asked": {}}
        if state["setup"] != setup:
            raise RefusedRequestError("the server changed the training options of its run.")
        if state["rounds"] != options.get("rounds"):
            # the number of rounds decides the noise of each
            if self.privacy.is_noised and state["rounds"] is not None:
                raise RefusedRequestError("the server changed the number of rounds of its run.")
            state["rounds"] = self._checked_rounds(options.get("rounds"))
        self._in_order(request, state)

    def _check_room(self) -> None:
        """Raise unless the site may take part in one more run."""
        runs = self._state["runs"].values()
        trained = sum(bool({"round", "release"} & set(one["asked"])) for one in runs)
        most = 1 + MOST_TRIALS if self._planned("trials") else 1
        if trained >= most or len(runs) - trained >= _MOST_STARTS:
            raise RefusedRequestError(
                "this site has agreed to another run; its owner can start the client with --forget to "
                "take part in a new one."
            )

    def _checked_rounds(self, rounds: Any) -> int:
        if type(rounds) is not int:
            raise RefusedRequestError("the request has no number of rounds.")
        allowed = self._limits.max_rounds or self._planned("rounds") or self._state.get("rounds")
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
        digest = digest_of(request, ("phase", "round", "since", "clusters", "most_rows"))
        phase = _PHASES.get(str(request.facts.get("phase")), 1)
        number = request.facts.get("round", 0)
        if type(number) is not int:
            raise RefusedRequestError("the request has no number of a round.")
        if kind == "score" and not (
            request.facts["options"].get("patience") or self._planned("trials")
        ):
            raise RefusedRequestError(
                "the server asks for scores, but its plan has neither patience nor a choice of sizes."
            )
        if kind in ("round", "score") and number > (state["rounds"] or 0):
            raise RefusedRequestError(f"round {number} is beyond the last of the run.")
        if asked.get(kind, [None])[-1] == digest:
            return
        if kind in ("round", "score") and self._planned("trials"):
            self._in_short_run(request, state, phase, digest)
        if kind in ("start", "cells", "assigned", "finish"):
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

    def _in_short_run(
        self, request: Message, state: dict[str, Any], phase: int, digest: str
    ) -> None:
        """Let a restarted server repeat a short run from its first round, with the same requests.

        The site's own state is then the same as before, unless the server leaves rounds out.
        """
        kind, number = request.kind, request.facts["round"]
        seen = state.setdefault("seen", {}).setdefault(kind, {})
        asked, place = state["asked"], f"{phase} {number}"
        if place not in seen:
            if any([phase, number] < [*map(int, one.split())] for one in seen):
                raise RefusedRequestError(f"the server asked about round {number} too late.")
            seen[place] = digest
            return
        since, now = request.facts.get("since", 0), asked.get("round", [0, 0])[1]
        in_order = number == now if kind == "score" else number >= now
        if seen[place] != digest or (since and (since > now or not in_order)):
            raise RefusedRequestError(
                f"the server asked about round {number} again, with other numbers."
            )
        asked.pop(kind)

    # ------------------------------------------------------------------ privacy

    def _planned(self, name: str) -> Any:
        """Return a part of the plan that the site agreed to; ``None`` if the plan lacks it."""
        plan = self._state.get("plan")
        return plan.get(name) if isinstance(plan, Mapping) else None

    @property
    def privacy(self) -> Privacy:
        """The privacy of the plan that the site agreed to."""
        try:
            return _privacy_of(json.dumps(self._planned("privacy") or {}))
        except (TypeError, ValueError) as error:
            raise RefusedRequestError(f"the plan's privacy is not valid: {error}") from None

    def released(self, run: str) -> Released:
        """Return the sums of a run that the site has helped to open, with the sets of sites of all runs.

        Some sums are the same in every run, so a new run must not show single sites, either.
        """
        runs = self._state.get("released", {})
        sets = [names for one in runs.values() for names in one["sets"]]
        unique = [list(names) for names in dict.fromkeys(map(tuple, sets))]
        return Released(dict(runs.get(run, {}).get("purposes", {})), unique)

    def keep_released(self, run: str, released: Released) -> None:
        """Write the sums of a run that are opened, before the reply leaves."""
        if asdict(self.released(run)) != asdict(released):
            self._state.setdefault("released", {})[run] = asdict(released)
            self._save()

    def is_protected(self, request: Message) -> bool:
        """Whether texts of errors are hidden: the plan has masks or noise, or the owner set limits."""
        plan = request.facts.get("plan")
        asked = plan.get("privacy") if isinstance(plan, Mapping) else request.facts.get("privacy")
        return bool(asked or self._planned("privacy")) or self._is_limited

    @property
    def _is_limited(self) -> bool:
        """Whether the owner set a limit of privacy, and so sends noisy sums only."""
        return (self._limits.max_epsilon, self._limits.max_delta) != (None, None)

    def _check_privacy(self) -> None:
        """Raise unless the plan's privacy is within the owner's limits, with what was spent before."""
        limits, privacy = self._limits, self.privacy
        if privacy.epsilon is None or privacy.delta is None:
            if self._is_limited:
                raise LimitError(
                    "the server's run has no differential privacy, and this site's owner set a limit with "
                    "--max-epsilon or --max-delta, so it sends noisy sums only."
                )
            return
        largest = limits.max_delta
        if largest is None and limits.max_epsilon is not None:
            largest = _LARGEST_DELTA
        if not privacy.secure_aggregation:
            raise LimitError(
                "a site adds a part of the noise only, so a run with noise needs secure_aggregation."
            )
        for name, value, most in (
            ("epsilon", privacy.epsilon, limits.max_epsilon),
            ("delta", privacy.delta, largest),
        ):
            if most is not None and value > most:
                raise LimitError(
                    f"the server asks for {name}={value:g}, but this site's owner allows at most "
                    f"{most:g} (--max-{name})."
                )
        try:
            whole = Release(mu_of(privacy.epsilon, privacy.delta))
            self.ledger.check(privacy.unit, [whole], self._limit(privacy))
        except BudgetError as error:
            raise LimitError(f"the server asks for a run, but {error}") from None

    def _limit(self, privacy: Privacy) -> Budget | None:
        """Return the owner's limit for all runs together."""
        if self._limits.max_epsilon is None or privacy.delta is None:
            return None
        return Budget(self._limits.max_epsilon, self._limits.max_delta or privacy.delta)

    def charge(self, request: Message, release: Release, table: str) -> None:
        """Count a noisy release from a table on the disk; it may leave afterwards.

        Raises ``LimitError`` beyond the plan or the owner's limit, ``LedgerError`` for a damaged ledger.
        """
        privacy = self.privacy
        if privacy.epsilon is None or privacy.delta is None:
            raise RefusedRequestError("the plan of this run has no differential privacy.")
        what = _what(request)
        entry = Entry(release, what, str(request.facts.get("run")), table, privacy.unit)
        try:
            plan = Budget(privacy.epsilon, privacy.delta)
            self.ledger.charge(entry, self._limit(privacy), plan)
        except BudgetError as error:
            raise LimitError(f"the server asks for a release, but {error}") from None

    def is_charged(self, request: Message) -> bool:
        """Return whether the release that replies to a request is in the ledger."""
        run, what = str(request.facts.get("run")), _what(request)
        return any((one.run, one.what) == (run, what) for one in self.ledger.entries())

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
        private_folder(self.log.parent)
        with naming(self.log), self.log.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")


@lru_cache(maxsize=4)
def _privacy_of(record: str) -> Privacy:
    """Return the privacy of a plan, which every request needs several times."""
    return Privacy.from_record(json.loads(record))


def _what(request: Message) -> str:
    """Return the name of a release in the ledger."""
    number = request.facts.get("round")
    return request.kind if number is None else f"{request.kind} {number}"


def _nothing() -> dict[str, Any]:
    """Return the state of a site that has agreed to nothing yet."""
    return {"version": _VERSION, "hellos": [], "runs": {}}


def read_record(home: Path) -> Iterator[dict[str, Any]]:
    """Yield the entries of a site's record, or raise ``ValueError``."""
    path = home / "audit.jsonl"
    if not path.is_file():
        raise ValueError(f"{home} has no record of requests; name the folder of a site (--out).")
    with path.open(encoding="utf-8") as file:
        for line in file:
            try:
                yield json.loads(line)
            except ValueError:  # the last line, after a crash
                yield {"time": "", "request": "unreadable line"}
