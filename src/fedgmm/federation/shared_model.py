"""The model that belongs to nobody in particular, as the server has it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fedgmm.federation.jobs import Job
from fedgmm.methods.clustered import ClusteredFL
from fedgmm.model.model import FederatedModel
from fedgmm.runs.folder import RunFolder, write_json
from fedgmm.runs.run import has_common_model
from fedgmm.training.checkpoint import AnyMethod


def shared_model(
    job: Job,
    method: AnyMethod,
    shared: Any,
    names: Sequence[str],
    history: Sequence[Mapping[str, float]] = (),
    stopped: str | None = None,
) -> FederatedModel | None:
    """A model without any client's own part; ``None`` where a method shares nothing.

    Args:
        job: the training.
        method: the method.
        shared: its shared state.
        names: the clients whose clusters are known, in order.
        history: one entry a round.
        stopped: why training ended before its last round.
    """
    if shared is None:
        return None
    if isinstance(method, ClusteredFL) and names:
        prediction = method.prediction(shared, torch.arange(len(names)))
    else:
        names = ()
        prediction = method.prediction(shared, nobody(method, shared))
    classes = job.preprocessing.labels.array
    return FederatedModel(
        job.options.algorithm,
        prediction,
        list(names),
        classes,
        (job.columns,),
        options=job.options.record(),
        history=[dict(entry) for entry in history],
        stopped=stopped,
    )


def nobody(method: AnyMethod, shared: Any) -> Any:
    """The personal state of no client at all."""
    one = method.newcomer(shared)
    return {k: v[:0] for k, v in one.items()} if isinstance(one, dict) else one[:0]


def write_shared_model(folder: RunFolder, model: FederatedModel, facts: Mapping[str, Any]) -> None:
    """Write the model and, as the sign that all is there, the metrics."""
    assert has_common_model(model)
    model.save(folder.model)
    (folder.clients / "weights").mkdir(parents=True, exist_ok=True)
    write_json(
        folder.metrics,
        {
            "algorithm": model.algorithm,
            "rounds": len(model.history),
            "stopped": model.stopped,
            "clients": {},
            "selection": None,
            **facts,
        },
    )
