"""A client's model for other programs: an ONNX graph, or scikit-learn's ``GaussianMixture``.

The graph repeats equation (3) of :mod:`fedgmm.core.predictive` in ONNX operators, because torch's own
exporter needs further packages and cannot return labels that are texts. Shapes: ``n`` rows, ``M1``
Gaussians, ``M2`` learners, ``K`` classes.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedgmm.core.gaussians import Gaussians
from fedgmm.core.params import Params
from fedgmm.data.inputs import NO_CLIENT
from fedgmm.files import write_atomically
from fedgmm.methods.base import DENSITY
from fedgmm.model.predictions import log_weights
from fedgmm.nets.convolutional import Convolutional
from fedgmm.nets.networks import Dense, function_of
from fedgmm.support.checks import check_choice

if TYPE_CHECKING:
    from sklearn.mixture import GaussianMixture

    from fedgmm.model.model import FederatedModel

DTYPES = ("float32", "float64", "uint8")
"""Types of the rows that an exported graph may take."""

_OPSET = 18  # the first with axes of all reductions as inputs
_IR_VERSION = 10  # read by onnxruntime 1.18 and newer
_FARTHEST = 1e300  # squared deviations, as in fedgmm.core.gaussians
_LEAST_LOG = -1e300  # log of weight zero: below every density, but no difference is NaN


# ---------------------------------------------------------------------- ONNX


def export_onnx(model: FederatedModel, path: str | Path, code: int, dtype: str) -> Path:
    """Write the model of the client with a code, see :meth:`FederatedModel.export_onnx`."""
    try:
        import onnx
    except ImportError:
        raise ImportError("ONNX files need the package onnx; pip install 'fedgmm[onnx]'.") from None
    from fedgmm import __version__

    check_choice("dtype", dtype, DTYPES)
    made = onnx.helper.make_model(
        _ClientGraph(model, code, dtype).build(),
        opset_imports=[onnx.helper.make_opsetid("", _OPSET)],
        ir_version=_IR_VERSION,
        producer_name="fedgmm",
        producer_version=__version__,
    )
    facts = {
        "algorithm": model.algorithm,
        "client": "" if code == NO_CLIENT else str(model.names[code]),
        "classes": json.dumps([str(label) for label in model.classes.tolist()]),
        "columns": json.dumps(list(model.column_names or ())),
    }
    onnx.helper.set_model_props(made, facts)
    onnx.checker.check_model(made, full_check=True)
    out = Path(path)
    write_atomically(out, made.SerializeToString())
    return out


class _ClientGraph:
    """The graph of one client: rows in, probabilities (or means) and log densities out."""

    def __init__(self, model: FederatedModel, code: int, dtype: str) -> None:
        prediction, codes = model.prediction, torch.tensor([code])
        self.model, self.dtype = model, dtype
        self.nodes: list[Any] = []
        self.constants: list[Any] = []
        log_pi = log_weights(prediction)[codes].cpu()  # (1, M1, M2)
        learners = prediction.learners
        ratios = None
        if prediction.labels is not None and code != NO_CLIENT:
            ratios = prediction.labels.log_ratios(codes).cpu()
            ratios = ratios.view(*log_pi.shape, -1)  # (1, M1, M2, K)
        if prediction.assignment is not None:  # one learner is all of the client's model
            own = int(log_pi.argmax())
            learners = {name: value[own : own + 1] for name, value in learners.items()}
            log_pi = log_pi[..., own : own + 1]
            ratios = None if ratios is None else ratios[:, :, own : own + 1]
        self.learners: Params = {name: value.detach().cpu() for name, value in learners.items()}
        self.log_pi = log_pi.clamp_min(_LEAST_LOG)
        self.log_ratios = ratios

    def __call__(self, operator: str, *inputs: str | NDArray[Any], **attributes: Any) -> str:
        """Add a node and return the name of its output; inputs are names of values, or arrays."""
        from onnx import helper, numpy_helper

        names = []
        for one in inputs:
            if isinstance(one, str):
                names.append(one)
            else:
                names.append(f"constant_{len(self.constants)}")
                self.constants.append(numpy_helper.from_array(one, names[-1]))
        output = f"{operator}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(operator, names, [output], **attributes))
        return output

    def cast(self, value: str, dtype: Any) -> str:
        """Convert a value to a type of NumPy."""
        from onnx import helper

        return self("Cast", value, to=helper.np_dtype_to_tensor_dtype(np.dtype(dtype)))

    def reduce(self, operator: str, value: str, *axes: int) -> str:
        """Reduce over axes; onnxruntime rejects negative ones if there are no rows."""
        return self(operator, value, np.array(axes), keepdims=0)

    def build(self) -> Any:
        """Return the graph."""
        from onnx import helper

        model, outputs = self.model, dict[str, tuple[str, Any, tuple[Any, ...]]]()
        inputs = [("X", self.dtype, ("n", *model.input_shape))]
        x = self.cast("X", np.float64)
        parameter = next(iter(self.learners.values())).numpy().dtype
        if model.scaling is not None:
            # rounded as the learners see them, so that densities agree to the last digit
            z = self("Sub", x, model.scaling.mean.cpu().numpy())
            x = self.cast(self("Div", z, model.scaling.scale.cpu().numpy()), parameter)
        log_x, gaussians, projection = None, model.prediction.gaussians, model.projection
        if gaussians is not None:
            if not model.features_are_inputs:
                inputs.append(("features", "float32", ("n", gaussians.means.shape[1])))
            seen = self("Flatten", x if model.features_are_inputs else "features", axis=1)
            seen = self.cast(seen, np.float64)
            if projection is not None:
                centred = self("Sub", seen, projection.mean.cpu().numpy())
                directions = projection.components.mT.contiguous().cpu().numpy()
                seen = self.cast(
                    self.cast(self("MatMul", centred, directions), parameter), np.float64
                )
            log_x = self._log_densities(seen, gaussians)
        if model.algorithm != DENSITY:
            log_y = self._log_learners(x)
            if model.target is not None:
                outputs["mean"] = self._mean(log_x, log_y), np.float64, ("n",)
            else:
                proba = self("Exp", self._log_proba(log_x, log_y))
                index = self("ArgMax", proba, axis=1, keepdims=0)
                labels = _as_array(model.classes)
                outputs["label"] = self("Gather", labels, index), labels.dtype, ("n",)
                outputs["label_index"] = index, np.int64, ("n",)
                outputs["probabilities"] = proba, np.float64, ("n", len(labels))
        if log_x is not None:
            # log P_c(x) = log Σ_m1 N(x; μ_m1, Σ_m1) Σ_m2 π_c(m1, m2)
            density = self.reduce(
                "ReduceLogSumExp", self("Add", log_x, self.log_pi.logsumexp(-1).numpy()), 1
            )
            if model.scaling is not None and model.features_are_inputs and projection is None:
                density = self("Sub", density, np.array(model.scaling.log_volume))
            outputs["log_density"] = density, np.float64, ("n",)
        for name, (value, _, _) in outputs.items():
            self.nodes.append(helper.make_node("Identity", [value], [name]))
        return helper.make_graph(
            self.nodes,
            "fedgmm",
            [_value(*one) for one in inputs],
            [_value(name, kind, shape) for name, (_, kind, shape) in outputs.items()],
            self.constants,
        )

    def _log_densities(self, x: str, gaussians: Gaussians) -> str:
        """Return ``log N(x; μ_m1, Σ_m1)``, ``(n, M1)``, of rows ``(n, d)``."""
        d = gaussians.means.shape[1]
        difference = self("Sub", x, gaussians.means[:, None].cpu().numpy())  # (M1, n, d)
        whiteners = gaussians.precisions_cholesky.cpu().numpy()
        if gaussians.covariance_type in ("full", "tied"):
            white = self("MatMul", difference, whiteners)
        else:
            white = self("Mul", difference, whiteners.reshape(len(whiteners), 1, -1))
        squares = self.reduce("ReduceSumSquare", white, 2)
        squares = self("Transpose", self("Min", squares, np.array(_FARTHEST)), perm=[1, 0])
        constants = gaussians.log_determinants.cpu().numpy() - 0.5 * d * math.log(2.0 * math.pi)
        return self("Add", self("Mul", squares, np.array(-0.5)), constants)

    def _log_learners(self, x: str) -> str:
        """Return ``log P_θm2(y|x)``, ``(n, M2, K)``, or ``f_θm2(x)``, ``(n, M2, 1)``, in float64."""
        net = function_of(self.model.prediction.net)
        image = self.dtype == "uint8" and len(self.model.input_shape) == 3
        if image and self.model.scaling is None:
            x = self("Sub", self("Div", x, np.array(127.5)), np.array(1.0))
        if isinstance(net, Dense):
            outputs = self._dense(x, net)
        elif isinstance(net, Convolutional):
            outputs = self._convolutional(x)
        else:
            raise ValueError(
                "Only learners linear, mlp and cnn can be exported to ONNX, not "
                f"{self.model.options.get('learner', type(net).__name__)!r}."
            )
        outputs = self.cast(self("Transpose", outputs, perm=[1, 0, 2]), np.float64)
        return outputs if self.model.target is not None else self("LogSoftmax", outputs, axis=-1)

    def _dense(self, x: str, net: Dense) -> str:
        """Return the outputs of linear learners and MLPs, ``(M2, n, K)``."""
        params = {name: value.numpy() for name, value in self.learners.items()}
        hidden = self.cast(self("Flatten", x, axis=1), params["0.weight"].dtype)
        for layer in range(len(net.widths) - 1):
            weight, bias = params[f"{layer}.weight"], params[f"{layer}.bias"]
            hidden = hidden if layer == 0 else self("Relu", hidden)
            hidden = self("MatMul", hidden, np.ascontiguousarray(weight.swapaxes(-1, -2)))
            hidden = self("Add", hidden, bias[:, None])
        return hidden

    def _convolutional(self, x: str) -> str:
        """Return the outputs of :class:`~fedgmm.nets.convolutional.ConvNet`, ``(M2, n, K)``."""
        images = self.cast(x, np.float32)
        outputs = []
        for place in range(len(self.learners["classifier.0.bias"])):
            own = {name: value[place].float().numpy() for name, value in self.learners.items()}
            layers = ("features.0", "features.3", "classifier.0", "classifier.3")
            first, second, third, last = ((own[f"{n}.weight"], own[f"{n}.bias"]) for n in layers)
            hidden = images
            for layer in (first, second):
                hidden = self("Relu", self("Conv", hidden, *layer, pads=[1, 1, 1, 1]))
                hidden = self("MaxPool", hidden, kernel_shape=[2, 2], strides=[2, 2])
            hidden = self("Gemm", self("Flatten", hidden, axis=1), *third, transB=1)
            hidden = self("Gemm", self("Relu", hidden), *last, transB=1)
            outputs.append(self("Unsqueeze", hidden, np.array([0])))
        return self("Concat", *outputs, axis=0)

    def _log_learner_weights(self, log_x: str | None) -> str | NDArray[Any]:
        """Return ``log P_c(m2|x)``, ``(n, M2)``, or ``(1, M2)`` without Gaussians."""
        if log_x is None:
            return torch.log_softmax(self.log_pi.logsumexp(-2), -1).numpy()
        joint = self("Add", self("Unsqueeze", log_x, np.array([-1])), self.log_pi.numpy())
        return self("LogSoftmax", self.reduce("ReduceLogSumExp", joint, 1), axis=-1)

    def _log_proba(self, log_x: str | None, log_y: str) -> str:
        """Return ``log P_c(y|x)``, equation (3), ``(n, K)``."""
        if self.log_ratios is None:
            weights = self("Unsqueeze", self._log_learner_weights(log_x), np.array([-1]))
            mixed = self.reduce("ReduceLogSumExp", self("Add", weights, log_y), 1)
            return self("LogSoftmax", mixed, axis=-1)
        # corrected by the client's label frequencies: Σ_m P_c(m|x) P_m(y|x) P_c(y|m) / P(y|m)
        offsets = self.log_pi[..., None] + self.log_ratios  # (1, M1, M2, K)
        mixed = self("Add", self("Unsqueeze", log_y, np.array([1])), offsets.numpy())
        if log_x is not None:
            relative = self("Sub", log_x, self("ReduceMax", log_x, np.array([1]), keepdims=1))
            mixed = self("Add", mixed, self("Unsqueeze", relative, np.array([-2, -1])))
        return self("LogSoftmax", self.reduce("ReduceLogSumExp", mixed, 1, 2), axis=-1)

    def _mean(self, log_x: str | None, outputs: str) -> str:
        """Return ``E[y|x] = Σ_m P_c(m|x) f_θm(x)``, ``(n,)``."""
        target = self.model.target
        assert target is not None
        weights = self("Exp", self._log_learner_weights(log_x))
        mean = self("Mul", weights, self("Squeeze", outputs, np.array([-1])))
        mean = self.reduce("ReduceSum", mean, 1)
        return self("Add", self("Mul", mean, target.scale.cpu().numpy()), target.mean.cpu().numpy())


def _value(name: str, dtype: Any, shape: tuple[Any, ...]) -> Any:
    """Describe an input or output of the graph."""
    from onnx import TensorProto, helper

    kind = np.dtype(dtype)
    element = TensorProto.STRING if kind.kind in "OU" else helper.np_dtype_to_tensor_dtype(kind)
    return helper.make_tensor_value_info(name, element, list(shape))


def _as_array(classes: NDArray[Any]) -> NDArray[Any]:
    """Return the classes as ONNX can hold them: truth values, integers, numbers or texts."""
    kinds = {"b": np.bool_, "i": np.int64, "u": np.int64, "f": np.float64}
    if classes.dtype.kind in kinds:
        return classes.astype(kinds[classes.dtype.kind])
    return np.array([str(label) for label in classes.tolist()], dtype=object)


# ---------------------------------------------------------------------- scikit-learn


def to_gaussian_mixture(model: FederatedModel, code: int) -> GaussianMixture:
    """Return the Gaussians, see :meth:`FederatedModel.to_gaussian_mixture`."""
    from sklearn.mixture import GaussianMixture

    shared = model.prediction.gaussians
    if shared is None:
        raise ValueError(f"{model.algorithm} has no Gaussians; use 'fedgmm'.")
    log_pi = log_weights(model.prediction)[code].logsumexp(-1).cpu()
    kept = log_pi.isfinite()  # scikit-learn takes logarithms of weights
    kind: Any = "spherical" if shared.covariance_type == "identity" else shared.covariance_type
    means = shared.means.cpu()[kept]
    covariances, whiteners = shared.covariances.cpu(), shared.precisions_cholesky.cpu()
    if kind != "tied":
        covariances, whiteners = covariances[kept], whiteners[kept]
    scaling = model.scaling
    if scaling is not None and model.features_are_inputs and model.projection is None:
        # x = mean + scale · z, so Σ_x = S Σ_z S and W_x = S⁻¹ W_z
        scale: Tensor = scaling.scale.cpu().reshape(-1)
        means = scaling.mean.cpu().reshape(-1) + scale * means
        if kind == "spherical":  # one variance of scaled columns is one per column of the inputs
            covariances, whiteners, kind = covariances[:, None], whiteners[:, None], "diag"
        if kind == "diag":
            covariances, whiteners = covariances * scale**2, whiteners / scale
        else:
            covariances = covariances * torch.outer(scale, scale)
            whiteners = whiteners / scale[:, None]
    found = GaussianMixture(len(means), covariance_type=kind)
    found.weights_ = torch.softmax(log_pi[kept], 0).numpy()
    found.means_, found.covariances_ = means.numpy(), covariances.numpy()
    found.precisions_cholesky_ = whiteners.numpy()
    product = whiteners @ whiteners.mT if kind in ("full", "tied") else whiteners**2
    found.precisions_ = product.numpy()
    found.converged_, found.n_iter_ = True, len(model.history)
    found.lower_bound_ = model.history[-1]["log_likelihood"] if model.history else -math.inf
    found.n_features_in_ = means.shape[1]
    return found
