"""Who takes part: nodes that come and go, the sites behind them, and one way to ask them.

Every question carries a ticket, a random number that its answer must repeat: an answer to an older
question, or one that somebody recorded and sent again, has another one and is dropped.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fedgmm.data.tables.summaries import ClientSummary
from fedgmm.federation.jobs import PROTOCOL
from fedgmm.federation.messages import Message, MessageError, check_message, one_line
from fedgmm.federation.settings import FederationError, FederationSettings
from fedgmm.federation.summaries_on_wire import SummaryError, summary_from_record, table_record
from fedgmm.federation.transport import Failure, Sites

Notify = Callable[[str], None]

_LONGEST_NAME = 200
_FAREWELL = 5.0  # seconds for the sites to hear that there will be no training
_MOST_PATIENCE = 120.0  # seconds for which a node that does not answer is left alone


@dataclass
class Member:
    """One site that takes part.

    Attributes:
        name: of the site.
        node: where it is now; ``None`` if it has not been seen since the server started.
        rows: training rows that it declared; ``None`` until it did.
        since: the last round of this phase in which its update counted; zero before.
        share_metrics: whether the server may have its figures.
        summary: of its table, while the federation agrees on columns.
        finished: it has its model.
        figures: of its test rows, if it shares them.
        founder: it was there when the phase began, so its personal part starts where the phase did.
    """

    name: str
    node: str | None = None
    rows: int | None = None
    since: int = 0
    share_metrics: bool = False
    summary: ClientSummary | None = None
    finished: bool = False
    founder: bool = False
    figures: dict[str, float] | None = None

    def record(self) -> dict[str, Any]:
        """What is worth keeping in a checkpoint."""
        names = ("rows", "since", "finished", "founder", "figures")
        return {name: getattr(self, name) for name in names}


@dataclass
class _Stranger:
    """A node that is no member.

    Attributes:
        name: what it calls itself; empty if it did not say.
        reason: why it is not admitted.
        quiet_until: it is left alone until then, by the monotonic clock.
        patience: seconds for which it is left alone the next time.
        told: it knows the reason.
        adapt_only: it waits for the finished model.
        served: it has got it.
    """

    name: str = ""
    reason: str = ""
    quiet_until: float = 0.0
    patience: float = 2.0
    told: bool = False
    adapt_only: bool = False
    share_metrics: bool = False
    served: bool = False

    @property
    def due(self) -> bool:
        """Whether there is something to ask it or to tell it now."""
        open_question = not self.name or (bool(self.reason) and not self.told)
        return open_question and time.monotonic() >= self.quiet_until


@dataclass
class Traffic:
    """Bytes to and from one site."""

    sent: int = 0
    received: int = 0


@dataclass
class Assembly:
    """The sites of a federation.

    Attributes:
        settings: of the federation.
        sites: the transport.
        notify: called with a line about what happens.
        run: which run it is.
        members: by name.
        traffic: of members since it was last read.
    """

    settings: FederationSettings
    sites: Sites
    notify: Notify
    run: str = ""
    members: dict[str, Member] = field(default_factory=dict)
    traffic: dict[str, Traffic] = field(default_factory=dict)
    _strangers: dict[str, _Stranger] = field(default_factory=dict)

    def __post_init__(self) -> None:
        told = self.notify
        self.notify = lambda line: told(one_line(line))  # sites choose their names and their words

    # ------------------------------------------------------------------ who is there

    @property
    def names(self) -> tuple[str, ...]:
        """All members, whether they are connected or not, in the order of their names."""
        return tuple(sorted(self.members))

    def connected(self) -> list[str]:
        """Names of the members whose nodes are connected now, sorted."""
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
        """Nodes that are connected; strangers who left are forgotten, and greeted if they return."""
        here = set(self.sites.nodes())
        self._strangers = {node: s for node, s in self._strangers.items() if node in here}
        return here

    def missing(self, names: Iterable[str]) -> list[str]:
        """Those of ``names`` that are not connected."""
        here = set(self.connected())
        return [name for name in names if name not in here]

    def waiting_for_model(self) -> list[str]:
        """Nodes that only want the finished model and have not got it."""
        here = set(self.sites.nodes())
        return [
            n for n, s in self._strangers.items() if n in here and s.adapt_only and not s.served
        ]

    def served(self, node: str) -> None:
        """Remember that a node has got the finished model."""
        self._strangers[node].served = True

    def name_of(self, node: str) -> str:
        """What a node calls itself."""
        return self._strangers[node].name if node in self._strangers else node

    # ------------------------------------------------------------------ asking

    def greetings_due(self) -> bool:
        """Whether a node waits to be greeted, or to hear why it is refused."""
        known = {member.node for member in self.members.values()}
        new = [self._strangers.get(n, _Stranger()) for n in self._here() if n not in known]
        return any(stranger.due for stranger in new)

    def greetings(self, agree: bool) -> dict[str, Message]:
        """Questions to nodes that nobody knows yet: who are you?

        Args:
            agree: the federation still agrees on columns, so their summaries are wanted.
        """
        known = {member.node for member in self.members.values()}
        found: dict[str, Message] = {}
        for node in self.sites.nodes():
            if node in known:
                continue
            stranger = self._strangers.setdefault(node, _Stranger())
            if not stranger.due:
                continue
            if not stranger.name:
                found[node] = self.hello(agree)
            else:
                stranger.told = True
                found[node] = Message("refused", {}, self._facts(reason=stranger.reason))
        return found

    def hello(self, agree: bool, as_categories: Iterable[str] = ()) -> Message:
        """Who are you, and, while the federation agrees, what is your table like?"""
        facts = self._facts(agree=agree)
        if agree:
            facts |= {
                "table": table_record(self.settings.config.table),
                "as_categories": sorted(as_categories),
                "min_rows": self.settings.min_rows,
            }
        return Message("hello", {}, facts)

    def _facts(self, **facts: Any) -> dict[str, Any]:
        return {"protocol": PROTOCOL, "run": self.run, **facts}

    def ask(
        self,
        questions: Mapping[str, Message],
        *,
        greet: bool | None = None,
        nodes: Mapping[str, Message] | None = None,
    ) -> dict[str, Message | Failure]:
        """Ask members by name, and greet nodes that are new at the same time.

        Args:
            questions: to connected members.
            greet: greet new nodes; true while the federation agrees on columns, false later;
                ``None`` leaves them alone.
            nodes: questions to nodes that are no members.

        Returns:
            Answers of the members and of ``nodes``, each of which has the right ticket.
        """
        greetings = {} if greet is None else self.greetings(greet)
        to_nodes = {**greetings, **(nodes or {})}
        names = {self.members[name].node: name for name in questions}
        for name, question in questions.items():
            node = self.members[name].node
            assert node is not None
            to_nodes[node] = question
        sent = {
            node: Message(q.kind, q.arrays, {**q.facts, "ticket": secrets.token_hex(16)})
            for node, q in to_nodes.items()
        }
        for question in sent.values():
            self._check_size(question)
        found = self.sites.ask(sent, self.settings.round_timeout) if sent else {}
        answers: dict[str, Message | Failure] = {}
        for node, question in sent.items():
            answer = self._checked(question, found.get(node, Failure("there was no answer")))
            who = names.get(node)
            if who is not None:
                answers[who] = self._counted(who, question, answer)
            elif nodes and node in nodes:
                answers[node] = answer
            else:
                self._welcome(node, question.kind, answer)
        return answers

    def _check_size(self, question: Message) -> None:
        try:
            check_message(question, limit_bytes=self.settings.largest_message)
        except MessageError as error:
            raise FederationError(
                f"The question {question.kind!r} cannot be sent: {error} Raise largest_message."
            ) from None

    def _checked(self, question: Message, answer: Message | Failure) -> Message | Failure:
        """An answer that keeps all bounds and belongs to its question."""
        if isinstance(answer, Failure):
            return answer
        try:
            check_message(answer, limit_bytes=self.settings.largest_message)
        except MessageError as error:
            return Failure(f"its message is not accepted: {error}")
        if answer.kind != "answer":
            return Failure(f"its message is a {answer.kind!r}, not an answer")
        if answer.facts.get("ticket") != question.facts["ticket"]:
            return Failure("its message belongs to another question")
        return answer

    def _counted(
        self, name: str, question: Message, answer: Message | Failure
    ) -> Message | Failure:
        traffic = self.traffic.setdefault(name, Traffic())
        traffic.sent += question.size
        if isinstance(answer, Failure):
            return answer
        traffic.received += answer.size
        if answer.facts.get("name") != name:
            return Failure("it answers in another name")
        return answer

    def take_traffic(self) -> dict[str, Traffic]:
        """Bytes since the last call."""
        found, self.traffic = self.traffic, {}
        return found

    def reunite(self, poll: float) -> None:
        """Wait for all members, though no longer than a round may take, and greet whoever comes."""
        deadline = time.monotonic() + self.settings.round_timeout
        told = ""
        while (missing := self.missing(self.names)) and time.monotonic() < deadline:
            line = f"waiting for {', '.join(missing)} to come back"
            if line != told:
                self.notify(line)
                told = line
            if self.greetings_due():
                self.ask({}, greet=False)
            else:
                time.sleep(poll)

    # ------------------------------------------------------------------ newcomers

    def _welcome(self, node: str, kind: str, answer: Message | Failure) -> None:
        """Admit a node that said who it is, or remember why not."""
        stranger = self._strangers.setdefault(node, _Stranger())
        if kind == "refused":
            return
        try:
            if isinstance(answer, Failure):
                raise SummaryError(answer.reason)
            name = _name_in(answer)
            stranger.adapt_only = answer.facts.get("adapt_only") is True
            stranger.share_metrics = answer.facts.get("share_metrics") is True
            summary = answer.facts.get("summary")
            told = None if summary is None else summary_from_record(summary)
        except SummaryError as error:
            # asked again later, and less and less often
            stranger.quiet_until = time.monotonic() + stranger.patience
            stranger.patience = min(2 * stranger.patience, _MOST_PATIENCE)
            if str(error) != stranger.reason:
                stranger.reason = str(error)
                known = answer.who if isinstance(answer, Failure) else None
                self.notify(f"{known or 'a client'} cannot take part: {stranger.reason}")
            return
        stranger.name, stranger.reason = name, ""
        if stranger.adapt_only:
            self.notify(f"{name} waits for the finished model")
            return
        member = self.members.get(name)
        if member is not None and member.node in self.sites.nodes():
            stranger.reason = f"another client is called {name!r}; each needs a name of its own"
            self.notify(f"a second client called {name!r} is refused")
            return
        if member is None:
            member = self.members[name] = Member(name)
        self.notify(f"{name} is {'here' if member.node is None else 'back'}")
        member.node, member.share_metrics = node, stranger.share_metrics
        if told is not None:
            member.summary = told
        del self._strangers[node]

    def dismiss(self, reason: str) -> None:
        """Tell everybody who is here that there will be no training, and why."""
        facts = self._facts(reason=reason, ticket=secrets.token_hex(16))
        everybody = {node: Message("refused", {}, facts) for node in self.sites.nodes()}
        self.sites.ask(everybody, min(_FAREWELL, self.settings.round_timeout))

    def refuse(self, name: str, reason: str) -> None:
        """A member leaves the federation, and is told why."""
        member = self.members.pop(name)
        self.notify(f"{name} is refused: {reason}")
        if member.node is not None:
            self._strangers[member.node] = _Stranger(name, reason)


def _name_in(answer: Message) -> str:
    name = answer.facts.get("name")
    if not isinstance(name, str) or not name.strip() or not name.isprintable():
        raise SummaryError("it does not say who it is")
    if len(name) > _LONGEST_NAME:
        raise SummaryError(f"its name is longer than {_LONGEST_NAME} characters")
    return name
