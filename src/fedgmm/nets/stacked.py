"""Convolutional modules with batch normalisation for stacked parameters, layer by layer.

Every layer of the module's graph is evaluated for all clients and learners at once: images have shape
``(G, c, n, h, w)`` and vectors ``(G, n, f)``, where ``G`` is clients × learners.

- A 1×1 convolution is a batched product.
- A depthwise convolution is a grouped convolution over ``G·c`` channels.
- Batch normalisation has ``G·c`` channels, so every client and learner has its own statistics. The ReLU
  after it is part of the same step.

``torch.func.vmap`` uses grouped convolutions for all layers and is several times slower. On a GPU,
layers that move much memory and compute little have their own kernels (:mod:`fedgmm.nets.kernels.fused`).
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedgmm.core.params import Params, is_statistic
from fedgmm.nets.backbones import MobileNetV2, ResNet18, load_weights, read_plain_pixels
from fedgmm.nets.convolutional import convolve
from fedgmm.nets.kernels import fused as kernels
from fedgmm.nets.kernels.fused import BatchStatistics
from fedgmm.nets.modules import seeded_module
from fedgmm.nets.networks import ModuleFactory, OfModules, TrainingHints

Operation = Callable[..., Tensor]
"""One layer: a :class:`ForwardPass` and the layer's inputs to its output."""


class ForwardPass(NamedTuple):
    """The arguments of one evaluation of the graph, passed to every layer."""

    params: Params  # parameters of all groups, ``(G, ...)``
    training: bool  # enable dropout, and normalise by the statistics of the batch
    # number of rows per group, ``(G,)``; padding follows them. ``None`` means no padding.
    counts: Tensor | None
    number: int  # number of the batch within the round, from one
    # running means and variances after this batch, ``(G, c)``; layers add theirs
    statistics: Params


class Instruction(NamedTuple):
    """One node of the graph."""

    name: str  # name of the node's value
    operation: Operation  # computes the value
    inputs: list[str]  # names of the values it reads
    last_used: list[str]  # names of the values that no later instruction reads


@dataclass(frozen=True)
class Stacked(OfModules):
    """A module made of convolutions, batch normalisation, pooling and dense layers."""

    hints: ClassVar[TrainingHints] = TrainingHints(even_batches=True, recorded=True)

    # makes a module that maps ``(n, channels, height, width)`` to logits ``(n, K)``
    factory: ModuleFactory
    input_shape: tuple[int, ...]  # shape of one image
    classes: int
    # dtype of the products on an accelerator; ``None`` means the dtype of the parameters
    compute: torch.dtype | None = None
    # approximate number of values that a learner holds per row in training
    activations_per_row: int = 400_000

    @cached_property
    def _module(self) -> nn.Module:
        return seeded_module(self.factory, torch.Generator()).eval().to("meta")

    @cached_property
    def _program(self) -> list[Instruction]:
        """The graph as a list of instructions; an unsupported operation raises ``ValueError``."""
        from torch.fx import symbolic_trace

        graph = symbolic_trace(self._module)
        nodes = [node for node in graph.graph.nodes if node.op != "output"]
        last_use = {used: node for node in nodes for used in node.all_input_nodes}
        result = next(node for node in graph.graph.nodes if node.op == "output").args[0]
        kept = nodes[: nodes.index(result) + 1]
        return [
            Instruction(
                node.name,
                _operation(graph, node),
                [used.name for used in node.all_input_nodes],
                [used.name for used in node.all_input_nodes if last_use[used] is node],
            )
            for node in kept
        ]

    @property
    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the parameters and running statistics that the module declares."""
        return {name: tuple(value.shape) for name, value in _values(self._module).items()}

    def initial(self, generator: torch.Generator) -> Params:
        """Draw the module's own initialisation, seeded by the generator."""
        _ = self._program  # raises if a layer is not supported
        return _values(seeded_module(self.factory, generator))

    def pretrained(self, path: Path, generator: torch.Generator) -> Params:
        """Read weights with torchvision's names; a head that does not fit keeps its random start.

        The weights in the file expect ImageNet's scaling of pixels; they are changed to read [-1, 1].
        """
        module = seeded_module(self.factory, generator)
        if not isinstance(module, MobileNetV2 | ResNet18):
            raise ValueError(
                f"There are no pretrained weights for {type(module).__name__}; use MobileNetV2 or ResNet18."
            )
        load_weights(module, path)
        read_plain_pixels(module)
        return _values(module)

    def forward(
        self,
        params: Params,
        inputs: Tensor,
        training: bool,
        counts: Tensor | None = None,
        number: int = 1,
    ) -> tuple[Tensor, Params]:
        """Return the logits and the running statistics, see :meth:`OfModules.forward`."""
        lead_axes = inputs.dim() - 4
        first = next(iter(params.values()))
        lead, learners = first.shape[:lead_axes], first.shape[lead_axes]
        dtype = first.dtype
        compute = self.compute if self.compute and inputs.device.type != "cpu" else dtype
        flat = {name: value.flatten(0, lead_axes) for name, value in params.items()}
        rows = inputs.shape[lead_axes]
        images = inputs.reshape(-1, 1, rows, *self.input_shape).to(compute)
        images = images.expand(-1, learners, *images.shape[2:]).flatten(0, 1).transpose(1, 2)
        if counts is not None:
            counts = counts.to(torch.int32).reshape(-1, 1).expand(-1, learners).flatten()
        # scales and shifts, which are no factors of a product, keep their precision
        factors = {n: v.to(compute) for n, v in flat.items() if v.dim() > 2 and not is_statistic(n)}
        call = ForwardPass({**flat, **factors}, training, counts, number, {})
        values: dict[str, Tensor] = {}
        name = ""
        for name, operation, used, last_used in self._program:
            values[name] = operation(call, *([values[one] for one in used] or [images]))
            for one in last_used:
                del values[one]
        out = values[name]  # (G, n, K)
        logits = out.reshape(*lead, learners, rows, self.classes).transpose(-3, -2).to(dtype)
        return logits, {n: v.reshape(*lead, learners, -1) for n, v in call.statistics.items()}


