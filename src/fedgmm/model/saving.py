"""Models on disk: numbers in safetensors, everything else in JSON, and no code.

A folder holds ``model.json`` (format, classes, clients, options, history, checksums) and
``weights-….safetensors``, whose name contains its checksum. Saving writes the new numbers beside the old
ones and then replaces the JSON in one step, so a crash at any moment leaves a complete model.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Hashable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedgmm.core.gaussians import COVARIANCE_TYPES, Gaussians, covariance_shape
from fedgmm.core.labels import LabelFrequencies
from fedgmm.core.moments import Scaling
from fedgmm.core.params import NOISE, Params, count_learners
from fedgmm.core.pca import PCA
from fedgmm.files import write_atomically
from fedgmm.methods.base import Prediction
from fedgmm.model.model import FederatedModel
from fedgmm.model.novelty import CALIBRATIONS, OWN, SCORES
from fedgmm.nets.modules import ModuleNetwork
from fedgmm.nets.networks import ModuleFactory, Network, Regression, function_of, network

FORMAT = 2
"""Version of the layout; a newer one is refused."""

_FORMAT_WITHOUT_LABELS = 1  # for models without label frequencies; older versions read it as well
_JSON = "model.json"
_CLASS_KINDS = "biufUO"  # kinds of labels that JSON can hold
_LONGEST_LABEL = 4096


class ModelFileError(ValueError):
    """A saved model that cannot be read; the message has the file and the reason."""


class LearnerError(ModelFileError):
    """A learner for :func:`load` that is not the learner of the saved model."""


# ---------------------------------------------------------------------- writing


def save(model: FederatedModel, folder: str | Path) -> Path:
    """Write a model into ``folder`` and return the folder."""
    from safetensors.torch import save as to_bytes

    facts = _facts(model)  # raises for values that cannot be saved, before anything is written
    data = to_bytes(
        {
            name: value.detach().cpu().clone(memory_format=torch.contiguous_format)
            for name, value in _tensors(model).items()
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


def _tensors(model: FederatedModel) -> dict[str, Tensor]:
    prediction = model.prediction
    tensors = {f"learners/{name}": value for name, value in prediction.learners.items()}
    function = function_of(prediction.net)
    if isinstance(function, ModuleNetwork):
        tensors |= {f"constants/{n}": value for n, value in function.constants.items()}
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
    if model.projection is not None:
        for name in ("mean", "components", "variances"):
            tensors[f"projection/{name}"] = getattr(model.projection, name)
    if model.target is not None:
        tensors["target"] = torch.stack([model.target.mean, model.target.scale])
    if model.interval_scores is not None:
        tensors["interval_scores"] = torch.from_numpy(model.interval_scores)
    for name, scores in model.calibration.items():
        tensors[f"calibration/{name}"] = torch.from_numpy(np.ascontiguousarray(scores))
    return tensors


def _facts(model: FederatedModel) -> dict[str, Any]:
    """Return all that is not a tensor, as JSON can hold it."""
    gaussians = model.prediction.gaussians
    if model.classes.dtype.kind not in _CLASS_KINDS:
        raise ValueError(f"Labels of type {model.classes.dtype} cannot be saved; use strings.")
    return {
        "format": FORMAT if model.prediction.labels is not None else _FORMAT_WITHOUT_LABELS,
        "algorithm": model.algorithm,
        "names": [_json_value(name, "Client name") for name in model.names],
        "classes": [_json_value(label, "Label") for label in model.classes.tolist()],
        "class_dtype": model.classes.dtype.str,
        "positive": _json_value(model.positive, "Label"),
        "input_shape": list(model.input_shape),
        "features_are_inputs": model.features_are_inputs,
        "covariance_type": None if gaussians is None else gaussians.covariance_type,
        "default_learner": model.prediction.default_learner,
        "prior_rows": model.prediction.prior_rows,
        "options": {name: _json_value(value, name) for name, value in model.options.items()},
        "history": model.history,
        "stopped": model.stopped,
        "column_names": None if model.column_names is None else list(model.column_names),
        **({} if model.privacy is None else {"privacy": model.privacy}),
    }


def _json_value(value: Hashable, name: str) -> Any:
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, (str, int, float)) or value is None:
        return value
    raise ValueError(f"{name} {value!r} cannot be saved; use strings or numbers.")


def _checksum(facts: dict[str, Any]) -> str:
    """Return the checksum of everything in the JSON except the checksum itself."""
    rest = {name: value for name, value in facts.items() if name != "checksum"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def _numbers_file(digest: str) -> str:
    return f"weights-{digest[:16]}.safetensors"


# ---------------------------------------------------------------------- reading


def load(folder: str | Path, *, learner: ModuleFactory | None = None) -> FederatedModel:
    """Read a model that :func:`save` wrote; its predictions are bit for bit the same.

    Args:
        folder: folder of the model.
        learner: module factory, required if the model was trained with a custom learner.

    Raises:
        LearnerError: ``learner`` is not the learner of the model.
        ModelFileError: a file is missing, damaged or newer than this version.
    """
    home = Path(folder)
    facts = _read_facts(home / _JSON)
    tensors = _read_tensors(home / _numbers_file(facts["numbers"]), facts["numbers"])
    try:
        return _build_model(facts, tensors, learner)
    except LearnerError as error:
        raise LearnerError(f"learner= is not the learner of {home}: {error}") from None
    except ModelFileError as error:
        raise ModelFileError(f"{home} does not contain a valid model: {error}") from None
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as e:
        raise ModelFileError(f"{home} does not contain a valid model: {e!r}.") from None


def _check_learner(learners: Params, constants: Params, net: ModuleNetwork) -> None:
    """Raise ``LearnerError`` unless a custom network has the parameters and buffers of the file."""
    given = net.parameter_shapes | {n: tuple(v.shape) for n, v in net.constants.items()}
    expected = {name: tuple(value.shape[1:]) for name, value in learners.items()}
    expected |= {name: tuple(value.shape) for name, value in constants.items()}
    for name in sorted({*expected, *given}):
        if given.get(name) != expected.get(name):
            there = f"has shape {expected[name]}" if name in expected else "is unknown"
            here = f"has shape {given[name]}" if name in given else "is missing"
            raise LearnerError(
                f"the parameter {name!r} {there} in the model and {here} in the learner."
            )


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        reason = error.strerror or str(error)
        raise ModelFileError(
            f"Cannot read {path} ({reason}); check that this is the folder of a saved model."
        ) from None


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
            f"{path} was written by a newer version of fedgmm (format {facts['format']}; this version "
            f"reads up to format {FORMAT}); upgrade fedgmm to load it."
        )
    # The digest becomes a file name, so anything but hexadecimal digits could leave the folder.
    valid = re.fullmatch("[0-9a-f]{64}", str(facts.get("numbers")))
    if not valid or facts.get("checksum") != _checksum(facts):
        raise ModelFileError(f"{path} is damaged or was edited: its checksum is wrong.")
    return facts


def _read_tensors(path: Path, digest: str) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load as from_bytes

    data = _read(path)
    if hashlib.sha256(data).hexdigest() != digest:
        raise ModelFileError(f"{path} is damaged: its checksum is wrong.")
    try:
        return from_bytes(data)
    except (SafetensorError, KeyError, ValueError, RuntimeError) as error:
        raise ModelFileError(f"{path} is damaged: {error}.") from None


def _build_model(
    facts: dict[str, Any], tensors: dict[str, Tensor], learner: ModuleFactory | None
) -> FederatedModel:
    """Return the model, or raise if facts and tensors are inconsistent."""
    options, names = dict(facts["options"]), list(facts["names"])
    kind = options.get("learner", "linear")
    if kind != "custom" and learner is not None:
        raise LearnerError(f"the model has learner={kind!r}; leave learner out.")
    if kind == "custom":
        if learner is None:
            raise ModelFileError("it uses a custom learner; pass it: load(..., learner=...).")
        kind = learner
    shape, classes = tuple(facts["input_shape"]), _classes(facts)
    _require(bool(shape) and all(type(size) is int and size > 0 for size in shape), "input_shape")
    _require(len(set(names)) == len(names), "names")
    if learner is not None and (isinstance(learner, nn.Module) or not callable(learner)):
        raise LearnerError(
            f"it is of type {type(learner).__name__}; pass the function that made the learners in "
            "training."
        )
    net = network(kind, shape, len(classes), seed=options.get("seed", 0))
    function = function_of(net)
    if isinstance(function, ModuleNetwork):
        constants = _under(tensors, "constants/")
        learned = {n: v for n, v in _under(tensors, "learners/").items() if n != NOISE}
        _check_learner(learned, constants, function)
        function = replace(function, given=constants or None)  # earlier versions wrote no constants
        net = Regression(function) if isinstance(net, Regression) else function
    positive = facts.get("positive")  # files of earlier versions do not have it
    _require(positive is None or positive in classes.tolist(), "positive")
    prediction = Prediction(
        net,
        _learners(_under(tensors, "learners/"), net),
        _gaussians(facts, tensors, _columns_of_gaussians(tensors, math.prod(shape))),
        tensors.get("client_weights"),
        tensors.get("weights"),
        tensors.get("assignment"),
        facts["default_learner"],
        prior_rows=_prior_rows(facts),
    )
    pairs = _check_clients(prediction, len(names))
    labels = _labels(facts, tensors, (len(names), pairs, len(classes)))
    calibration = {name: value.numpy() for name, value in _under(tensors, "calibration/").items()}
    for name, scores in calibration.items():
        valid = name in CALIBRATIONS and scores.ndim == 1 and len(scores) > 0
        _require(valid, f"calibration/{name}")
    if "client" in calibration:
        for name in (*SCORES, *(OWN + score for score in SCORES), "gaussian"):
            scores = calibration.get(name, calibration["client"])
            _require(len(scores) == len(calibration["client"]), f"calibration/{name}")
    return FederatedModel(
        str(facts["algorithm"]),
        replace(prediction, labels=labels),
        names,
        classes,
        shape,
        _scaling(tensors, tuple(shape)),
        options,
        [dict(entry) for entry in facts["history"]],
        facts["stopped"],
        calibration,
        bool(facts["features_are_inputs"]),
        column_names=_column_names(facts, shape),
        positive=positive,
        target=_target(tensors, len(classes)),
        interval_scores=_interval_scores(tensors),
        projection=_projection(tensors, math.prod(shape)),
        privacy=facts.get("privacy"),
    )


def _interval_scores(tensors: dict[str, Tensor]) -> NDArray[np.float64] | None:
    scores = tensors.get("interval_scores")
    if scores is None:
        return None
    valid = scores.dim() == 1 and scores.dtype == torch.float64 and len(scores) > 0
    _require(valid and bool(torch.isfinite(scores).all()), "interval_scores")
    return np.asarray(scores.numpy())


def _require(valid: bool, name: str) -> None:
    if not valid:
        raise ModelFileError(f"{name} is invalid or does not match the rest; save the model again.")


def _classes(facts: dict[str, Any]) -> NDArray[Any]:
    dtype = np.dtype(facts["class_dtype"])
    _require(dtype.kind in _CLASS_KINDS and dtype.itemsize <= 4 * _LONGEST_LABEL, "class_dtype")
    classes: NDArray[Any] = np.array(facts["classes"], dtype=dtype)
    _require(classes.ndim == 1 and len(set(classes.tolist())) == len(classes), "classes")
    return classes


def _prior_rows(facts: dict[str, Any]) -> float | None:
    """Return the prior of new clients; earlier versions did not write it."""
    rows = facts.get("prior_rows")
    valid = rows is None or (isinstance(rows, (int, float)) and 0 <= rows < math.inf)
    _require(valid, "prior_rows")
    return rows


def _target(tensors: dict[str, Tensor], classes: int) -> Scaling | None:
    """Return the scaling of numbers to predict; ``None`` for classes."""
    found = tensors.get("target")
    _require((found is None) == (classes > 0), "target")
    if found is None:
        return None
    _require(found.shape == (2,) and bool(torch.isfinite(found).all() and found[1] > 0), "target")
    return Scaling(found[0], found[1])


def _column_names(facts: dict[str, Any], shape: tuple[int, ...]) -> tuple[str, ...] | None:
    """Return the names of the inputs' columns; earlier versions did not write them."""
    names = facts.get("column_names")
    if names is None:
        return None
    valid = isinstance(names, list) and all(isinstance(name, str) for name in names)
    _require(valid and (len(names),) == shape, "column_names")
    return tuple(names)


