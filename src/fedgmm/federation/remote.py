"""Training with sites of a federation: the clients behind the round loop are elsewhere.

Sums wait for the end of an exchange in a file (:class:`fedgmm.privacy.influence.Cohort`), so the memory
of the server does not grow with the number of sites. The exception is Clustered FL, which compares
single clients.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from fedgmm.core.gaussians import Gaussians
from fedgmm.core.params import Params
from fedgmm.core.pca import PCA, FeatureMoments, fit_pca
from fedgmm.core.randomness import client_keys
from fedgmm.core.sums import Sum, Sums, SumsError, check_sums, row_counts
from fedgmm.data.dataset import LabelledRows
from fedgmm.federation.folders import ServerFolder, numbers_of
from fedgmm.federation.job import SCORE, Job
from fedgmm.federation.masking import MaskedExchange, check_total, read_total
from fedgmm.federation.members import MOST_ROWS, Exchange, Member, Members, declared_rows
from fedgmm.federation.messages import Message
from fedgmm.federation.settings import FederationError
from fedgmm.federation.wire import (
    Arrays,
    WireError,
    as_array,
    as_tensor,
    decode,
    encode,
    put_personal,
)
from fedgmm.methods.base import DENSITY, AnyMethod, DivergedError, RoundInfo
from fedgmm.methods.centroids import (
    FEWEST_ROWS_SENT,
    Centroids,
    grid_points,
    grid_size,
    leading_directions,
    start_sample,
)
from fedgmm.methods.gmm import FARTHEST, Assignment, FederatedGMM, gaussian_of, moments_in
from fedgmm.privacy.influence import Cohort, Medians, likely_scores, row_weights
from fedgmm.training.checkpoint import Progress
from fedgmm.training.local import Participation
from fedgmm.training.loop import Replies, Training
from fedgmm.wording import counted

_LARGEST_LOG_LOSS = 1e15
_CENTROIDS = ("centroids/points", "centroids/counts")

Chosen = Callable[[tuple[str, ...]], tuple[str, ...]]
Look = Callable[[Member, Message, Sums, float], tuple[Sums, Mapping[str, Tensor]]]


class RemoteTraining:
    """One training run with sites; it is the :class:`fedgmm.training.loop.Clients` of its loop.

    Attributes:
        folder: of the server; ``None`` keeps no progress.
        title: put before every line about the run.
        notes: for the report.
        loop: the rounds.
        stopped: why training ended before its last round.
        start_bytes: bytes to and from each site before the first round.
        bounded: sites whose influence the last exchange bounded, with the reason.
    """

    def __init__(
        self, job: Job, members: Members, folder: ServerFolder | None, title: str = ""
    ) -> None:
        self.job, self.members, self.folder, self.title = job, members, folder, title
        self.masks = members.masks
        self.notes: list[str] = []
        self.stopped: str | None = None
        self.start_bytes: dict[str, list[int]] = {}
        self.bounded: dict[str, str] = {}
        self.loop = Training(job.method, job.warm_up, self, job.options, store=self)
        self._codes: list[str] = []  # names of the clients in the order of their codes
        self._sent: tuple[Any, dict[int, Arrays]] = (None, {})
        self._last: Exchange | None = None
        self._medians = Medians()  # of the sites' sums in this phase
        self._started = 0.0

    def train(self) -> None:
        """Run all rounds that are left; after Ctrl-C, raise ``KeyboardInterrupt``."""
        if self.stopped is not None:
            self.loop.resume()
            return
        self.loop.train()
        if self.loop.run.interrupted:
            raise KeyboardInterrupt
        if self.loop.run.diverged is not None:
            self.stopped = self.job.options.after_divergence(self.loop.run.diverged)
            self.members.notify(self.stopped)
            self.loop.save()

    @property
    def shared(self) -> Any:
        """The shared part of the model that the run leaves."""
        return self.loop.outcome[0]

    @property
    def client_names(self) -> tuple[str, ...]:
        """Names of the clients in the order of their codes."""
        return tuple(self._codes)

    # ------------------------------------------------------------------ the start

    def principal_components(self) -> PCA:
        """Return what the Gaussians see with ``pca``, from one exchange of moments."""
        k, block = self.job.options.pca, self.job.reduced
        assert k is not None
        one = FederatedGMM(1, "full")

        def compute() -> Arrays:
            request = self.message("covariance", {}, {})
            found = self.summed("principal components", lambda _: request, one, len(block))
            moments = moments_in(found)
            zero = torch.zeros(len(block), dtype=torch.float64)
            count = float(moments.counts[0])
            made = fit_pca(FeatureMoments(count, moments.first[0], moments.second[0], zero), k)
            whole = made.within(block, self.job.columns)
            return {name: as_array(value) for name, value in asdict(whole).items()}

        found = self.recalled("components", compute)
        return PCA(**{name: as_tensor(value) for name, value in found.items()})

    def recalled(self, what: str, compute: Callable[[], Arrays]) -> Arrays:
        """Return float64 arrays of the start that an earlier attempt left, or compute and keep them."""
        return self.members.record.recalled(self.members.run, what, compute)

    def starting_names(self) -> tuple[str, ...]:
        """Return the members that the start asks; after a restart, those of the first attempt."""
        known = self.members.record.get("names", self.members.run)
        if known is None:
            known = list(self.members.names)
            self.members.record.keep("names", self.members.run, value=known)
        return tuple(known)

    def start(self, method: AnyMethod, learner: Params | None) -> tuple[Any, Any]:
        """Start a phase; a density needs two exchanges with the sites."""
        self._enlist()
        # without a density no row is read
        features: Any = SimpleNamespace(columns=self.job.features)
        if method.mixture is not None:
            features = RemoteRows(self) if self.masks is None else MaskedRows(self)
        rows = SimpleNamespace(
            features=features, names=self.members.names, device=torch.device("cpu")
        )
        try:
            shared, _ = method.init(cast("LabelledRows", rows), learner)
        except DivergedError as error:
            raise FederationError(f"The start failed: {error}.") from None
        self.note_start_traffic()
        return shared, method.newcomer(shared, learner)

    def _enlist(self) -> None:
        """Let all members begin a phase as its founders."""
        for member in self.members.members.values():
            member.since, member.best_since, member.founder = 0, 0, True
        self._medians = Medians()
        self._codes = list(self.members.names)

    def note_start_traffic(self) -> None:
        """Count the bytes of a start."""
        for name, (sent, received) in self.members.take_traffic().items():
            before = self.start_bytes.get(name, [0, 0])
            self.start_bytes[name] = [before[0] + sent, before[1] + received]

    # ------------------------------------------------------------------ rounds

    def step(self, method: AnyMethod, shared: Any, personal: Any, number: int) -> Replies | None:
        """Run a round at the sites, and add their sums."""
        self._started = time.perf_counter()
        checked, right = [0.0], [0.0]  # validation rows of the sites that share metrics

        def look(
            member: Member, reply: Message, sums: Sums, weight: float
        ) -> tuple[Sums, Mapping[str, Tensor]]:
            metrics = reply.facts.get("validation")
            if member.share_metrics and isinstance(metrics, Mapping):
                own: Any = metrics.get("rows")
                correct: Any = metrics.get("right")
                numbers = isinstance(own, (int, float)), isinstance(correct, (int, float))
                if all(numbers) and 0 <= correct <= own <= reply.facts["rows"]:
                    checked.append(weight * own)
                    right.append(weight * correct)
            code = self._code(member.name)
            sent = method.broadcast(method.admit(shared, len(self._codes)), code)
            return method.of_client(sums, code), sent

        def chosen(names: tuple[str, ...]) -> tuple[str, ...]:
            part = Participation(self.job.options.participation, seed=self.job.options.seed)
            codes = part.clients(names, number)
            return names if codes is None else tuple(names[code] for code in codes.tolist())

        try:
            sums = self.summed(
                f"round {number}",
                lambda name: self.request("round", name),
                method,
                self.job.features,
                chosen,
                look,
                self._medians,
            )
        finally:  # also after a failure, because clients that replied have codes now
            if self.masks is not None and self._last is not None:
                for name in sorted(self._last.found):
                    self._code(name)
            self._admit()
            history = self.loop.history
            if sum(checked) and history and history[-1]["round"] == number - 1:
                history[-1]["validation_accuracy"] = math.fsum(right) / math.fsum(checked)
        return Replies(personal, sums)

    def summed(
        self,
        what: str,
        request: Callable[[str], Message],
        method: AnyMethod | FederatedGMM,
        columns: int,
        chosen: Chosen = lambda names: names,
        look: Look = lambda member, reply, sums, weight: (sums, {}),
        medians: Medians | None = None,
        extra: tuple[str, ...] = (),
    ) -> Sums:
        """Return the total of the sums that a method declares, masked or with bounded influence.

        The method declares and checks the sums. With masks all members are asked, otherwise those that are
        ``chosen`` of all names. ``look`` takes a member, its reply, its sums and its weight, and may read
        ``extra`` arrays of the reply; it returns the sums to add and the learners that the site was sent.
        ``medians`` are those of the sites' sums in earlier exchanges.
        """
        declaration = method.declare_sums(columns)
        if self.masks is not None:
            found = self.masked_sums(self.title + what, request, declaration)
            try:  # masks hide which site is wrong
                count = float(found["counts"].sum()) if "counts" in found else MOST_ROWS
                check_total(found, declaration, count)
            except SumsError as error:
                raise DivergedError(
                    reason=f"the total of the sites is not plausible ({error}), and masks hide which "
                    "of them is wrong"
                ) from None
            return found
        settings = self.members.settings
        total = Cohort(declaration, settings.max_norm, settings.robust, medians or Medians())
        weights = self.weights()

        def note(member: Member, reply: Message) -> None:
            rows = declared_rows(member, reply)
            arrays = {name: one for name, one in reply.arrays.items() if name not in extra}
            sums = self.read_sums(replace(reply, arrays=arrays), declaration)
            method.check(sums, rows, declaration)
            weight = weights(member.name, rows)
            sums, sent = look(member, reply, sums, weight)
            member.rows = rows
            total.add(member.name, sums, rows, weight, sent)

        self.exchange(self.title + what, request, note, chosen)
        found = total.result()
        for name, reason in total.bounded.items():
            if name not in self.bounded:  # the exchange before did not log it
                self.members.notify(
                    f"{self.title}{what}: the update of {name} counts less: {reason}"
                )
        self.bounded = total.bounded
        return found

    def weights(self) -> Callable[[str, int | None], float]:
        """Return the factor by which the rows of each member count, see :func:`row_weights`."""
        share = self.members.settings.max_share
        known = {m.name: m.rows for m in self.members.members.values() if m.rows}
        found = row_weights(known, share)

        def weight(name: str, rows: int | None) -> float:
            if name not in found and rows:  # a newcomer
                found[name] = row_weights({**known, name: rows}, share)[name]
            return found.get(name, 1.0)

        return weight

    def exchange(
        self,
        what: str,
        request: Callable[[str], Message],
        note: Callable[[Member, Message], None] = lambda member, reply: None,
        chosen: Chosen = lambda names: names,
    ) -> Exchange:
        """Run an exchange with the chosen sites; with masks, only the total of their sums is open.

        Raises ``DivergedError`` if all sites are here, and training diverged at some of them.
        """
        known = self.job.projection_digest

        def addressed(name: str) -> Message:
            message = request(name)
            if known is None or self.members.members[name].projection == known:
                return message
            return replace(message, arrays={**message.arrays, **self.job.projection_arrays})

        def noted(member: Member, reply: Message) -> None:
            note(member, reply)
            member.projection = known

        late = bool(self.loop.history)
        if self.masks is None:
            self._last = Exchange(self.members, what, addressed, noted, chosen, may_refuse=late)
        else:
            self._last = MaskedExchange(self.members, what, addressed, noted)
        failed = self._last.run()
        if failed is not None:
            raise DivergedError(reason=failed)
        return self._last

    def masked_exchange(self, what: str, request: Callable[[str], Message]) -> MaskedExchange:
        """Return an exchange whose total is open, or raise ``DivergedError``."""
        found = self.exchange(what, request)
        assert isinstance(found, MaskedExchange)
        return found

    def masked_sums(
        self, what: str, request: Callable[[str], Message], declaration: Mapping[str, Sum]
    ) -> Sums:
        """Return the total of the sites' sums, which the server sees only as a whole."""
        return read_total(self.masked_exchange(what, request), declaration)

    def read_sums(self, reply: Message, declaration: Mapping[str, Sum]) -> Sums:
        """Return the declared sums of a reply."""
        gathered = [name for name, one in declaration.items() if one.gathered]
        dtypes = (self.job.learner_dtype, self.job.training_dtype)
        return Sums(decode(reply.arrays, declaration, *dtypes), gathered)

    def accepted(self, number: int, info: RoundInfo) -> dict[str, Any]:
        """Note which sites took part in the round; return their number and the traffic."""
        assert self._last is not None
        found, dropped = self._last.found, self._last.dropped
        for name in found:
            if name in self.members.members:
                self.members.members[name].since = number
        traffic = self.members.take_traffic()
        sent, received = (sum(own[k] for own in traffic.values()) for k in (0, 1))
        seconds = time.perf_counter() - self._started
        clients = max(len(traffic), 1)

        def size(count: float) -> str:
            return f"{count / 1000:.1f} kB" if count < 1e6 else f"{count / 1e6:.1f} MB"

        self.members.notify(
            f"{self.title}round {number}: log-likelihood {info.log_likelihood:.4f}, "
            f"{counted(len(found), 'client')}, {size(sent / clients)} to and "
            f"{size(received / clients)} from each, {seconds:.1f} s"
        )
        facts: dict[str, Any] = {
            "answered": float(len(found)),
            "bytes_sent": float(sent),
            "bytes_received": float(received),
            "bytes": dict(sorted(traffic.items())),
        }
        if dropped:
            facts["dropped"] = dict(sorted(dropped.items()))
        if self.bounded:
            facts["bounded"] = dict(sorted(self.bounded.items()))
        return facts

    def remember_best(self) -> None:
        """Note the states that the sites must keep for the best round."""
        for member in self.members.members.values():
            member.best_since = member.since

    def score(self, method: AnyMethod, shared: Any, personal: Any) -> float:
        """Return the validation log-likelihood of labels as the mean over sites, or of inputs."""
        self.loop.save()  # a restarted server must score the same model
        sums = self.scores()
        if self.job.options.algorithm == DENSITY:
            return sums["inputs"] / sums["rows"]
        return -sums["log_loss"] / sums["clients"]

    def scores(self) -> dict[str, float]:
        """Ask the sites for the sums of ``SCORE`` of the present model."""
        if self.masks is not None:
            total = self.masked_sums("validation", lambda name: self.request("score", name), SCORE)
            found = {name: float(value) for name, value in total.items()}
        else:
            scores: dict[str, dict[str, float]] = {}
            weights, known = self.weights(), {}

            def note(member: Member, reply: Message) -> None:
                sums = self.read_sums(reply, SCORE)
                check_score(sums, numbers=not self.job.method.training.net.classes)
                scores[member.name] = {name: float(value) for name, value in sums.items()}
                known[member.name] = weights(member.name, member.rows)

            self.exchange("validation", lambda name: self.request("score", name), note)
            found = likely_scores(dict(sorted(scores.items())), known)
        if not found["clients"]:
            raise FederationError(
                "No client has validation rows, which patience and the choice of sizes need; change "
                "split in [data], or give components and learners and leave patience out."
            )
        return found

    # ------------------------------------------------------------------ requests

    def _code(self, name: str) -> int:
        """Return a client's code; a new client gets the next one."""
        if name not in self._codes:
            self._codes.append(name)
        return self._codes.index(name)

    def _admit(self) -> None:
        """Make new clients known to the shared part."""
        run, best = self.loop.run, self.loop.best
        run.shared = self.loop.current.admit(run.shared, len(self._codes))
        if best is not None:
            admitted = self.loop.method.admit(best.shared, len(self._codes))
            self.loop.best = best._replace(shared=admitted)

    def request(self, kind: str, name: str | None) -> Message:
        """Return a request to a member: a round, a score, or the end of the run.

        ``name=None`` returns the finished model for a site that did not take part.
        """
        # a client without a code has not replied yet, so it gets the broadcast of a newcomer
        code = self._codes.index(name) if name in self._codes else None
        loop, run = self.loop, self.loop.run
        ends = kind in ("finish", "model")
        shared = loop.outcome[0] if ends else run.shared
        arrays = dict(self._broadcast(shared, code))
        if ends:  # other requests carry the projection only to sites that lack it
            arrays |= self.job.projection_arrays
        member = None if name is None else self.members.members[name]
        since = 0
        if member is not None:
            since = member.best_since if ends and loop.best is not None else member.since
            first = run.round < loop.first_round
            elsewhere = not loop.current.shares_start or (member.founder and not first)
            if since == 0 and elsewhere:  # the broadcast does not lead to its first personal part
                put_personal(arrays, run.personal)
        facts: dict[str, Any] = {
            "phase": loop.phase,
            "round": run.round + (kind == "round"),
            "since": since,
            "keep": 0 if member is None else member.best_since,
        }
        if kind == "finish" and self.stopped:
            facts["notes"] = [f"Training stopped early: {self.stopped}"]
        return self.message(kind, arrays, facts)

    def _broadcast(self, shared: Any, code: int | None) -> Arrays:
        """Return the broadcast to a client; it is encoded once per round and cluster."""
        method = self.loop.current
        if self._sent[0] is not shared:
            self._sent = (shared, {})
        key, made = method.cluster_of(shared, code), self._sent[1]
        if key not in made:
            declaration = method.declare_broadcast(self.job.features)
            try:
                made[key] = encode(
                    method.broadcast(shared, code), declaration, self.job.learner_dtype
                )
            except WireError as error:
                raise FederationError(f"The model cannot be sent: {error}.") from None
        return made[key]

    def message(self, kind: str, arrays: Arrays, facts: Mapping[str, Any]) -> Message:
        """Return a request with the facts that every request has."""
        common = self.members.facts(**self.job.facts)
        common |= self.members.settings.privacy_facts()
        if self.job.projection_digest is not None:
            common["projection"] = self.job.projection_digest
        return Message(kind, arrays, {**common, **facts})

    # ------------------------------------------------------------------ checkpoints

    def save(self, progress: Progress) -> None:
        """Write the progress and the members to the server's folder."""
        if self.folder is None:
            return
        federation = {
            "run": self.members.run,
            "job": self.job.facts,
            "members": {name: m.record() for name, m in self.members.members.items()},
            "clusters": self._codes,
            "notes": self.notes,
            "stopped": self.stopped,
            "start_bytes": self.start_bytes,
            "medians": self._medians.record(),
        }
        plain = replace(
            progress,
            history=[numbers_of(entry) for entry in progress.history],
            options={"federation": federation},
        )
        self.folder.save(plain, progress.history)
        self.members.record.end_start(self.members.run)

    def load(self) -> Progress | None:
        """Return the progress in the server's folder, if there is any."""
        stored = None if self.folder is None else self.folder.stored()
        if stored is None or self.folder is None:
            return None
        progress = stored.progress(self.job.method_of(stored.phase))
        entries = self.folder.history(progress.round) or progress.history
        return replace(progress, history=entries)

    def restore(self, known: Mapping[str, Any]) -> None:
        """Restore members and notes from a checkpoint."""
        self.members.run = str(known["run"])
        for name, record in known["members"].items():
            self.members.members[name] = Member.from_record(name, record)
        self.notes, self.stopped = list(known["notes"]), known["stopped"]
        self._medians = Medians.from_record(known.get("medians", []))
        self.start_bytes = {name: list(own) for name, own in known["start_bytes"].items()}
        self._codes = list(known["clusters"])

    def total_traffic(self) -> dict[str, list[int]]:
        """Return the bytes to and from every site, for the start and over all rounds."""
        total = {name: list(own) for name, own in self.start_bytes.items()}
        for entry in self.loop.history:
            for name, (sent, received) in entry.get("bytes", {}).items():
                own = total.setdefault(name, [0, 0])
                own[0], own[1] = own[0] + int(sent), own[1] + int(received)
        return dict(sorted(total.items()))