def _values(module: nn.Module) -> Params:
    """Return copies of a module's parameters and running statistics, without its counters of batches."""
    values = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return {
        n: v.detach().clone() for n, v in values.items() if not n.endswith("num_batches_tracked")
    }


# ---------------------------------------------------------------------- layers


def _operation(graph: Any, node: Any) -> Operation:
    """Return the function that computes a node of the graph for all groups at once."""
    ceiling = _ceiling(graph, node)
    # a ReLU behind a normalisation is part of it
    if node.op == "placeholder" or (ceiling is not None and _follows_norm(graph, node)):
        return lambda _, x: x
    if ceiling is not None:
        return lambda _, x: _activate(x, ceiling)
    if node.op == "call_module":
        users = list(node.users)
        following = _ceiling(graph, users[0]) if len(users) == 1 else None
        return _layer(graph.get_submodule(node.target), str(node.target), following)
    axes = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", ())
    if node.target in (operator.add, torch.add, "add"):
        return lambda _, a, b: a + b
    if node.target in ("mean", torch.mean) and tuple(axes) in ((2, 3), (-2, -1)):
        return lambda _, x: x.mean((-2, -1)).transpose(1, 2)  # (G, c, n, h, w) to (G, n, c)
    if node.target in (torch.flatten, "flatten") and tuple(node.args[1:]) in ((1,), (1, -1)):
        return lambda _, x: _flat(x)
    raise ValueError(f"Stacked training does not support the operation {node.target!r}.")


def _ceiling(graph: Any, node: Any) -> float | None:
    """Return the ceiling of a ReLU as the kernels encode it; ``None`` for any other node."""
    if node.op == "call_module":
        layer = graph.get_submodule(node.target)
        return {nn.ReLU: kernels.RELU, nn.ReLU6: kernels.RELU6}.get(type(layer))
    return kernels.RELU if node.target in (torch.relu, functional.relu, "relu") else None


def _follows_norm(graph: Any, node: Any) -> bool:
    """Whether a node is the only user of the output of a batch normalisation."""
    before = node.args[0]
    return (
        before.op == "call_module"
        and isinstance(graph.get_submodule(before.target), nn.BatchNorm2d)
        and len(before.users) == 1
    )


def _layer(layer: nn.Module, name: str, ceiling: float | None) -> Operation:
    """Return the function of a layer; ``ceiling`` is that of a ReLU that alone reads its output."""
    match layer:
        case nn.BatchNorm2d():
            return lambda call, x: _batch_norm(call, name, layer, x, ceiling)
        case nn.Conv2d():
            return _convolution(layer, name)
        case nn.Linear():
            return lambda call, x: _linear(call.params, name, x)
        case nn.MaxPool2d():
            return lambda _, x: _per_image(layer, x)
        case nn.Dropout():
            return lambda call, x: functional.dropout(x, layer.p, call.training)
        case nn.Flatten(start_dim=1):
            return lambda _, x: _flat(x)
        case nn.AdaptiveAvgPool2d(output_size=1 | (1, 1)):
            return lambda _, x: x.mean((-2, -1), keepdim=True)
        case nn.Identity():
            return lambda _, x: x
    raise ValueError(
        f"Stacked training does not support the layer {type(layer).__name__} ({name})."
    )


