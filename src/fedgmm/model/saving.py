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
from collections.abc import Hashable, Iterator, Mapping
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
from fedgmm.core.params import NOISE, count_learners
from fedgmm.core.pca import PCA
from fedgmm.files import write_atomically
from fedgmm.methods.base import Prediction
from fedgmm.model.model import FederatedModel
from fedgmm.model.novelty import CALIBRATIONS, ROW_CALIBRATIONS
from fedgmm.nets.modules import ModuleNetwork
from fedgmm.nets.networks import ModuleFactory, Network, Regression, function_of, network
from fedgmm.support.scratch import blocks_in

FORMAT = 2
"""Version of the layout; a newer one is refused."""

_FORMAT_WITHOUT_LABELS = 1  # for models without label frequencies; older versions read it as well
_JSON = "model.json"
_CLASS_KINDS = "biufUO"  # kinds of labels that JSON can hold
_LONGEST_LABEL = 4096
_LABELS = ("clients", "federation", "prior_rows", "guess_rows", "relative")
_GAUSSIANS = ("means", "covariances", "precisions_cholesky")


class ModelFileError(ValueError):
    """A saved model that cannot be read; the message has the file and the reason."""


class LearnerError(ModelFileError):
    """A learner for :func:`load` that is not the learner of the saved model."""


# ---------------------------------------------------------------------- writing


def save(model: FederatedModel, folder: str | Path) -> Path:
    """Write a model into ``folder`` and return the folder."""
    facts, digest = _facts(model), hashlib.sha256()  # raises for values that cannot be saved
    tensors = {name: value.detach().cpu().contiguous() for name, value in _tensors(model).items()}
    for piece in _pieces(tensors):
        digest.update(piece)
    facts["numbers"] = digest.hexdigest()
    facts["checksum"] = _checksum(facts)
    home = Path(folder)
    home.mkdir(parents=True, exist_ok=True)
    numbers = home / _numbers_file(facts["numbers"])
    write_atomically(numbers, _pieces(tensors))
    write_atomically(home / _JSON, json.dumps(facts, indent=1).encode())
    for old in home.glob(_numbers_file("*")):
        if old != numbers:
            old.unlink(missing_ok=True)
    return home


def _pieces(tensors: Mapping[str, Tensor]) -> Iterator[bytes | memoryview]:
    """Yield a file of safetensors in pieces; the library would hold scores in scratch files as a whole."""
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))  # aligned
    header: dict[str, Any] = {}
    end = 0
    for name in names:
        value, first = tensors[name], end
        end += value.nbytes
        kind = str(value.dtype).removeprefix("torch.")
        for long, short in (("bfloat", "BF"), ("float", "F"), ("uint", "U"), ("int", "I")):
            kind = kind.replace(long, short)
        facts = {"dtype": kind.upper(), "shape": list(value.shape), "data_offsets": [first, end]}
        header[name] = facts
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for name in names:
        for block in blocks_in(tensors[name].reshape(-1).view(torch.uint8)):
            yield block.numpy().data


def _tensors(model: FederatedModel) -> dict[str, Tensor]:
    prediction, function = model.prediction, function_of(model.prediction.net)
    tensors = {f"learners/{name}": value for name, value in prediction.learners.items()}
    if isinstance(function, ModuleNetwork):
        tensors |= {f"constants/{n}": value for n, value in function.constants.items()}
    for prefix, owner, names in (
        ("", prediction, ("client_weights", "weights", "assignment")),
        ("labels/", prediction.labels, _LABELS),
        ("gaussians/", prediction.gaussians, _GAUSSIANS),
        ("scaling/", model.scaling, ("mean", "scale")),
        ("projection/", model.projection, ("mean", "components", "variances")),
    ):
        for name in names if owner is not None else ():
            value = getattr(owner, name)
            if isinstance(value, (int, float)):
                value = torch.tensor([value], dtype=torch.float64)
            if value is not None:
                tensors[prefix + name] = value
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
    options = facts.get("options")
    if learner is None and isinstance(options, dict) and options.get("learner") == "custom":
        raise ModelFileError(
            f"{home} uses a custom learner; pass the function that made it: load(..., learner=...)."
        )
    tensors = _read_tensors(home / _numbers_file(facts["numbers"]), facts["numbers"])
    try:
        return _build_model(facts, tensors, learner)
    except LearnerError as error:
        raise LearnerError(f"learner= is not the learner of {home}: {error}") from None
    except ModelFileError as error:
        raise ModelFileError(f"{home} does not contain a valid model: {error}") from None
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as e:
        raise ModelFileError(f"{home} does not contain a valid model: {e!r}.") from None


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
        raise ModelFileError(
            f"{path} is damaged or was edited: its checksum is wrong; restore the folder."
        )
    return facts


def _read_tensors(path: Path, digest: str) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load as from_bytes

    data = _read(path)
    if hashlib.sha256(data).hexdigest() != digest:
        raise ModelFileError(f"{path} is damaged: its checksum is wrong; restore the folder.")
    try:
        return from_bytes(data)
    except (SafetensorError, KeyError, ValueError, RuntimeError) as error:
        raise ModelFileError(f"{path} is damaged: {error}.") from None


