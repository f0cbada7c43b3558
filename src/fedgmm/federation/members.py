"""The members of a federation: nodes that come and go, the sites behind them, and exchanges.

Every request carries a ticket, a random number that its reply must repeat. A reply to an older request,
or a recorded one, has another ticket and is dropped.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any, ClassVar

from fedgmm.core.sums import SumsError
from fedgmm.data.tables.summaries import ClientSummary
from fedgmm.federation.messages import (
    PROTOCOL,
    REPORTED,
    Failure,
    Message,
    MessageError,
    Notify,
    Reply,
    Transport,
    check_message,
    one_line,
)
from fedgmm.federation.settings import FederationError, FederationSettings
from fedgmm.federation.summaries import SummaryError, summary_from_record, table_record
from fedgmm.federation.wire import WireError
from fedgmm.wording import counted

if TYPE_CHECKING:
    from fedgmm.federation.folders import StartRecord
    from fedgmm.federation.masking import ServerMasks

_NO_REPLY = Failure("there was no reply")
_LONGEST_NAME = 200
_LONGEST_REASON = 200
MOST_ROWS = 10**12  # that a site may declare
_FAREWELL = 5.0  # seconds for the sites to receive the reason why there is no training
_LONGEST_SILENCE = 120.0  # seconds for which a node that does not reply is left alone
_REPEAT_AFTER = 30.0  # seconds after which the missing clients are named again
_KEPT = ("rows", "since", "best_since", "finished", "founder")  # values of members in checkpoints
POLL = 0.5  # seconds between two looks at the connected nodes
LONGEST_PAUSE = 10.0  # seconds between two attempts of a round that is below its quorum


@dataclass
class Member:
    """One site that takes part.

    Attributes:
        node: id of its node; ``None`` if it has not been seen since the server started.
        rows: training rows that it declared; ``None`` until it did.
        since: the last round of this phase in which its update counted; zero before.
        best_since: the same at the best round, if ``patience`` is set.
        summary: of its table, while the federation agrees on columns.
        metrics: of its test rows, if it shares them.
        projection: digest of the principal components that it keeps.
        founder: it was present when the phase began, so its personal part starts where the phase did.
    """

    name: str
    node: str | None = None
    rows: int | None = None
    since: int = 0
    best_since: int = 0
    share_metrics: bool = False
    summary: ClientSummary | None = None
    finished: bool = False
    founder: bool = False
    projection: str | None = None
    metrics: dict[str, float] | None = None

    def record(self) -> dict[str, Any]:
        """Return the values that a checkpoint keeps."""
        return {**{name: getattr(self, name) for name in _KEPT}, "figures": self.metrics}

    @classmethod
    def from_record(cls, name: str, record: Mapping[str, Any]) -> Member:
        """Return a member from the values of a checkpoint."""
        kept = {one: record[one] for one in _KEPT if one in record}
        return cls(name, metrics=record["figures"], **kept)


@dataclass
class _Stranger:
    """A node that is not a member.

    Attributes:
        name: that it gave; empty if it gave none.
        reason: why it is not admitted.
        quiet_until: it is left alone until then, by the monotonic clock.
        silence: seconds for which it is left alone the next time.
        informed: it has received the reason.
        adapt_only: it waits for the finished model.
        served: it has received the model.
    """

    name: str = ""
    reason: str = ""
    quiet_until: float = 0.0
    silence: float = 2.0
    informed: bool = False
    adapt_only: bool = False
    share_metrics: bool = False
    served: bool = False

    @property
    def due(self) -> bool:
        """Whether a request should be sent to the node now."""
        open_request = not self.name or (bool(self.reason) and not self.informed)
        return open_request and time.monotonic() >= self.quiet_until


@dataclass
class Members:
    """The sites of a federation.

    Attributes:
        notify: called with a line about every event.
        run: id of the run.
        members: by name.
        traffic: bytes to and from each member since it was last read.
        masks: of secure aggregation; ``None`` without it.
        record: of the start, for a server that dies before the first checkpoint.
    """

    settings: FederationSettings
    transport: Transport
    notify: Notify
    run: str = ""
    members: dict[str, Member] = field(default_factory=dict)
    traffic: dict[str, list[int]] = field(default_factory=dict)
    masks: ServerMasks | None = None
    record: StartRecord = field(init=False, repr=False)
    _strangers: dict[str, _Stranger] = field(default_factory=dict)
    _reminder: tuple[str, float] = ("", 0.0)  # the last one, and when to repeat it

    def __post_init__(self) -> None:
        notify = self.notify
        # sites choose their names and reasons, so control characters must not reach the log
        self.notify = lambda line: notify(one_line(line))

    # ------------------------------------------------------------------ presence

    @property
    def names(self) -> tuple[str, ...]:
        """All members in the order of their names, connected or not."""
        return tuple(sorted(self.members))

    def connected(self) -> list[str]:
        """Return sorted names of the members whose nodes are connected now."""
        here = self._here()
        owners = {m.node: m for m in self.members.values()}
        for node in here - set(owners):  # a site that came back as another node
            stranger = self._strangers.get(node)
            member = self.members.get(stranger.name) if stranger else None
            if stranger and member and not stranger.adapt_only and member.node not in here:
                member.node, member.share_metrics = node, stranger.share_metrics
                del self._strangers[node]
                self.notify(f"{member.name} is back")
        return sorted(name for name, m in self.members.items() if m.node in here)

    def _here(self) -> set[str]:
        """Return connected nodes; strangers that left are forgotten, and greeted if they return."""
        here = set(self.transport.nodes())
        self._strangers = {node: s for node, s in self._strangers.items() if node in here}
        return here

    def missing(self, names: Iterable[str]) -> list[str]:
        """Return the names that are not connected."""
        here = set(self.connected())
        return [name for name in names if name not in here]

    def waiting_for_model(self) -> list[str]:
        """Return nodes that only want the finished model and have not received it."""
        here = set(self.transport.nodes())
        return [
            n for n, s in self._strangers.items() if n in here and s.adapt_only and not s.served
        ]

    def served(self, node: str) -> None:
        """Note that a node has received the finished model."""
        self._strangers[node].served = True

    def name_of(self, node: str) -> str:
        """Return the name that a node gave, or its id."""
        return self._strangers[node].name if node in self._strangers else node

    # ------------------------------------------------------------------ requests

    def greetings_due(self) -> bool:
        """Return whether a node waits to be greeted, or for the reason of its refusal."""
        return bool(self._due())

    def _due(self) -> list[str]:
        known = {member.node for member in self.members.values()}
        unknown = sorted(self._here() - known)
        return [node for node in unknown if self._strangers.setdefault(node, _Stranger()).due]

    def greetings(self, agree: bool) -> dict[str, Message]:
        """Return requests to unknown nodes for their names; while all ``agree``, for summaries, too."""
        found: dict[str, Message] = {}
        for node in self._due():
            stranger = self._strangers[node]
            if not stranger.name:
                found[node] = self.hello(agree)
            else:
                stranger.informed = True
                found[node] = Message("refused", {}, self.facts(reason=stranger.reason))
        return found

    def hello(self, agree: bool, as_categories: Iterable[str] = ()) -> Message:
        """Return a request for the name and, while the federation agrees, the table's summary."""
        facts = self.facts(agree=agree)
        if agree or self.settings.privacy_facts():
            facts["plan"] = self.settings.plan()
        if agree:
            facts |= {
                "table": table_record(self.settings.config.table),
                "as_categories": sorted(as_categories),
                "min_rows": self.settings.min_rows,
            }
        return Message("hello", {}, facts)

    def facts(self, **facts: Any) -> dict[str, Any]:
        """Return facts of a request, with those that every request has."""
        return {"protocol": PROTOCOL, "run": self.run, **facts}

    def ask(
        self,
        requests: Mapping[str, Message],
        *,
        greet: bool | None = None,
        nodes: Mapping[str, Message] | None = None,
    ) -> Iterator[tuple[str, Reply]]:
        """Send requests to connected members, by name, and yield the replies as they arrive.

        New nodes are greeted, too: ``greet`` is true while the federation agrees on columns, false later,
        and ``None`` does not greet. ``nodes`` are requests to nodes that are not members, whose replies are
        also yielded. Every reply has the right ticket.
        """
        to_nodes = {**({} if greet is None else self.greetings(greet)), **(nodes or {})}
        names = {self.members[name].node: name for name in requests}
        for name, request in requests.items():
            node = self.members[name].node
            assert node is not None
            to_nodes[node] = request
        sent = {
            node: Message(q.kind, q.arrays, {**q.facts, "ticket": secrets.token_hex(16)})
            for node, q in to_nodes.items()
        }
        for request in sent.values():
            try:
                check_message(request, limit_bytes=self.settings.largest_message)
            except MessageError as error:
                raise FederationError(
                    f"The request {request.kind!r} cannot be sent: {error} Raise largest_message."
                ) from None
        if not sent:
            return
        replies = self.transport.ask(dict(sent), self.settings.round_timeout)
        for node, reply in chain(replies, ((node, _NO_REPLY) for node in list(sent))):
            if node not in sent:  # it has replied already
                continue
            request = sent.pop(node)
            checked = self._checked(request, reply)
            who = names.get(node)
            if who is not None:
                yield who, self._counted(who, request, checked)
            elif nodes and node in nodes:
                yield node, checked
            else:
                self._welcome(node, request.kind, checked)

    def _checked(self, request: Message, reply: Reply) -> Reply:
        """Return the reply if it is within all limits and belongs to its request, or a failure."""
        if isinstance(reply, Failure):
            return reply
        try:
            check_message(reply, limit_bytes=self.settings.largest_message)
        except MessageError as error:
            return Failure(f"its message is not accepted: {error}")
        if reply.kind != "reply":
            return Failure(f"its message is a {reply.kind!r}, not a reply")
        if reply.facts.get("ticket") != request.facts["ticket"]:
            return Failure("its message belongs to another request")
        return reply

    def _counted(self, name: str, request: Message, reply: Reply) -> Reply:
        traffic = self.traffic.setdefault(name, [0, 0])
        traffic[0] += request.size
        if isinstance(reply, Failure):
            return reply
        traffic[1] += reply.size
        if reply.facts.get("name") != name:
            return Failure("it replies under another name")
        return reply

    def take_traffic(self) -> dict[str, list[int]]:
        """Return the bytes since the last call."""
        found, self.traffic = self.traffic, {}
        return found

    def reunite(self) -> None:
        """Wait for all members, at most as long as a round may take, and greet new nodes."""
        deadline = time.monotonic() + self.settings.round_timeout
        while (missing := self.missing(self.names)) and time.monotonic() < deadline:
            self.remind(f"waiting for {', '.join(missing)} to come back")
            self.greet_or_pause(agree=False)

    def pause(self) -> None:
        """Wait until the next look at the connected nodes."""
        time.sleep(POLL)

    def remind(self, line: str) -> None:
        """Log what the server waits for if that is new, or was last logged long ago."""
        last, again_at = self._reminder
        if line != last or time.monotonic() > again_at:
            self.notify(line)
            self._reminder = line, time.monotonic() + _REPEAT_AFTER

    def greet(self, *, agree: bool) -> None:
        """Greet new nodes and wait for their replies."""
        for _ in self.ask({}, greet=agree):
            pass

    def greet_or_pause(self, *, agree: bool) -> None:
        """Greet new nodes; without any, wait."""
        if self.greetings_due():
            self.greet(agree=agree)
        else:
            self.pause()

    # ------------------------------------------------------------------ newcomers

    def _welcome(self, node: str, kind: str, reply: Reply) -> None:
        """Admit a node that gave its name, or keep the reason why not."""
        stranger = self._strangers.setdefault(node, _Stranger())
        if kind == "refused":
            return
        try:
            if isinstance(reply, Failure):
                raise SummaryError(reply.reason)
            name = reply.facts.get("name")
            if not isinstance(name, str) or not name.strip() or not name.isprintable():
                raise SummaryError("it does not give a readable name")
            if len(name) > _LONGEST_NAME:
                raise SummaryError(f"its name is longer than {_LONGEST_NAME} characters")
            stranger.adapt_only = reply.facts.get("adapt_only") is True
            stranger.share_metrics = reply.facts.get("share_metrics") is True
            record = reply.facts.get("summary")
            summary = None if record is None else summary_from_record(record)
        except SummaryError as error:
            # asked again later, and less and less often
            stranger.quiet_until = time.monotonic() + stranger.silence
            stranger.silence = min(2 * stranger.silence, _LONGEST_SILENCE)
            if str(error) != stranger.reason:
                stranger.reason = str(error)
                known = reply.who if isinstance(reply, Failure) else None
                self.notify(f"{known or 'a client'} cannot take part: {stranger.reason}")
            return
        stranger.name, stranger.reason = name, ""
        if stranger.adapt_only:
            self.notify(f"{name} waits for the finished model")
            return
        member = self.members.get(name)
        if member is not None and member.node in self.transport.nodes():
            stranger.reason = f"another client has the name {name!r}; each needs its own name"
            self.notify(f"a second client with the name {name!r} is refused")
            return
        if member is None:
            member = self.members[name] = Member(name)
        self.notify(f"{name} is {'here' if member.node is None else 'back'}")
        member.node, member.share_metrics = node, stranger.share_metrics
        if summary is not None:
            member.summary = summary
        del self._strangers[node]

    def dismiss(self, reason: str) -> None:
        """Inform all connected sites that there will be no training, and why."""
        facts = self.facts(reason=reason, ticket=secrets.token_hex(16))
        requests = {node: Message("refused", {}, facts) for node in self.transport.nodes()}
        for _ in self.transport.ask(requests, min(_FAREWELL, self.settings.round_timeout)):
            pass

    def refuse(self, name: str, reason: str) -> None:
        """Remove a member from the federation; its node receives the reason."""
        member = self.members.pop(name)
        self.notify(f"{name} is refused: {reason}")
        if member.node is not None:
            self._strangers[member.node] = _Stranger(name, reason)


