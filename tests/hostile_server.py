"""A hostile server that asks an unmodified site for a run and chooses every model of it."""

from __future__ import annotations

import contextlib
from pathlib import Path

import numpy as np
import torch

from fedgmm.core.dominance import cap_shares, common_entries
from fedgmm.federation.messages import Message
from fedgmm.federation.settings import SiteSettings
from fedgmm.federation.site import Site, SiteError
from in_memory_sites import InMemorySites, Killed, federate

ROWS, COLUMNS = 300, 3
SHARP = (1e-6, 1.01e-4)  # variances: as small as the server likes, and as small as sites allow


def write_table(path: Path, seed: int = 7) -> Path:
    """One site's table: three numbers and a label."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(ROWS, COLUMNS)) * [1.0, 2.0, 0.5]
    y = np.where(x[:, 0] + rng.normal(size=ROWS) > 0, "ill", "well")
    lines = ["age,dose,level,state"]
    lines += [
        ",".join(f"{v:.9g}" for v in row) + f",{label}" for row, label in zip(x, y, strict=True)
    ]
    path.write_text("\n".join(lines) + "\n")
    return path


def honest_requests(tables: list[Path], home: Path, **options: object) -> dict[str, Message]:
    """The requests of an honest run of a thousand rounds, until its first round."""
    found: dict[str, Message] = {}

    def look(name, request, reply):
        found.setdefault(request.kind, request)
        if request.kind == "round":
            raise Killed
        return reply

    sites = InMemorySites(tables, home)
    sites.tamper = look
    with contextlib.suppress(Killed):
        federate(tables, home, sites=sites, dtype="float64", rounds=1000, **options)
    return found


def rows_of(site: Site, request: Message, split: str) -> tuple[np.ndarray, np.ndarray]:
    """The inputs of a site's rows as it standardises them, and the codes of their labels."""
    job = site._job(request)
    dataset, _ = site.table.load(job.table, job.preprocessing)
    part = getattr(dataset, split)
    return part.inputs.numpy().astype(np.float64), part.labels.numpy()