def _convolution(layer: nn.Conv2d, name: str) -> Operation:
    channels, groups = layer.in_channels, layer.groups
    if groups == 1 and layer.kernel_size == (1, 1) and layer.padding in (0, (0, 0)):
        kernel = _pointwise
    elif groups == 1:
        kernel = _full_convolution
    elif groups == channels == layer.out_channels:
        kernel = _depthwise
    else:
        raise ValueError(f"Stacked training does not support {groups} groups of channels ({name}).")
    if layer.dilation != (1, 1) or isinstance(layer.padding, str) or layer.padding_mode != "zeros":
        raise ValueError(
            f"Layer {name}: stacked training requires dilation 1 and numeric zero padding."
        )

    def filtered(call: ForwardPass, images: Tensor) -> Tensor:
        out = kernel(layer, call.params[f"{name}.weight"], images)
        if layer.bias is not None:
            out = out + call.params[f"{name}.bias"][..., None, None, None].to(out.dtype)
        return out

    return filtered


def _pointwise(layer: nn.Conv2d, weight: Tensor, images: Tensor) -> Tensor:
    """Apply 1×1 filters ``(G, c', c, 1, 1)`` to images ``(G, c, n, h, w)``."""
    down, right = layer.stride
    seen = images[..., ::down, ::right]
    out = torch.bmm(weight.flatten(2), seen.flatten(2))
    return out.reshape(*out.shape[:2], *seen.shape[2:])


def _full_convolution(layer: nn.Conv2d, weight: Tensor, images: Tensor) -> Tensor:
    """Apply filters ``(G, c', c, k, k)`` to images ``(G, c, n, h, w)``."""
    (down, right), padding = layer.stride, layer.padding
    assert not isinstance(padding, str)
    return convolve(images, weight, (down, right), (padding[0], padding[1]))


def _depthwise(layer: nn.Conv2d, weight: Tensor, images: Tensor) -> Tensor:
    """Apply one filter per channel, ``(G, c, 1, k, k)``, to images ``(G, c, n, h, w)``."""
    if kernels.usable(images) and weight.shape[-2:] == (3, 3) and layer.padding == (1, 1):
        down, right = layer.stride
        if down == right:
            return kernels.depthwise(images, weight, down)
    groups, channels, rows, height, width = images.shape
    # Two transpositions around torch's kernel cost less than any kernel that works in our order.
    out = functional.conv2d(
        images.permute(2, 0, 1, 3, 4).reshape(rows, groups * channels, height, width),
        weight.flatten(0, 1),
        stride=layer.stride,
        padding=layer.padding,
        groups=groups * channels,
    )
    return out.reshape(rows, groups, channels, *out.shape[-2:]).permute(1, 2, 0, 3, 4).contiguous()


def _batch_norm(
    call: ForwardPass, name: str, layer: nn.BatchNorm2d, images: Tensor, ceiling: float | None
) -> Tensor:
    """Normalise the images, then apply ReLU if ``ceiling`` is given.

    In training, every group is normalised by the statistics of its own rows.
    """
    params = call.params
    running = BatchStatistics(params[f"{name}.running_mean"], params[f"{name}.running_var"])
    weight, bias = params[f"{name}.weight"], params[f"{name}.bias"]
    fast = kernels.usable(images)
    highest = kernels.NO_ACTIVATION if ceiling is None else ceiling
    if not call.training:
        scale = weight / (running.variance + layer.eps).sqrt()
        if fast and not (images.requires_grad or scale.requires_grad):
            return kernels.scaled(images, scale, bias - running.mean * scale, highest)
        return _activate(_normalise_by_running(layer, images, running, weight, bias), ceiling)
    # Running statistics are the mean over the first batches of a round, then a moving average.
    momentum = max(layer.momentum or 0.0, 1.0 / call.number)
    if fast:
        out, new = kernels.normalised(
            images, weight, bias, call.counts, running, momentum, layer.eps, highest
        )
    else:
        out, own = _normalise_by_batch(images, call.counts, weight, bias, layer.eps)
        out = _activate(out, ceiling)
        new = _moving_average(running, own, _unbiased(images, call.counts), momentum)
    new = new._replace(variance=_defined_variance(images, call.counts, running, new))
    for kind, old, value in zip(("mean", "var"), running, new, strict=True):
        call.statistics[f"{name}.running_{kind}"] = value.detach().to(old.dtype)
    return out


def _moving_average(
    running: BatchStatistics, own: BatchStatistics, unbiased: Tensor | float, momentum: float
) -> BatchStatistics:
    """Return the running statistics after a batch; ``own.variance`` is the batch's biased variance."""
    pairs = zip(running, (own.mean, own.variance * unbiased), strict=True)
    return BatchStatistics(*(torch.lerp(old, new.to(old.dtype), momentum) for old, new in pairs))