def check_score(sums: Sums, *, numbers: bool = False) -> None:
    """Raise :class:`SumsError` unless the sums of ``SCORE`` can be those of one site.

    The log-loss of ``numbers`` may be negative, because it is that of a density.
    """
    rows, clients = float(sums["rows"]), float(sums["clients"])
    if not 0 <= rows <= MOST_ROWS or rows != int(rows):
        raise SumsError(f"it declares {rows:g} validation rows")
    score = (
        {**SCORE, "log_loss": replace(SCORE["log_loss"], lowest=-math.inf)} if numbers else SCORE
    )
    check_sums(sums, score, max(1, int(rows)))
    if float(sums["log_loss"]) > _LARGEST_LOG_LOSS:
        raise SumsError("its log-loss is too large")
    if clients != float(rows > 0):
        raise SumsError(f"it counts as {clients:g} clients with {rows:g} validation rows")
    if not clients and any(float(value) for value in sums.values()):
        raise SumsError("it has a score but no validation rows")


# ---------------------------------------------------------------------- rows at the sites


class RemoteRows:
    """Rows at the sites, as the start of the Gaussians needs them.

    The first exchange asks for sums and centroids; the second for the sums of the rows nearest to
    each of the means that the server made of them.
    """

    def __init__(self, training: RemoteTraining) -> None:
        self.columns, self.device = training.job.features, torch.device("cpu")
        self._training = training
        self._names = training.starting_names()

    def overall(self) -> Gaussians:
        """Return one diagonal Gaussian over all rows, after the first exchange."""
        found = self._training.recalled("overall", self._asked_overall)
        self._known = Centroids(found["points"], found["counts"])
        mean, variances = (torch.from_numpy(found[name]) for name in ("mean", "variances"))
        return Gaussians(mean, variances, torch.ones_like(mean), "diag")

    def _asked_overall(self) -> Arrays:
        training, job = self._training, self._training.job
        names, clusters = self._names, job.options.sizes[0]
        sample, most = start_sample(client_keys(names), clusters, job.options.seed)
        asked = {names[code] for code in sample.tolist()}
        centroids: dict[str, Centroids] = {}

        def request(name: str) -> Message:
            facts = {"clusters": clusters, "most_rows": most if name in asked else 0}
            return training.message("start", {}, facts)

        def look(
            member: Member, reply: Message, sums: Sums, weight: float
        ) -> tuple[Sums, dict[str, Tensor]]:
            own = _checked_centroids(reply, sums, self.columns, clusters)
            centroids[member.name] = replace(own, counts=weight * own.counts)
            return sums, {}

        found = training.summed(
            "start",
            request,
            FederatedGMM(1, "diag"),
            self.columns,
            self._chosen,
            look,
            extra=_CENTROIDS,
        )
        whole = gaussian_of(found, torch.zeros(1, self.columns).double())
        # the rows of a bounded site are elsewhere, and so are its centroids
        sent = [centroids[name] for name in sorted(centroids.keys() - training.bounded.keys())]
        return {
            "mean": as_array(whole.means),
            "variances": as_array(whole.covariances),
            "points": np.concatenate([own.points for own in sent]),
            "counts": np.concatenate([own.counts for own in sent]),
        }

    def _chosen(self, names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(name for name in names if name in self._names)

    def centroids(self, clusters: int, seed: int) -> Centroids:
        """Return all sites' centroids, which came with the first exchange."""
        return self._known

    def assigned(
        self, method: FederatedGMM, current: Gaussians, assignment: Assignment, seed: int
    ) -> Sums:
        """Return sums over the sites' rows, each of which belongs to its nearest mean."""
        assert assignment == "nearest"
        arrays = self._training.recalled("means", lambda: {"means": as_array(current.means)})
        return self._opened("assigned", arrays, method)

    def _opened(self, kind: str, arrays: Arrays, method: FederatedGMM) -> Sums:
        """Return the total of a request's sums; a restarted server recalls it, for masks open it once."""
        training = self._training

        def ask() -> Arrays:
            request = training.message(kind, arrays, {})
            found = training.summed("start", lambda _: request, method, self.columns, self._chosen)
            return {name: as_array(value) for name, value in found.items()}

        return Sums({n: as_tensor(one) for n, one in training.recalled(kind, ask).items()})


class MaskedRows(RemoteRows):
    """Rows at sites that send masked sums, so that no site's centroids are known.

    The first exchange asks for the moments of all rows, the second for the numbers of rows in a grid of
    cells in the leading directions. The cells take the place of the centroids.
    """

    def overall(self) -> Gaussians:
        """Return one diagonal Gaussian over all rows, after the first exchange."""
        moments = moments_in(self._opened("start", {}, FederatedGMM(1, "full")))
        mean = moments.first / moments.counts
        self._mean = mean[0]
        self._covariance = moments.second[0] / moments.counts - torch.outer(mean[0], mean[0])
        variances = self._covariance.diagonal().clamp_min(0.0)[None]
        return Gaussians(mean, variances, torch.ones_like(variances), "diag")

    def centroids(self, clusters: int, seed: int) -> Centroids:
        """Return the middles of the cells that have rows, after the second exchange."""
        training = self._training
        projection, back = leading_directions(self._covariance.numpy())
        k = projection.shape[1]
        made = {
            "mean": as_array(self._mean),
            "projection": np.ascontiguousarray(projection),
            "back": np.ascontiguousarray(back),
        }
        arrays = training.recalled("grid", lambda: made)
        back = arrays.pop("back")
        request = training.message("cells", arrays, {})

        def ask() -> Arrays:
            declared = {"cells": row_counts(grid_size(k))}
            return {
                "cells": training.masked_sums("start", lambda _: request, declared)["cells"].numpy()
            }

        counts = training.recalled("cells", ask)["cells"]
        here = counts >= 0.5
        points = self._mean.numpy() + grid_points(k)[here] @ back.T
        return Centroids(points, counts[here])


def _checked_centroids(reply: Message, sums: Sums, columns: int, clusters: int) -> Centroids:
    """Return the centroids of a site, or raise ``WireError``."""
    rows = reply.facts["rows"]
    points, counts = (reply.arrays.get(name) for name in _CENTROIDS)
    if points is None or counts is None:
        raise WireError("its centroids are missing")
    if counts.ndim != 1 or points.shape != (len(counts), columns) or len(counts) > clusters:
        raise WireError(
            f"its centroids have shape {points.shape}, not (at most {clusters}, {columns})"
        )
    for array in (points, counts):
        if array.dtype != np.float64 or not np.isfinite(array).all():
            raise WireError("its centroids are not finite float64")
    if np.abs(points).max(initial=0.0) > FARTHEST:
        raise WireError("a centroid is too far away")
    if (counts < FEWEST_ROWS_SENT).any() or counts.sum() > rows + 1e-6:
        raise WireError(f"its centroids stand for more than its {counted(rows, 'row')}")
    squares = (counts[:, None] * points**2).sum(0)
    most = sums["gaussians/second"][0].numpy()
    if (squares > 1.001 * most + 1e-3).any():
        raise WireError("its centroids are farther away than its rows")
    return Centroids(points, counts)