class HostileServer:
    """Requests to one site, and the rows that their replies give away.

    Args:
        home: where the table and the folders are.
        **settings: of the site.

    Attributes:
        asked: number of requests.
        answered: number of requests that got a reply.
        candidates: guesses of rows, ``(k, d)`` each, as the site standardises them.
    """

    def __init__(self, home: Path, **settings: object) -> None:
        self.home, self.settings = home, settings
        self.table = write_table(home / "oslo.csv")
        self.asked = self.answered = self.attacks = 0
        self.candidates: list[np.ndarray] = []
        self.honest = self._honest()
        self.rows = self._rows()

    def _honest(self) -> dict[str, Message]:
        options = {"components": 2, "learners": 1, "covariance_type": "full"}
        return honest_requests([self.table], self.home / "honest", **options)

    def _rows(self) -> np.ndarray:
        return rows_of(self._site(), self.honest["round"], "train")[0]

    def _site(self) -> Site:
        self.attacks += 1
        out = self.home / f"site-{self.attacks}"
        return Site(SiteSettings((self.table,), out, **self.settings))

    def ask(self, site: Site, kind: str, arrays=None, **facts: object) -> dict | None:
        """The arrays of a reply; ``None`` if the site refuses."""
        request = self.honest[kind]
        arrays = request.arrays if arrays is None else {**request.arrays, **arrays}
        self.asked += 1
        try:
            reply = site.reply(Message(kind, arrays, {**request.facts, **facts}))
        except SiteError:
            return None
        self.answered += 1
        return dict(reply.arrays)

    def guess(self, sums: np.ndarray, count: np.ndarray | float) -> None:
        """A sum of one row and its count would be that row."""
        with np.errstate(all="ignore"):
            found = np.atleast_2d(sums / np.asarray(count)[..., None])
        self.candidates.append(found[np.isfinite(found).all(-1)])

    def recovered(self, tolerance: float) -> int:
        """Number of different rows that a guess hits in every column."""
        hit: set[int] = set()
        for guess in np.concatenate([np.empty((0, COLUMNS)), *self.candidates]):
            distance = np.abs(self.rows - guess).max(1)
            if distance.min() < tolerance:
                hit.add(int(distance.argmin()))
        return len(hit)

    # ------------------------------------------------------------------ models

    @staticmethod
    def half_space(axis: int, at: float, variance: float) -> dict[str, np.ndarray]:
        """Two narrow Gaussians, of which each row belongs to the one on its side of ``at``."""
        means = np.zeros((2, COLUMNS))
        means[:, axis] = at - 1.0, at + 1.0
        i, j = np.tril_indices(COLUMNS)
        triangle = np.broadcast_to(variance * (i == j), (2, len(i)))
        return {
            "means": means,
            "covariances": np.ascontiguousarray(triangle),
            "weights": np.full(2, 0.5),
        }

    @staticmethod
    def sums(reply: dict[str, np.ndarray], means: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Counts ``(2,)`` and sums of rows ``(2, d)`` of a reply."""
        counts = reply["gaussians/counts"]
        return counts, reply["gaussians/first"] + counts[:, None] * means

    # ------------------------------------------------------------------ attacks

    def shift_half_spaces(self, rounds: int) -> None:
        """Two half-spaces that differ by one row give that row away; so does a tail of one row."""
        for variance in SHARP:
            site = self._site()
            start = self.ask(site, "start")
            before = None
            each = rounds // len(SHARP)
            for number in range(1, each + 1):
                axis = (number - 1) * COLUMNS // each
                at = -3.2 + 6.4 * ((number * COLUMNS) % each) / each
                model = self.half_space(axis, at, variance)
                reply = self.ask(site, "round", model, round=number, since=0)
                if reply is None:
                    continue
                counts, sums = self.sums(reply, model["means"])
                self.guess(sums, counts)
                for other in (before, None if start is None else self._whole(start)):
                    if other is not None:
                        self.guess(sums - other[1], counts - other[0])
                before = counts, sums

    @staticmethod
    def _whole(start: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        name = "overall/" if "overall/gaussians/first" in start else ""
        return start[f"{name}gaussians/counts"], start[f"{name}gaussians/first"]

    def average_two(self, rounds: int) -> None:
        """Ask about the same two half-spaces many times, changed by nothing that matters."""
        site = self._site()
        edge = np.sort(self.rows[:, 0])[150:152].mean()  # help that a real server would not have
        next_edge = np.sort(self.rows[:, 0])[151:153].mean()
        total = np.zeros((2, COLUMNS + 1))
        for number in range(1, rounds + 1):
            model = self.half_space(0, (edge, next_edge)[number % 2], SHARP[1])
            model["weights"] = np.array([0.5 - 1e-9 * number, 0.5 + 1e-9 * number])
            reply = self.ask(site, "round", model, round=number, since=0)
            if reply is not None:
                counts, sums = self.sums(reply, model["means"])
                total[number % 2] += [*sums[0], counts[0]]
        difference = (total[0] - total[1]) / (rounds / 2)
        self.guess(difference[:-1], difference[-1])

    def certain_learners(self, rounds: int) -> None:
        """A learner that is certain about all rows but one has the gradient of that row."""
        for size in (1e7, 600.0):
            site, before = self._site(), None
            each = rounds // 2
            for number in range(1, each + 1):
                axis = (number - 1) * COLUMNS // each
                at = -3.2 + 6.4 * ((number * COLUMNS) % each) / each
                weight, bias = np.zeros((1, 2, COLUMNS)), np.zeros((1, 2))
                weight[0, :, axis] = -size / 2, size / 2
                bias[0] = at * size / 2, -at * size / 2
                learner = {"learners/0.weight": weight, "learners/0.bias": bias}
                reply = self.ask(site, "round", learner, round=number, since=0)
                if reply is None:
                    continue
                gradient = reply["learners/gradient"].reshape(-1)
                hessian = reply["learners/hessian"].reshape(-1)
                self.guess(gradient[:-1], gradient[-1])
                # the last row of the triangle is the sum of rows times their curvature
                self.guess(hessian[-COLUMNS - 1 : -1], hessian[-1])
                if before is not None:
                    step = gradient - before
                    self.guess(step[:-1], step[-1])
                before = gradient

    def small_starts(self, requests: int) -> None:
        """Centroids of two rows, and what is left of all rows without them."""
        site = self._site()
        for number in range(requests):
            reply = self.ask(site, "start", most_rows=(3, 20, 60)[number % 3], run=f"{number:016x}")
            if reply is None:
                continue
            points, counts = reply["centroids/points"], reply["centroids/counts"]
            self.guess(points * counts[:, None], counts)
            whole = self._whole(reply)
            self.guess(whole[1][0] - (points * counts[:, None]).sum(0), whole[0][0] - counts.sum())
            self.guess((points * counts[:, None]).sum(0) - points[:1].sum(0), 1.0)

    def nearest_means(self, requests: int) -> None:
        """Means so far apart that they cut the rows in two."""
        site = self._site()
        whole = self.ask(site, "start")
        for number in range(requests):
            means = np.zeros((2, COLUMNS))
            means[:, 0] = -3.0 + 6.0 * number / requests + np.array([-1.0, 1.0])
            reply = self.ask(site, "assigned", {"means": means}, run=f"{number % 3:016x}")
            if reply is not None:
                counts, sums = self.sums(reply, means)
                self.guess(sums, counts)
                if whole is not None:
                    other = self._whole(whole)
                    self.guess(other[1] - sums, other[0] - counts)

    def attack(self, requests: int) -> None:
        """All of them."""
        self.shift_half_spaces(requests * 4 // 10)
        self.certain_learners(requests * 4 // 10)
        self.average_two(requests // 10)
        self.small_starts(requests // 20)
        self.nearest_means(requests - self.asked - 1)


class LinearLabels:
    """Labels ``y`` in zero and one that several noisy sums ``A y`` tell, in the mean and with its error."""

    def __init__(self, rows: int) -> None:
        # before anything is known, a label is a half, and its variance is a quarter
        self.information, self.known = 4.0 * np.eye(rows), np.zeros(rows)

    def add(self, matrix: np.ndarray, values: np.ndarray, noise: np.ndarray) -> None:
        """Note ``values = A (y - 1/2) + e`` with the covariance ``noise`` of ``e``."""
        scaled = np.linalg.solve(noise, matrix).T
        self.information += scaled @ matrix
        self.known += scaled @ values

    def right(self, labels: np.ndarray) -> float:
        """The share of labels that are guessed."""
        return float(((np.linalg.solve(self.information, self.known) > 0) == labels).mean())

    def certain(self) -> int:
        """Number of labels that are three deviations away from undecided."""
        guesses = np.linalg.solve(self.information, self.known)
        return int((np.abs(guesses) > 3 * np.sqrt(np.diag(np.linalg.inv(self.information)))).sum())


class LabelThief:
    """A hostile server that asks for labels: each Gaussian has its rows, and its learner counts them.

    Where a learner is zero, its gradient is the sum of ``(1/2 - y) x`` over the rows of its Gaussian. The
    server places the Gaussians elsewhere in each round. Of several sites it sees the sum, as with masks.
    """

    def __init__(self, home: Path, sites: int = 1, groups: int = 3, **settings: object) -> None:
        tables = [write_table(home / f"site_{k}.csv", 7 + k) for k in range(sites)]
        options = {"components": groups, "learners": groups, "covariance_type": "diag"}
        self.groups = groups
        self.request = honest_requests(tables, home / "honest", **options)["round"]
        self.min_rows, self.blur = settings.get("min_rows", 5), settings.get("blur", 0.1)
        self.sites = [
            Site(SiteSettings((table,), home / f"asked-{table.stem}", **settings))
            for table in tables
        ]
        self.inputs, self.labels = rows_of(self.sites[0], self.request, "train")
        self.others = rows_of(self.sites[0], self.request, "test")
        self.random = np.random.default_rng(0)
        self.asked = 0

    def ask(self, means: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Ask about a placement of the Gaussians; return ``Σ (y - 1/2) (x, 1)`` and the rows of each."""
        shape, size = (self.groups, 2), COLUMNS
        arrays = {
            "means": means,
            "covariances": np.full(means.shape, SHARP[1]),
            "weights": np.eye(self.groups).reshape(-1) / self.groups,
            "learners/0.weight": np.zeros((*shape, size)),
            "learners/0.bias": np.zeros(shape),
        }
        self.asked += 1
        facts = {**self.request.facts, "round": self.asked, "since": 0}
        arrays = {**self.request.arrays, **arrays}
        replies = [one.reply(Message("round", arrays, facts)).arrays for one in self.sites]
        gradient = sum(one["learners/gradient"] for one in replies)
        return gradient.reshape(self.groups, -1) / np.sqrt(2), sum(
            one["learners/weight"] for one in replies
        )

    def members(self, means: np.ndarray, x: np.ndarray) -> np.ndarray:
        """The weights of the first site's rows in each group, as the site computes them."""
        distance = ((x[:, None] - means) ** 2).sum(-1)
        while True:
            nearest = distance.argmin(1)
            counts = np.bincount(nearest, minlength=self.groups)
            common = common_entries(torch.tensor(counts), max(1, self.min_rows)).numpy()
            if (common == (counts > 0)).all():
                break
            distance[:, ~common] = np.inf
        weights = torch.nn.functional.one_hot(torch.from_numpy(nearest), self.groups).double()
        if self.min_rows:
            parts = torch.full((*weights.shape, 3), 0.5, dtype=torch.float64)
            weights = cap_shares(weights, parts, self.min_rows, torch.zeros(3))
        return weights.numpy()

    def with_inputs(self, rounds: int) -> LinearLabels:
        """Learn the labels of the first site, whose inputs are known."""
        found, x = LinearLabels(len(self.inputs)), np.c_[self.inputs, np.ones(len(self.inputs))]
        for _ in range(rounds):
            chosen = self.random.choice(len(x), self.groups, replace=False)
            means = self.inputs[chosen] + 1e-6
            gradient, _ = self.ask(means)
            for own, values in zip(self.members(means, self.inputs).T, gradient, strict=True):
                if own.any():
                    a = (own[:, None] * x).T
                    # random weights, and the unknown rows of the other sites
                    spread = 0.25 * (self.blur**2 + len(self.sites) - 1)
                    found.add(a, values, spread * a @ a.T + 1e-6 * np.eye(len(a)))
        return found

    def without_inputs(self, rounds: int) -> tuple[float, float]:
        """Map the labels over all inputs; return how many it gets right, of trained and of other rows."""
        guesses = [np.zeros(len(self.labels)), np.zeros(len(self.others[1]))]
        for _ in range(rounds):
            means = self.random.normal(size=(self.groups, COLUMNS))
            gradient, rows = self.ask(means)
            with np.errstate(all="ignore"):
                rates = np.where(rows > 0, gradient[:, -1] / rows, 0.0)
            for guess, x in zip(guesses, (self.inputs, self.others[0]), strict=True):
                distance = ((x[:, None] - means) ** 2).sum(-1)
                distance[:, rows <= 0] = np.inf
                guess += rates[distance.argmin(1)]
        pairs = zip(guesses, (self.labels, self.others[1]), strict=True)
        right = [float(((guess > 0) == labels).mean()) for guess, labels in pairs]
        return right[0], right[1]