def _unbiased(images: Tensor, counts: Tensor | None) -> Tensor | float:
    """Return ``n / (n - 1)`` for the ``n`` numbers of a channel, or one for a single number."""
    place = images[0, 0, 0].numel()
    if counts is None:
        numbers = images.shape[2] * place
        return numbers / max(1, numbers - 1)
    own = counts[:, None] * place
    return own / (own - 1).clamp_min(1)


def _defined_variance(
    images: Tensor, counts: Tensor | None, running: BatchStatistics, new: BatchStatistics
) -> Tensor:
    """Return the new variances, but the old ones where a channel has a single number.

    A single number has variance zero, which would scale up later inputs without bound.
    """
    if images[0, 0, 0].numel() > 1:
        return new.variance
    if counts is None:
        return new.variance if images.shape[2] > 1 else running.variance
    return torch.where(counts[:, None] > 1, new.variance, running.variance.to(new.variance))


def _activate(images: Tensor, ceiling: float | None) -> Tensor:
    if ceiling is None:
        return images
    return torch.relu(images) if ceiling == kernels.RELU else images.clamp(0.0, ceiling)


def _normalise_by_running(
    layer: nn.BatchNorm2d, images: Tensor, running: BatchStatistics, weight: Tensor, bias: Tensor
) -> Tensor:
    """Normalise images by the running statistics."""
    dtype = running.mean.dtype
    out = functional.batch_norm(
        images.reshape(1, weight.numel(), -1),
        running.mean.flatten(),
        running.variance.flatten(),
        weight.flatten().to(dtype),
        bias.flatten().to(dtype),
        eps=layer.eps,
    )
    return out.reshape(images.shape)


def _normalise_by_batch(
    images: Tensor, counts: Tensor | None, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, BatchStatistics]:
    """Normalise images by their rows without padding; also return mean and biased variance ``(G, c)``."""
    groups, channels = images.shape[:2]
    whole = images[0, 0].numel()
    if counts is None and whole > 1:  # torch refuses to normalise a single number
        mean, variance = torch.zeros_like(weight), torch.zeros_like(weight)
        flat_mean, flat_variance = mean.detach().flatten(), variance.detach().flatten()
        out = functional.batch_norm(
            images.reshape(1, groups * channels, -1),
            flat_mean,
            flat_variance,
            weight.flatten(),
            bias.flatten(),
            training=True,
            momentum=1.0,
            eps=eps,
        )
        biased = flat_variance * ((whole - 1) / whole)
        own = BatchStatistics(flat_mean.view_as(mean), biased.view_as(mean))
        return out.reshape(images.shape), own
    if counts is None:
        counts = torch.full((groups,), images.shape[2], device=images.device)
    exact = images.float() if images.dtype == torch.bfloat16 else images
    mask = torch.arange(images.shape[2], device=images.device) < counts[:, None]
    present = mask[:, None, :, None, None].to(exact.dtype)
    numbers = counts[:, None].clamp_min(1).to(exact.dtype) * images[0, 0, 0].numel()
    mean = (exact * present).sum((2, 3, 4)) / numbers
    centred = exact - mean[..., None, None, None]
    variance = (centred.square() * present).sum((2, 3, 4)) / numbers
    scale = weight.to(exact.dtype) / (variance + eps).sqrt()
    out = centred * scale[..., None, None, None] + bias.to(exact.dtype)[..., None, None, None]
    # without this, padding would grow from layer to layer
    out = torch.where(present > 0, out, torch.zeros_like(out))
    return out.to(images.dtype), BatchStatistics(mean.detach(), variance.detach())


def _linear(params: Params, name: str, x: Tensor) -> Tensor:
    """Apply a linear layer per group: ``(G, n, f)`` to ``(G, n, f')``."""
    weight = params[f"{name}.weight"].mT
    if f"{name}.bias" not in params:
        return torch.bmm(x, weight)
    return torch.baddbmm(params[f"{name}.bias"].unsqueeze(1).to(x.dtype), x, weight)


def _per_image(layer: nn.Module, images: Tensor) -> Tensor:
    """Apply a layer without parameters to images ``(G, c, n, h, w)``."""
    out: Tensor = layer(images.flatten(1, 2))
    return out.reshape(*images.shape[:3], *out.shape[-2:])


def _flat(images: Tensor) -> Tensor:
    """Flatten ``(G, c, n, h, w)`` to ``(G, n, c·h·w)``; vectors ``(G, n, f)`` are returned unchanged."""
    return images.transpose(1, 2).flatten(2) if images.dim() == 5 else images