def _build_model(
    facts: dict[str, Any], tensors: dict[str, Tensor], learner: ModuleFactory | None
) -> FederatedModel:
    """Return the model, or raise if facts and tensors are inconsistent."""
    options, names = dict(facts["options"]), list(facts["names"])
    shape, classes = tuple(facts["input_shape"]), _classes(facts)
    columns, positive, prior = (facts.get(n) for n in ("column_names", "positive", "prior_rows"))
    _require(bool(shape) and all(type(size) is int and size > 0 for size in shape), "input_shape")
    _require(len(set(names)) == len(names), "names")
    if columns is not None:  # files of earlier versions lack this and the following facts
        texts = isinstance(columns, list) and all(isinstance(name, str) for name in columns)
        _require(texts and (len(columns),) == shape, "column_names")
    _require(positive is None or positive in classes.tolist(), "positive")
    known = isinstance(prior, (int, float)) and 0 <= prior < math.inf
    _require(prior is None or known, "prior_rows")
    _require(("target" in tensors) == (not len(classes)), "target")

    scaling = target = projection = interval_scores = None
    size = math.prod(shape)
    if "scaling/mean" in tensors:
        # of flattened inputs, or of the pixels of images
        own = (size,) if tensors["scaling/mean"].dim() == 1 else shape
        mean = _numbers(tensors, "scaling/mean", *own)
        scaling = Scaling(mean, _numbers(tensors, "scaling/scale", *own, positive=True))
    if "target" in tensors:
        mean, scale = _numbers(tensors, "target", 2)
        _require(bool(scale > 0), "target")
        target = Scaling(mean, scale)
    if _under(tensors, "projection/"):
        variances = _numbers(tensors, "projection/variances", None)
        components = _numbers(tensors, "projection/components", len(variances), size)
        projection = PCA(_numbers(tensors, "projection/mean", size), components, variances)
    if "interval_scores" in tensors:
        interval_scores = np.asarray(_numbers(tensors, "interval_scores", None).numpy())

    net = _network(options, shape, len(classes), tensors, learner)
    seen = size if projection is None else len(projection.variances)
    gaussian_columns = seen if facts["features_are_inputs"] else None
    prediction = Prediction(
        net,
        _learners(_under(tensors, "learners/"), net),
        _gaussians(facts["covariance_type"], tensors, gaussian_columns),
        tensors.get("client_weights"),
        tensors.get("weights"),
        tensors.get("assignment"),
        facts["default_learner"],
        prior_rows=prior,
    )
    pairs = _check_clients(prediction, len(names))
    if facts["format"] != _FORMAT_WITHOUT_LABELS:
        labels = _labels(tensors, (len(names), pairs, len(classes)))
        prediction = replace(prediction, labels=labels)
    return FederatedModel(
        str(facts["algorithm"]),
        prediction,
        names,
        classes,
        shape,
        scaling,
        options,
        [dict(entry) for entry in facts["history"]],
        facts["stopped"],
        _calibration(_under(tensors, "calibration/")),
        bool(facts["features_are_inputs"]),
        column_names=None if columns is None else tuple(columns),
        positive=positive,
        target=target,
        interval_scores=interval_scores,
        projection=projection,
        privacy=facts.get("privacy"),
    )


def _require(valid: bool, name: str) -> None:
    if not valid:
        raise ModelFileError(f"{name} is invalid or does not match the rest; save the model again.")


def _numbers(
    tensors: dict[str, Tensor], name: str, *shape: int | None, positive: bool = False
) -> Tensor:
    """Return finite float64 numbers of a shape; ``None`` stands for any size from one on."""
    found = tensors[name]
    sizes = [
        max(own, 1) if size is None else size for own, size in zip(found.shape, shape, strict=False)
    ]
    _require(list(found.shape) == sizes and len(sizes) == len(shape), name)
    _require(found.dtype == torch.float64 and bool(torch.isfinite(found).all()), name)
    _require(not positive or bool((found > 0).all()), name)
    return found


def _check_shares(tensors: dict[str, Tensor], name: str, *shape: int) -> None:
    """Raise unless numbers of a shape are not negative and sum to one."""
    found = _numbers(tensors, name, *shape)
    sums = bool(((found.sum(-1) - 1).abs() < 1e-6).all())
    _require(sums and bool((found >= 0).all()), name)


def _under(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}


def _classes(facts: dict[str, Any]) -> NDArray[Any]:
    dtype = np.dtype(facts["class_dtype"])
    _require(dtype.kind in _CLASS_KINDS and dtype.itemsize <= 4 * _LONGEST_LABEL, "class_dtype")
    classes: NDArray[Any] = np.array(facts["classes"], dtype=dtype)
    _require(classes.ndim == 1 and len(set(classes.tolist())) == len(classes), "classes")
    return classes