def _learners(learners: dict[str, Tensor], net: Network) -> dict[str, Tensor]:
    shapes = dict(net.parameter_shapes)
    function = function_of(net)
    if isinstance(function, ModuleNetwork):  # earlier versions trained frozen layers
        shapes |= {n: tuple(v.shape) for n, v in function.constants.items() if n in learners}
    _require(set(learners) == set(shapes), "learners")
    count = len(next(iter(learners.values())))
    for name, value in learners.items():
        _require(tuple(value.shape) == (count, *shapes[name]), f"learners/{name}")
        finite = value.is_floating_point() and bool(torch.isfinite(value).all())
        _require(finite, f"learners/{name}")
    return learners


def _gaussians(facts: dict[str, Any], tensors: dict[str, Tensor], columns: int) -> Gaussians | None:
    kind = facts["covariance_type"]
    if kind is None:
        return None
    _require(kind in COVARIANCE_TYPES, "covariance_type")
    means, covariances, whiteners = (
        tensors[f"gaussians/{name}"] for name in ("means", "covariances", "precisions_cholesky")
    )
    m, d = means.shape
    _require(d == columns or not facts["features_are_inputs"], "gaussians/means")
    shape = covariance_shape(kind, m, d)
    _require(covariances.shape == whiteners.shape == shape, "gaussians/covariances")
    for value in (means, covariances, whiteners):
        _require(value.dtype == torch.float64 and bool(torch.isfinite(value).all()), "gaussians")
    scales = whiteners.diagonal(dim1=-2, dim2=-1) if kind in ("full", "tied") else whiteners
    _require(bool((scales > 0).all()), "gaussians/precisions_cholesky")
    return Gaussians(means, covariances, whiteners, kind)


