"""One exchange: ask the sites until enough of them have answered, and say why others do not count."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from fedgmm.federation.assembly import Assembly, Member
from fedgmm.federation.messages import Message
from fedgmm.federation.transport import REPORTED, Failure
from fedgmm.federation.updates import UpdateError
from fedgmm.wording import counted

_MOST_ROWS = 10**12
_TELL_AGAIN = 30.0  # seconds after which it is said again whom the server waits for
_LONGEST_PAUSE = 10.0  # seconds between two attempts of a round that is below its quorum
_LONGEST_REASON = 200


@dataclass
class Exchange:
    """One thing that is asked of all sites.

    Attributes:
        assembly: the sites.
        what: it is, for messages, such as ``round 3``.
        question: to a member, by name.
        note: takes a member's answer, or raises :class:`UpdateError`.
        chosen: who is asked, of all names.
        poll: seconds between two looks at who is there.
        may_refuse: a site whose first answer is a complaint is a late one whose table does not fit.
        found: names of the members whose answers count.
        dropped: why others do not count.
        diverged: what sites said whose training left all bounds.
    """

    assembly: Assembly
    what: str
    question: Callable[[str], Message]
    note: Callable[[Member, Message], None]
    chosen: Callable[[tuple[str, ...]], tuple[str, ...]]
    poll: float
    may_refuse: bool = False
    found: set[str] = field(default_factory=set)
    dropped: dict[str, str] = field(default_factory=dict)
    diverged: list[str] = field(default_factory=list)

    def run(self) -> str | None:
        """Ask until there are answers enough.

        Below the quorum it waits for as long as it takes, and says for whom. Answers that count are
        kept meanwhile: the model does not change before the exchange is over.

        Returns:
            ``None``, or why there can never be enough: everybody is here, but training diverged.
        """
        assembly, told, told_at, pause = self.assembly, "", 0.0, self.poll
        while True:
            chosen = self.chosen(assembly.names)
            quorum = min(assembly.settings.quorum, len(chosen))
            here = set(assembly.connected())
            names = [name for name in chosen if name in here and name not in self.found]
            self.diverged.clear()
            if names or assembly.greetings_due():
                for name, answer in assembly.ask(
                    {name: self.question(name) for name in names}, greet=False
                ).items():
                    self._take(name, answer)
            if len(self.found) >= quorum > 0:
                return None
            if self.diverged and not assembly.missing(chosen):
                return f"{self.what}: {self.diverged[0]}"
            line = self._waiting(chosen, quorum)
            if line != told or time.monotonic() - told_at > _TELL_AGAIN:
                assembly.notify(line)
                told, told_at = line, time.monotonic()
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE) if names else self.poll

    def _waiting(self, chosen: tuple[str, ...], quorum: int) -> str:
        missing = [name for name in chosen if name not in self.found]
        return (
            f"{self.what}: {len(self.found)} of at least "
            f"{counted(max(quorum, 1), 'client has', 'clients have')} answered; waiting for "
            f"{', '.join(missing) or 'clients'}"
        )

    def _take(self, name: str, answer: Message | Failure) -> None:
        """One answer: it counts, or the reason why it does not is told."""
        member = self.assembly.members[name]
        if isinstance(answer, Failure):
            if self.may_refuse and member.rows is None and answer.reason.startswith(REPORTED):
                self.assembly.refuse(name, answer.reason.removeprefix(REPORTED))
                return
            self._drop(name, f"no update from {name}: ", answer.reason)
            return
        if "diverged" in answer.facts:
            reason = str(answer.facts["diverged"])[:_LONGEST_REASON]
            self.diverged.append(reason)
            self._drop(name, f"no update from {name}: ", reason)
            return
        try:
            self.note(member, answer)
        except UpdateError as error:
            self._drop(name, f"the update of {name} is dropped: ", str(error))
            return
        self.found.add(name)
        self.dropped.pop(name, None)

    def _drop(self, name: str, told: str, reason: str) -> None:
        if self.dropped.get(name) != reason:
            self.dropped[name] = reason
            self.assembly.notify(f"{self.what}: {told}{reason}")


def declared_rows(member: Member, answer: Message) -> int:
    """The training rows of a site, which stay as they were declared first.

    Raises:
        UpdateError: another number, or none.
    """
    rows = answer.facts.get("rows")
    if type(rows) is not int or not 0 < rows <= _MOST_ROWS:
        raise UpdateError(f"it declares {rows!r:.40} rows")
    if member.rows is not None and rows != member.rows:
        raise UpdateError(f"it declares {counted(rows, 'row')}, but had declared {member.rows}")
    return rows


def shared_validation(told: Mapping[str, object]) -> tuple[float, float]:
    """Rows and right predictions that sites shared, summed; what makes no sense is left out."""
    rows = right = 0.0
    for own in told.values():
        if not isinstance(own, Mapping):
            continue
        n, good = own.get("rows"), own.get("right")
        if isinstance(n, (int, float)) and isinstance(good, (int, float)) and 0 <= good <= n:
            rows, right = rows + n, right + good
    return rows, right