def _network(
    options: dict[str, Any],
    shape: tuple[int, ...],
    classes: int,
    tensors: dict[str, Tensor],
    learner: ModuleFactory | None,
) -> Network:
    """Return the network; a custom one must have the parameters and buffers of the file."""
    kind = options.get("learner", "linear")
    if kind != "custom" and learner is not None:
        raise LearnerError(f"the model has learner={kind!r}; leave learner out.")
    if kind == "custom":
        if isinstance(learner, nn.Module) or not callable(learner):
            raise LearnerError(
                f"it is of type {type(learner).__name__}; pass the function that made the learners in "
                "training."
            )
        kind = learner
    net = network(kind, shape, classes, seed=options.get("seed", 0))
    function = function_of(net)
    if not isinstance(function, ModuleNetwork):
        return net
    constants = _under(tensors, "constants/")
    given = function.parameter_shapes | {n: tuple(v.shape) for n, v in function.constants.items()}
    learners = _under(tensors, "learners/").items()
    expected = {name: tuple(value.shape[1:]) for name, value in learners if name != NOISE}
    expected |= {name: tuple(value.shape) for name, value in constants.items()}
    for name in sorted({*expected, *given}):
        if given.get(name) != expected.get(name):
            there = f"has shape {expected[name]}" if name in expected else "is unknown"
            here = f"has shape {given[name]}" if name in given else "is missing"
            raise LearnerError(
                f"the parameter {name!r} {there} in the model and {here} in the learner."
            )
    function = replace(function, given=constants or None)  # earlier versions wrote no constants
    return Regression(function) if isinstance(net, Regression) else function


def _learners(learners: dict[str, Tensor], net: Network) -> dict[str, Tensor]:
    shapes = dict(net.parameter_shapes)
    function = function_of(net)
    if isinstance(function, ModuleNetwork):  # earlier versions trained frozen layers
        shapes |= {n: tuple(v.shape) for n, v in function.constants.items() if n in learners}
    _require(set(learners) == set(shapes), "learners")
    count = len(next(iter(learners.values())))
    for name, value in learners.items():
        finite = value.is_floating_point() and bool(torch.isfinite(value).all())
        _require(finite and tuple(value.shape) == (count, *shapes[name]), f"learners/{name}")
    return learners


def _gaussians(kind: Any, tensors: dict[str, Tensor], columns: int | None) -> Gaussians | None:
    if kind is None:
        return None
    _require(kind in COVARIANCE_TYPES, "covariance_type")
    means = _numbers(tensors, "gaussians/means", None, columns)
    shape = covariance_shape(kind, *means.shape)
    covariances, whiteners = (_numbers(tensors, f"gaussians/{n}", *shape) for n in _GAUSSIANS[1:])
    scales = whiteners.diagonal(dim1=-2, dim2=-1) if kind in ("full", "tied") else whiteners
    _require(bool((scales > 0).all()), "gaussians/precisions_cholesky")
    return Gaussians(means, covariances, whiteners, kind)


def _check_clients(prediction: Prediction, clients: int) -> int:
    """Check that clients have weights over all pairs, or an existing learner; return the pairs."""
    learners = count_learners(prediction.learners)
    assignment, default = prediction.assignment, prediction.default_learner
    weights = {"weights": prediction.weights, "client_weights": prediction.client_weights}
    given = {name: value for name, value in weights.items() if value is not None}
    if assignment is not None:
        known = bool(((assignment >= 0) & (assignment < learners)).all())
        _require(not given and assignment.shape == (clients,) and known, "assignment")
        valid = default is None or (type(default) is int and 0 <= default < learners)
        _require(valid, "default_learner")
        return learners
    components = 1 if prediction.gaussians is None else len(prediction.gaussians.means)
    pairs = components * learners
    _check_shares(given, "weights", pairs)
    _check_shares(given, "client_weights", clients, pairs)
    return pairs


def _labels(tensors: dict[str, Tensor], shape: tuple[int, int, int]) -> LabelFrequencies:
    """Return the label frequencies ``(C, M, K)``."""
    clients, federation, prior, guess, relative = (f"labels/{name}" for name in _LABELS)
    for name, own in ((clients, shape), (federation, shape[1:])):
        _check_shares(tensors, name, *own)
        _require(bool((tensors[name] > 0).all()), name)
    prior_rows = float(_numbers(tensors, prior, 1, positive=True))
    guess_rows = float(_numbers(tensors, guess, 1))
    _require(guess_rows >= 0, guess)
    # earlier versions have no such number
    is_relative = relative in tensors and bool(_numbers(tensors, relative, 1) > 0)
    return LabelFrequencies(
        tensors[clients], tensors[federation], prior_rows, guess_rows, is_relative
    )


def _calibration(tensors: dict[str, Tensor]) -> dict[str, NDArray[Any]]:
    beside = dict.fromkeys(ROW_CALIBRATIONS, "client")
    beside |= {"scale": "location", "standard_client": "standard"}
    for name, scores in tensors.items():
        valid = name in CALIBRATIONS and scores.ndim == 1 and len(scores) > 0
        if valid and (other := beside.get(name)) in tensors:
            valid = len(scores) == len(tensors[other])
        _require(valid, f"calibration/{name}")
    _require("location" not in tensors or {"scale", "standard"} <= tensors.keys(), "calibration")
    return {name: scores.numpy() for name, scores in tensors.items()}