# ---------------------------------------------------------------------- exchanges

Note = Callable[[Member, Message], None]


@dataclass
class Exchange:
    """One request to all sites, repeated until enough of them have replied.

    Attributes:
        what: names the exchange in messages, such as ``round 3``.
        request: returns the request to a member, by name.
        note: takes a member's reply, or raises ``WireError`` or ``SumsError``.
        chosen: returns the members that take part, of all names.
        may_refuse: a site whose first reply is a complaint is a late one whose table does not fit.
        found: names of the members whose replies count.
        dropped: reasons why others do not count.
        diverged: reasons of sites whose training diverged.
    """

    members: Members
    what: str
    request: Callable[[str], Message]
    note: Note = lambda member, reply: None
    chosen: Callable[[tuple[str, ...]], tuple[str, ...]] = lambda names: names
    fewest: ClassVar[int] = 1  # sites whose replies may count together
    may_refuse: bool = False
    found: set[str] = field(default_factory=set)
    dropped: dict[str, str] = field(default_factory=dict)
    diverged: list[str] = field(default_factory=list)

    def run(self) -> str | None:
        """Send the request until there are enough replies.

        Below the quorum it waits without a limit, and names the missing sites.

        Returns:
            ``None``, or the reason why there can never be enough: all are here, but training diverged.
        """
        members, pause = self.members, POLL
        while True:
            chosen = self.chosen(members.names)
            quorum = max(self.fewest, min(members.settings.quorum, len(chosen)))
            here = set(members.connected())
            self.diverged.clear()
            asked = self._attempt([name for name in chosen if name in here], quorum)
            if self._is_done(quorum):
                return None
            if self.diverged and not members.missing(chosen):
                return self.diverged[0]
            missing = ", ".join(name for name in chosen if name not in self.found)
            least = counted(quorum, "client has", "clients have")
            found = f"{self.what}: {len(self.found)} of at least {least} replied"
            members.remind(f"{found}; waiting for {missing or 'clients'}")
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE) if asked else POLL

    def _is_done(self, quorum: int) -> bool:
        return len(self.found) >= quorum

    def _attempt(self, here: list[str], quorum: int) -> bool:
        """Ask connected members that have not replied; return whether there were any.

        Replies that count are kept, because the model does not change before the exchange is over.
        """
        names = [name for name in here if name not in self.found]
        requests = {name: self.request(name) for name in names}
        for name, reply in self.members.ask(requests, greet=False):
            self._take(name, reply, self.note)
        return bool(names)

    def _take(self, name: str, reply: Reply, note: Note) -> None:
        """Count one reply, or report the reason why it does not count."""
        member = self.members.members[name]
        if isinstance(reply, Failure):
            member.projection = None  # perhaps it has lost them
            if self.may_refuse and member.rows is None and reply.reason.startswith(REPORTED):
                self.members.refuse(name, reply.reason.removeprefix(REPORTED))
                return
            self._drop(name, f"no update from {name}: ", reply.reason)
            return
        if "diverged" in reply.facts:
            reason = str(reply.facts["diverged"])[:_LONGEST_REASON]
            self.diverged.append(reason)
            self._drop(name, f"no update from {name}: ", reason)
            return
        try:
            note(member, reply)
        except (WireError, SumsError) as error:
            self._drop(name, f"the update of {name} is dropped: ", str(error))
            return
        self.found.add(name)
        self.dropped.pop(name, None)

    def _drop(self, name: str, line: str, reason: str) -> None:
        if self.dropped.get(name) != reason:
            self.dropped[name] = reason
            self.members.notify(f"{self.what}: {line}{reason}")


def declared_rows(member: Member, reply: Message) -> int:
    """Return the training rows of a site, which must stay as they were declared, or raise ``WireError``."""
    rows = reply.facts.get("rows")
    if type(rows) is not int or not 0 < rows <= MOST_ROWS:
        raise WireError(f"it declares {rows!r:.40} rows, not a number from 1 to {MOST_ROWS:,}")
    if member.rows is not None and rows != member.rows:
        raise WireError(f"it declares {counted(rows, 'row')}, but had declared {member.rows}")
    return rows
