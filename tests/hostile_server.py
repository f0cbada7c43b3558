"""A hostile server that asks an unmodified site for a run and chooses every model of it."""

from __future__ import annotations

import contextlib
from pathlib import Path

import numpy as np

from fedgmm.federation.messages import Message
from fedgmm.federation.settings import SiteSettings
from fedgmm.federation.site import Site, SiteError
from in_memory_sites import InMemorySites, Killed, federate

ROWS, COLUMNS = 300, 3
SHARP = (1e-6, 1.01e-4)  # variances: as small as the server likes, and as small as sites allow


def write_table(path: Path) -> Path:
    """One site's table: three numbers and a label."""
    rng = np.random.default_rng(7)
    x = rng.normal(size=(ROWS, COLUMNS)) * [1.0, 2.0, 0.5]
    y = np.where(x[:, 0] + rng.normal(size=ROWS) > 0, "ill", "well")
    lines = ["age,dose,level,state"]
    lines += [
        ",".join(f"{v:.9g}" for v in row) + f",{label}" for row, label in zip(x, y, strict=True)
    ]
    path.write_text("\n".join(lines) + "\n")
    return path


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
        """The requests of an honest run of a thousand rounds, until its first round."""
        found: dict[str, Message] = {}

        def look(name, request, reply):
            found.setdefault(request.kind, request)
            if request.kind == "round":
                raise Killed
            return reply

        sites = InMemorySites([self.table], self.home / "honest")
        sites.tamper = look
        options = {"components": 2, "learners": 1, "covariance_type": "full", "rounds": 1000}
        with contextlib.suppress(Killed):
            federate([self.table], self.home / "honest", sites=sites, dtype="float64", **options)
        return found

    def _rows(self) -> np.ndarray:
        site = self._site()
        job = site._job(self.honest["round"])
        dataset, _ = site.table.load(job.table, job.preprocessing)
        return dataset.train.inputs.numpy().astype(np.float64)

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
