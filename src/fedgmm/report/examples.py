"""Images or texts of a run for its report: samples and the most novel ones of clients, and typical ones.

The page contains the thumbnails themselves, so they are gathered only if the owner of the rows asks.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fedgmm.report.contents import Example, ExampleGroup, FloatArray, IntArray, evenly
from fedgmm.report.gathering import pair_names

if TYPE_CHECKING:
    from fedgmm.model.model import FederatedModel

THUMBNAIL = 96
"""Side of a thumbnail in pixels."""

_SHOWN = 6  # examples in a row
_MOST_CLIENTS = 24
_MOST_WEIGHTS = 4
_EXCERPT = 220  # characters of a text


@dataclass(frozen=True)
class SiteRows:
    """The rows of one file, and how to see what they were made of."""

    inputs: NDArray[np.float32]  # ``(n, d)``
    codes: IntArray  # positions of the rows' clients among those of the model, ``(n,)``
    # class indices ``(n,)``, -1 where unknown, or numbers; ``None`` without labels
    labels: IntArray | FloatArray | None
    ids: Sequence[str]  # of the rows
    # returns the text, or the image ``(channels, height, width)`` uint8, with an id
    load: Callable[[str], Any]


def gather_examples(model: FederatedModel, sites: Sequence[SiteRows]) -> list[ExampleGroup]:
    """Return groups of examples: of each Gaussian, each learner, and each client."""
    best: dict[tuple[str, int], list[tuple[float, int, int]]] = {}
    groups: list[ExampleGroup] = []
    for place, site in enumerate(sites):
        log_density, log_x, log_y = _scores(model, site)
        for kind, values in (("Gaussian", log_x), ("learner", log_y)):
            for number in range(0 if values is None else values.shape[1]):
                own = values[:, number]  # type: ignore[index]
                largest = np.argsort(-own, kind="stable")[:_SHOWN]
                found = best.setdefault((kind, number), [])
                found += [(float(own[r]), place, int(r)) for r in largest if np.isfinite(own[r])]
        for code in np.unique(site.codes).tolist():
            if len(groups) < _MOST_CLIENTS:
                groups.append(_of_client(model, site, code, log_density))
    shared = []
    for (kind, number), found in best.items():
        examples = tuple(
            _example(model, sites[place], row)
            for _, place, row in sorted(found, reverse=True)[:_SHOWN]
        )
        weights = model.weights.sum(1 if kind == "Gaussian" else 0)
        share = {"of all rows": float(weights[number])}
        title = f"{kind.capitalize()} {kind[0].upper()}{number + 1}"
        shared.append(ExampleGroup(title, kind, share, {"most typical": examples}))
    return [*shared, *groups]


def _scores(
    model: FederatedModel, site: SiteRows
) -> tuple[FloatArray | None, FloatArray | None, FloatArray | None]:
    """Return how usual rows are, and how typical of each Gaussian and each learner.

    The first is ``log P_c(x)``, ``(n,)``. The second is ``log N(x; μ_m1, Σ_m1)`` of rows that most likely
    belong to Gaussian ``m1``, ``(n, M1)``. The third is how much larger ``log P_c(m2, x, y)`` is than that
    of any other learner, ``(n, M2)``. Minus infinity marks other rows; a part that does not apply is
    ``None``.
    """
    import torch

    from fedgmm.core.em import add_likelihoods
    from fedgmm.model.predictions import evaluate_arrays, log_learners, log_weights

    if model.prediction.client_weights is None:
        return None, None, None
    rows = evaluate_arrays(model, site.inputs, None).of(site.codes)
    log_pi = log_weights(model.prediction)[torch.from_numpy(site.codes)]  # (n, M1, M2)
    density = typical = None
    if rows.log_x is not None:
        density = rows.log_density()
        if log_pi.shape[1] > 1:
            most_likely = (log_pi.logsumexp(-1) + rows.log_x).argmax(-1, keepdim=True)
            here = torch.zeros_like(rows.log_x, dtype=torch.bool).scatter(1, most_likely, True)
            typical = rows.log_x.masked_fill(~here, -torch.inf).cpu().numpy()
    if site.labels is None or model.target is not None or log_pi.shape[2] == 1:
        return density, typical, None
    labels = torch.from_numpy(site.labels)
    log_y = log_learners(model.prediction, rows.x).cpu()
    log_y = log_y[torch.arange(len(labels)), :, labels.clamp(min=0)]
    joint = add_likelihoods(log_pi.cpu(), None if rows.log_x is None else rows.log_x.cpu(), log_y)
    own = joint.reshape(len(labels), -1, log_pi.shape[2]).logsumexp(1)
    first, second = own.topk(2, -1).values.T
    lead = torch.where(own == first[:, None], own - second[:, None], -torch.inf)
    lead[labels < 0] = -torch.inf
    return density, typical, lead.numpy()


def _of_client(
    model: FederatedModel, site: SiteRows, code: int, log_density: FloatArray | None
) -> ExampleGroup:
    """Return some rows of a client, its most novel rows, and its largest weights."""
    own = np.flatnonzero(site.codes == code)
    rows = {"samples": tuple(_example(model, site, row) for row in own[evenly(len(own), _SHOWN)])}
    if log_density is not None:
        novel = own[np.argsort(log_density[own], kind="stable")][:_SHOWN]
        rows["most novel"] = tuple(
            _example(model, site, row, f"log P(x) {log_density[row]:.1f}") for row in novel
        )
    weights: dict[str, float] = {}
    if model.prediction.client_weights is not None and model.client_weights[code].size > 1:
        values = model.client_weights[code]
        names = pair_names(*values.shape)
        largest = np.argsort(-values.ravel(), kind="stable")[:_MOST_WEIGHTS]
        weights = {names[pair]: float(values.ravel()[pair]) for pair in largest}
    return ExampleGroup(str(model.names[code]), "client", weights, rows)


def _example(model: FederatedModel, site: SiteRows, row: int, remark: str = "") -> Example:
    name, label = site.ids[row], ""
    if site.labels is not None and model.target is None and site.labels[row] >= 0:
        label = str(model.classes[site.labels[row]])
    try:
        original = site.load(name)
    except ValueError as error:
        return Example(name, label, "", f"It cannot be shown: {error}.", remark)
    if isinstance(original, str):
        text = " ".join(original.split())
        return Example(name, label, "", text[:_EXCERPT] + "…" * (len(text) > _EXCERPT), remark)
    return Example(name, label, thumbnail(original.numpy()), "", remark)


def thumbnail(image: NDArray[np.uint8]) -> str:
    """Return an image ``(channels, height, width)`` as an address that contains it."""
    from PIL import Image

    pixels = image[0] if len(image) == 1 else image.transpose(1, 2, 0)
    small = Image.fromarray(np.ascontiguousarray(pixels)).convert("RGB")
    small.thumbnail((THUMBNAIL, THUMBNAIL))
    file = io.BytesIO()
    small.save(file, "JPEG", quality=80)
    return "data:image/jpeg;base64," + base64.b64encode(file.getvalue()).decode()
