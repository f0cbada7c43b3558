"""Models on disk: numbers in safetensors, everything else in JSON. Nothing that could run.

A folder holds ``model.json`` (format, classes, clients, options, history, checksums) and the numbers
in ``weights-….safetensors``, whose name is part of their checksum. The new numbers are written beside
the old ones and the JSON is replaced last, in one step: a crash at any moment leaves a whole model.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedgmm.core.gaussians import COVARIANCE_TYPES, Gaussians
from fedgmm.core.labels import LabelFrequencies
from fedgmm.core.moments import Scaling
from fedgmm.files import write_atomically
from fedgmm.methods.base import Prediction
from fedgmm.model.likelihoods import log_weights
from fedgmm.model.model import CALIBRATIONS, FederatedModel
from fedgmm.nets.networks import ModuleFactory, Network, network

FORMAT = 2
"""Version of the layout; a newer one is refused."""

_WITHOUT_LABELS = 1  # such models can be read by older versions, too
_JSON = "model.json"
_CLASS_KINDS = "biufUO"  # labels that JSON can hold
_LONGEST_LABEL = 4096


class ModelFileError(ValueError):
    """A saved model that cannot be read, with the file and the reason."""


# ---------------------------------------------------------------------- writing


def save(model: FederatedModel, folder: str | Path) -> Path:
    """Write a model into ``folder`` and return the folder."""
    from safetensors.torch import save as to_bytes

    facts = _facts_of(model)  # what cannot be saved is told before anything is written
    data = to_bytes(
        {
            name: value.detach().cpu().clone(memory_format=torch.contiguous_format)
            for name, value in _tensors_of(model).items()
        }
    )
    facts["numbers"] = hashlib.sha256(data).hexdigest()
    facts["checksum"] = _checksum(facts)
    home = Path(folder)
    home.mkdir(parents=True, exist_ok=True)
    numbers = home / _numbers_file(facts["numbers"])
    write_atomically(numbers, data)
    write_atomically(home / _JSON, json.dumps(facts, indent=1).encode())
    for old in home.glob(_numbers_file("*")):
        if old != numbers:
            old.unlink(missing_ok=True)
    return home


def _tensors_of(model: FederatedModel) -> dict[str, Tensor]:
    prediction = model.prediction
    tensors = {f"learners/{name}": value for name, value in prediction.learners.items()}
    for name in ("client_weights", "weights", "assignment"):
        value = getattr(prediction, name)
        if value is not None:
            tensors[name] = value
    if prediction.labels is not None:
        tensors["labels/clients"] = prediction.labels.clients
        tensors["labels/federation"] = prediction.labels.federation
        for name in ("prior_rows", "guess_rows"):
            value = getattr(prediction.labels, name)
            tensors[f"labels/{name}"] = torch.tensor([value], dtype=torch.float64)
    if prediction.gaussians is not None:
        for name in ("means", "covariances", "precisions_cholesky"):
            tensors[f"gaussians/{name}"] = getattr(prediction.gaussians, name)
    if model.scaling is not None:
        tensors |= {"scaling/mean": model.scaling.mean, "scaling/scale": model.scaling.scale}
    for name, scores in model.calibration.items():
        tensors[f"calibration/{name}"] = torch.from_numpy(np.ascontiguousarray(scores))
    return tensors


def _facts_of(model: FederatedModel) -> dict[str, Any]:
    gaussians = model.prediction.gaussians
    if model.classes.dtype.kind not in _CLASS_KINDS:
        raise ValueError(f"Labels of type {model.classes.dtype} cannot be saved; use strings.")
    return {
        "format": FORMAT if model.prediction.labels is not None else _WITHOUT_LABELS,
        "algorithm": model.algorithm,
        "names": [_plain(name, "Client name") for name in model.names],
        "classes": [_plain(label, "Label") for label in model.classes.tolist()],
        "class_dtype": model.classes.dtype.str,
        "input_shape": list(model.input_shape),
        "features_are_inputs": model.features_are_inputs,
        "covariance_type": None if gaussians is None else gaussians.covariance_type,
        "default_learner": model.prediction.default_learner,
        "options": {name: _plain(value, name) for name, value in model.options.items()},
        "history": model.history,
        "stopped": model.stopped,
    }


def _plain(value: Hashable, what: str) -> Any:
    """A value as JSON can hold it."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, (str, int, float)) or value is None:
        return value
    raise ValueError(f"{what} {value!r} cannot be saved; use strings or numbers.")