def _check_clients(prediction: Prediction, clients: int) -> int:
    """Check that clients have weights over all pairs, or an existing learner; return the pairs."""
    learners = count_learners(prediction.learners)
    assignment, default = prediction.assignment, prediction.default_learner
    if assignment is not None:
        _require(prediction.client_weights is None and prediction.weights is None, "assignment")
        _require(assignment.shape == (clients,), "assignment")
        _require(bool(((assignment >= 0) & (assignment < learners)).all()), "assignment")
        valid = default is None or (type(default) is int and 0 <= default < learners)
        _require(valid, "default_learner")
        return learners
    components = 1 if prediction.gaussians is None else len(prediction.gaussians.means)
    pairs = components * learners
    for name, shape in (("weights", (pairs,)), ("client_weights", (clients, pairs))):
        value = getattr(prediction, name)
        _require(value is not None and value.shape == shape, name)
        _require(bool((value >= 0).all()) and _sums_to_one(value), name)
    return pairs


def _labels(
    facts: dict[str, Any], tensors: dict[str, Tensor], shape: tuple[int, int, int]
) -> LabelFrequencies | None:
    """Return the label frequencies ``(C, M, K)``, or ``None`` for a model without any."""
    if facts["format"] == _FORMAT_WITHOUT_LABELS:
        return None
    names = ("clients", "federation", "prior_rows", "guess_rows")
    clients, federation, prior, guess = (tensors[f"labels/{name}"] for name in names)
    _require(prior.shape == (1,) and 0 < float(prior) < math.inf, "labels/prior_rows")
    _require(guess.shape == (1,) and 0 <= float(guess) < math.inf, "labels/guess_rows")
    for name, value, expected in (
        ("labels/clients", clients, shape),
        ("labels/federation", federation, shape[1:]),
    ):
        _require(value.shape == expected and bool((value > 0).all()), name)
        _require(_sums_to_one(value), name)
    return LabelFrequencies(clients, federation, float(prior), float(guess))