def _checksum(facts: dict[str, Any]) -> str:
    """Of everything in the JSON but the checksum itself."""
    rest = {name: value for name, value in facts.items() if name != "checksum"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def _numbers_file(digest: str) -> str:
    return f"weights-{digest[:16]}.safetensors"


# ---------------------------------------------------------------------- reading


def load(folder: str | Path, *, learner: ModuleFactory | None = None) -> FederatedModel:
    """Read a model that :func:`save` wrote; it predicts the same bits.

    Args:
        folder: where it is.
        learner: the module factory, for a model that was trained with one of your own.

    Raises:
        ModelFileError: a missing, damaged or newer file.
    """
    home = Path(folder)
    facts = _read_facts(home / _JSON)
    tensors = _read_tensors(home / _numbers_file(facts["numbers"]), facts["numbers"])
    try:
        return _assemble(facts, tensors, learner)
    except ModelFileError as error:
        raise ModelFileError(f"{home} is not a whole model: {error}") from None
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as e:
        raise ModelFileError(f"{home} is not a whole model: {e!r}.") from None


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        reason = error.strerror or str(error)
        raise ModelFileError(f"Cannot read {path} ({reason}); is this a model folder?") from None


def _read_facts(path: Path) -> dict[str, Any]:
    data = _read(path)
    try:
        facts = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ModelFileError(f"{path} is damaged: {error}.") from None
    if not isinstance(facts, dict) or not isinstance(facts.get("format"), int):
        raise ModelFileError(f"{path} is not a saved model.")
    if facts["format"] > FORMAT:
        raise ModelFileError(
            f"{path} was written by a newer fedgmm (format {facts['format']}, this one reads up to "
            f"{FORMAT}); upgrade fedgmm to load it."
        )
    # the digest is also a file name: it must not lead out of the folder
    named = re.fullmatch("[0-9a-f]{64}", str(facts.get("numbers")))
    if not named or facts.get("checksum") != _checksum(facts):
        raise ModelFileError(f"{path} is damaged or was changed: its checksum does not fit.")
    return facts


def _read_tensors(path: Path, digest: str) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load as from_bytes

    data = _read(path)
    if hashlib.sha256(data).hexdigest() != digest:
        raise ModelFileError(f"{path} is damaged: its checksum does not fit.")
    try:
        return from_bytes(data)
    except (SafetensorError, KeyError, ValueError, RuntimeError) as error:
        raise ModelFileError(f"{path} is damaged: {error}.") from None


def _assemble(
    facts: dict[str, Any], tensors: dict[str, Tensor], learner: ModuleFactory | None
) -> FederatedModel:
    """A model from facts and tensors that fit each other."""
    options = dict(facts["options"])
    kind = options.get("learner", "linear")
    if kind == "custom" and learner is None:
        raise ModelFileError("it has a learner of your own; pass it: load(..., learner=...).")
    shape = tuple(facts["input_shape"])
    _need(bool(shape) and all(type(size) is int and size > 0 for size in shape), "input_shape")
    classes = _classes(facts)
    net = network(
        learner if kind == "custom" and learner is not None else kind, shape, len(classes)
    )
    prediction = Prediction(
        net,
        _learners(_under(tensors, "learners/"), net),
        _gaussians(facts, tensors, math.prod(shape)),
        tensors.get("client_weights"),
        tensors.get("weights"),
        tensors.get("assignment"),
        facts["default_learner"],
        _labels(facts, tensors),
    )
    names = list(facts["names"])
    _need(len(set(names)) == len(names), "names")
    _check_clients(prediction, len(names))
    _check_labels(prediction, len(classes))
    calibration = {name: value.numpy() for name, value in _under(tensors, "calibration/").items()}
    for name, scores in calibration.items():
        _need(name in CALIBRATIONS and scores.ndim == 1 and len(scores) > 0, f"calibration/{name}")
    return FederatedModel(
        str(facts["algorithm"]),
        prediction,
        names,
        classes,
        shape,
        _scaling(tensors, math.prod(shape)),
        options,
        [dict(entry) for entry in facts["history"]],
        facts["stopped"],
        calibration,
        bool(facts["features_are_inputs"]),
    )


def _need(fits: bool, what: str) -> None:
    if not fits:
        raise ModelFileError(f"{what} does not fit the rest.")


def _classes(facts: dict[str, Any]) -> NDArray[Any]:
    dtype = np.dtype(facts["class_dtype"])
    _need(dtype.kind in _CLASS_KINDS and dtype.itemsize <= 4 * _LONGEST_LABEL, "class_dtype")
    classes: NDArray[Any] = np.array(facts["classes"], dtype=dtype)
    _need(classes.ndim == 1 and len(set(classes.tolist())) == len(classes) > 0, "classes")
    return classes


def _learners(learners: dict[str, Tensor], net: Network) -> dict[str, Tensor]:
    shapes = net.parameter_shapes
    _need(set(learners) == set(shapes), "learners")
    count = len(next(iter(learners.values())))
    for name, value in learners.items():
        _need(tuple(value.shape) == (count, *shapes[name]), f"learners/{name}")
        _need(value.is_floating_point() and bool(torch.isfinite(value).all()), f"learners/{name}")
    return learners


def _gaussians(facts: dict[str, Any], tensors: dict[str, Tensor], columns: int) -> Gaussians | None:
    kind = facts["covariance_type"]
    if kind is None:
        return None
    _need(kind in COVARIANCE_TYPES, "covariance_type")
    means, covariances, whiteners = (
        tensors[f"gaussians/{name}"] for name in ("means", "covariances", "precisions_cholesky")
    )
    m, d = means.shape
    _need(d == columns or not facts["features_are_inputs"], "gaussians/means")
    shape = {"full": (m, d, d), "tied": (d, d), "diag": (m, d)}.get(kind, (m,))
    _need(covariances.shape == whiteners.shape == shape, "gaussians/covariances")
    for value in (means, covariances, whiteners):
        _need(value.dtype == torch.float64 and bool(torch.isfinite(value).all()), "gaussians")
    scales = whiteners.diagonal(dim1=-2, dim2=-1) if kind in ("full", "tied") else whiteners
    _need(bool((scales > 0).all()), "gaussians/precisions_cholesky")
    return Gaussians(means, covariances, whiteners, kind)


def _check_clients(prediction: Prediction, clients: int) -> None:
    """Either every client has weights over all pairs, or a learner that exists."""
    learners = len(next(iter(prediction.learners.values())))
    if prediction.assignment is not None:
        default = prediction.default_learner
        _need(prediction.client_weights is None and prediction.weights is None, "assignment")
        _need(prediction.assignment.shape == (clients,), "assignment")
        _need(
            bool(((prediction.assignment >= 0) & (prediction.assignment < learners)).all()),
            "assignment",
        )
        _need(
            default is None or (type(default) is int and 0 <= default < learners), "default_learner"
        )
        return
    components = 1 if prediction.gaussians is None else len(prediction.gaussians.means)
    pairs = components * learners
    for name, shape in (("weights", (pairs,)), ("client_weights", (clients, pairs))):
        value = getattr(prediction, name)
        _need(value is not None and value.dtype == torch.float64 and value.shape == shape, name)
        _need(bool((value >= 0).all()) and bool(((value.sum(-1) - 1).abs() < 1e-6).all()), name)


def _labels(facts: dict[str, Any], tensors: dict[str, Tensor]) -> LabelFrequencies | None:
    if facts["format"] == _WITHOUT_LABELS:
        return None
    prior, guess = tensors["labels/prior_rows"], tensors["labels/guess_rows"]
    _need(prior.shape == (1,) and 0 < float(prior) < math.inf, "labels/prior_rows")
    _need(guess.shape == (1,) and 0 <= float(guess) < math.inf, "labels/guess_rows")
    return LabelFrequencies(
        tensors["labels/clients"], tensors["labels/federation"], float(prior), float(guess)
    )


def _check_labels(prediction: Prediction, classes: int) -> None:
    """Frequencies of every class for each pair of a Gaussian and a learner, where there are any."""
    labels = prediction.labels
    if labels is None:
        return
    clients, *pairs = log_weights(prediction).shape
    shape = (math.prod(pairs), classes)
    _need(labels.clients.shape == (clients - 1, *shape), "labels/clients")
    _need(labels.federation.shape == shape, "labels/federation")
    for name in ("clients", "federation"):
        value = getattr(labels, name)
        _need(value.dtype == torch.float64 and bool((value > 0).all()), f"labels/{name}")
        _need(bool(((value.sum(-1) - 1).abs() < 1e-6).all()), f"labels/{name}")


def _scaling(tensors: dict[str, Tensor], columns: int) -> Scaling | None:
    if "scaling/mean" not in tensors:
        return None
    mean, scale = tensors["scaling/mean"], tensors["scaling/scale"]
    _need(mean.shape == scale.shape == (columns,), "scaling")
    _need(bool(torch.isfinite(mean).all()) and bool((scale > 0).all()), "scaling")
    return Scaling(mean, scale)


def _under(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