def _sums_to_one(value: Tensor) -> bool:
    return value.dtype == torch.float64 and bool(((value.sum(-1) - 1).abs() < 1e-6).all())


def _scaling(tensors: dict[str, Tensor], shape: tuple[int, ...]) -> Scaling | None:
    if "scaling/mean" not in tensors:
        return None
    mean, scale = tensors["scaling/mean"], tensors["scaling/scale"]
    # of flattened inputs, or of pixels
    fits = tuple(mean.shape) in ((math.prod(shape),), shape) and mean.shape == scale.shape
    _require(fits, "scaling")
    _require(bool(torch.isfinite(mean).all()) and bool((scale > 0).all()), "scaling")
    return Scaling(mean, scale)


def _projection(tensors: dict[str, Tensor], columns: int) -> PCA | None:
    """Return the principal components that the Gaussians see; earlier versions did not have any."""
    found = _under(tensors, "projection/")
    if not found:
        return None
    _require(set(found) == {"mean", "components", "variances"}, "projection")
    mean, components, variances = found["mean"], found["components"], found["variances"]
    shapes = mean.shape == (columns,) and components.shape == (len(variances), columns)
    valid = shapes and variances.dim() == 1 and len(variances) > 0
    finite = all(v.dtype == torch.float64 and bool(torch.isfinite(v).all()) for v in found.values())
    _require(valid and finite, "projection")
    return PCA(mean, components, variances)


def _columns_of_gaussians(tensors: dict[str, Tensor], columns: int) -> int:
    projection = _projection(tensors, columns)
    return columns if projection is None else len(projection.variances)


def _under(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
