"""Any convolutional module for stacked parameters, layer by layer in batched kernels.

The module's graph is walked with values that carry all clients and learners at once: images as
``(G, c, n, h, w)`` and vectors as ``(G, n, f)``, with ``G`` clients × learners. A 1×1 convolution is a
batched product, one that filters each channel by itself is a grouped convolution over ``G·c`` channels,
and batch normalisation takes its statistics over ``G·c`` channels, so every client and learner has its
own, and the ReLU that follows goes with it. ``torch.func.vmap`` does the same through grouped
convolutions throughout, several times slower. On a card the layers that move much memory and compute
little are kernels of their own (:mod:`fedgmm.nets.kernels.fused`).
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
from fedgmm.nets.convolutions import convolve
from fedgmm.nets.kernels import fused as kernels
from fedgmm.nets.networks import Handling, ModuleFactory, Vectorised


class Pass(NamedTuple):
    """What a walk through the graph carries along.

    Attributes:
        params: of all groups, ``(G, ...)``.
        training: dropout is on, and batch normalisation takes its statistics from the batch.
        counts: how many rows are there, ``(G,)``, and they come first; ``None`` means all.
        number: which batch of the round this is, from one.
        statistics: running means and variances after this batch, ``(G, c)``; filled on the way.
    """

    params: Params
    training: bool
    counts: Tensor | None
    number: int
    statistics: Params


class Instruction(NamedTuple):
    """One step of a walk: what it is called, what it does, with which values, and which are done with."""

    name: str
    operation: Callable[..., Tensor]
    used: list[str]
    finished: list[str]


@dataclass(frozen=True)
class Stacked:
    """A module made of convolutions, batch normalisation, pooling and dense layers.

    Attributes:
        factory: makes a module that maps ``(n, channels, height, width)`` to logits ``(n, K)``.
        input_shape: of one image.
        classes: ``K``.
        compute: dtype of the products on an accelerator; ``None`` means that of the parameters.
        row_numbers: about how many numbers a learner holds at once for each row.
    """

    handling: ClassVar[Handling] = Handling(even_batches=True, recorded=True)

    factory: ModuleFactory
    input_shape: tuple[int, ...]
    classes: int
    compute: torch.dtype | None = None
    row_numbers: int = 400_000

    @cached_property
    def _plain(self) -> Vectorised:
        return Vectorised(self.factory, self.input_shape, self.classes)

    @cached_property
    def _program(self) -> list[Instruction]:
        """The graph as a list; raises where it does not know an operation."""
        from torch.fx import symbolic_trace

        graph = symbolic_trace(self._plain._for_evaluation)
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
        """Parameters and running statistics, as the module declares them."""
        return {name: tuple(value.shape) for name, value in _state(self._plain._for_evaluation)}

    def initial(self, generator: torch.Generator) -> Params:
        """The module's own initialisation, seeded by the generator."""
        _ = self._program  # tells what it does not know
        return {name: value.detach().clone() for name, value in _state(self._drawn(generator))}

    def pretrained(self, path: Path, generator: torch.Generator) -> Params:
        """Weights from a file with torchvision's names; a head of other classes is drawn.

        The file's network was trained on scaled pictures; this one reads pixels in [-1, 1].
        """
        module = self._drawn(generator)
        if not isinstance(module, MobileNetV2 | ResNet18):
            raise ValueError(f"There are no pretrained weights for {type(module).__name__}.")
        load_weights(module, path)
        read_plain_pixels(module)
        return {name: value.detach().clone() for name, value in _state(module)}

    def _drawn(self, generator: torch.Generator) -> nn.Module:
        seed = int(torch.randint(2**62, (), generator=generator))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self.factory()

    def logits(self, params: Params, inputs: Tensor, training: bool = False) -> Tensor:
        """Logits ``(*C, n, M, K)``."""
        return self.walk(params, inputs, training)[0]

    def walk(
        self,
        params: Params,
        inputs: Tensor,
        training: bool,
        counts: Tensor | None = None,
        number: int = 1,
    ) -> tuple[Tensor, Params]:
        """Logits ``(*C, n, M, K)``, and the running statistics after a batch of training.

        Args:
            params: ``(*C, M, ...)``.
            inputs: ``(*C, n, channels, height, width)``.
            training: as in training.
            counts: how many rows are there, ``(*C,)``; the others come last and do not touch the
                statistics. ``None`` means all.
            number: which batch of the round this is, from one. The first one's statistics take the place of
                the old, which are those of other weights: a server moves them, and with momentum far.
        """
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
        journey = Pass(
            {n: v.to(compute) if _is_product(n, v) else v for n, v in flat.items()},
            training,
            counts,
            number,
            {},
        )
        out = self._walk(images, journey)  # (G, n, K)
        logits = out.reshape(*lead, learners, rows, self.classes).transpose(-3, -2).to(dtype)
        statistics = {
            name: value.reshape(*lead, learners, -1) for name, value in journey.statistics.items()
        }
        return logits, statistics

    def _walk(self, images: Tensor, journey: Pass) -> Tensor:
        values: dict[str, Tensor] = {}
        name = ""
        for name, operation, used, finished in self._program:
            given = [values[one] for one in used] if used else [images]
            values[name] = operation(journey, *given)
            for one in finished:
                del values[one]
        return values[name]


def _state(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Parameters and running statistics; how many batches there were is of no use."""
    statistics = [(name, value) for name, value in module.named_buffers() if is_statistic(name)]
    return [*module.named_parameters(), *statistics]


# ---------------------------------------------------------------------- layers


Operation = Callable[..., Tensor]


def _operation(graph: Any, node: Any) -> Operation:
    """How a node of the graph is computed for all groups at once."""
    if node.op == "placeholder" or (
        _ceiling(graph, node) is not None and _follows_norm(graph, node)
    ):  # such a ReLU is done together with the normalisation
        return lambda _, x: x
    if node.op == "call_module":
        layer, name = graph.get_submodule(node.target), str(node.target)
        if isinstance(layer, nn.BatchNorm2d):
            user = _only_user(node)
            ceiling = None if user is None else _ceiling(graph, user)
            return lambda journey, x: _normalised(journey, name, layer, x, ceiling)
        return _layer(layer, name)
    if node.target in (operator.add, torch.add, "add"):
        return lambda _, a, b: a + b
    if node.target in (torch.relu, functional.relu, "relu"):
        return lambda _, x: torch.relu(x)
    if node.target in ("mean", torch.mean) and tuple(_axes(node)) in ((2, 3), (-2, -1)):
        return lambda _, x: _averaged(x)
    if node.target in (torch.flatten, "flatten") and tuple(node.args[1:]) in ((1,), (1, -1)):
        return lambda _, x: _flat(x)
    raise ValueError(f"Stacked training does not know the operation {node.target!r}.")


def _ceiling(graph: Any, node: Any) -> float | None:
    """The ceiling of a ReLU, as the kernels name it; ``None`` for any other node."""
    if node.op == "call_module":
        layer = graph.get_submodule(node.target)
        return {nn.ReLU: kernels.RELU, nn.ReLU6: kernels.RELU6}.get(type(layer))
    return kernels.RELU if node.target in (torch.relu, functional.relu, "relu") else None


def _only_user(node: Any) -> Any:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _follows_norm(graph: Any, node: Any) -> bool:
    """Whether a node alone uses what a batch normalisation makes."""
    before = node.args[0]
    return (
        before.op == "call_module"
        and isinstance(graph.get_submodule(before.target), nn.BatchNorm2d)
        and _only_user(before) is node
    )


def _is_product(name: str, value: Tensor) -> bool:
    """Whether a stacked parameter is a factor of products; scales and shifts stay exact."""
    return value.dim() > 2 and not is_statistic(name)


def _axes(node: Any) -> Any:
    return node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", ())


def _layer(layer: nn.Module, name: str) -> Operation:
    match layer:
        case nn.Conv2d():
            return _convolution(layer, name)
        case nn.Linear():
            return lambda journey, x: _dense(journey.params, name, x)
        case nn.ReLU6():
            return lambda _, x: functional.relu6(x)
        case nn.ReLU():
            return lambda _, x: torch.relu(x)
        case nn.MaxPool2d():
            return lambda _, x: _on_images(layer, x)
        case nn.Dropout():
            return lambda journey, x: functional.dropout(x, layer.p, journey.training)
        case nn.Flatten(start_dim=1):
            return lambda _, x: _flat(x)
        case nn.AdaptiveAvgPool2d(output_size=1 | (1, 1)):
            return lambda _, x: x.mean((-2, -1), keepdim=True)
        case nn.Identity():
            return lambda _, x: x
    raise ValueError(f"Stacked training does not know the layer {type(layer).__name__} ({name}).")


def _convolution(layer: nn.Conv2d, name: str) -> Operation:
    channels, groups = layer.in_channels, layer.groups
    if groups == 1 and layer.kernel_size == (1, 1) and layer.padding in (0, (0, 0)):
        kernel = _pointwise
    elif groups == 1:
        kernel = _full
    elif groups == channels == layer.out_channels:
        kernel = _each_channel
    else:
        raise ValueError(f"Stacked training does not know {groups} groups of channels ({name}).")
    if layer.dilation != (1, 1) or isinstance(layer.padding, str) or layer.padding_mode != "zeros":
        raise ValueError(f"Stacked training does not know this kind of padding ({name}).")

    def filtered(journey: Pass, images: Tensor) -> Tensor:
        out = kernel(layer, journey.params[f"{name}.weight"], images)
        if layer.bias is not None:
            out = out + journey.params[f"{name}.bias"][..., None, None, None].to(out.dtype)
        return out

    return filtered


def _pointwise(layer: nn.Conv2d, weight: Tensor, images: Tensor) -> Tensor:
    """``(G, c', c, 1, 1)`` on ``(G, c, n, h, w)``."""
    down, right = layer.stride
    seen = images[..., ::down, ::right]
    out = torch.bmm(weight.flatten(2), seen.flatten(2))
    return out.reshape(*out.shape[:2], *seen.shape[2:])


def _full(layer: nn.Conv2d, weight: Tensor, images: Tensor) -> Tensor:
    """``(G, c', c, k, k)`` on ``(G, c, n, h, w)``: a product with every place's neighbourhood."""
    (down, right), padding = layer.stride, layer.padding
    assert not isinstance(padding, str)
    return convolve(images, weight, (down, right), (padding[0], padding[1]))


def _each_channel(layer: nn.Conv2d, weight: Tensor, images: Tensor) -> Tensor:
    """``(G, c, 1, k, k)`` on ``(G, c, n, h, w)``: each channel has a filter of its own."""
    if kernels.usable(images) and weight.shape[-2:] == (3, 3) and layer.padding == (1, 1):
        down, right = layer.stride
        if down == right:
            return kernels.depthwise(images, weight, down)
    groups, channels, rows, height, width = images.shape
    # images first for the kernel, and back: cheaper than any kernel that keeps our order
    out = functional.conv2d(
        images.permute(2, 0, 1, 3, 4).reshape(rows, groups * channels, height, width),
        weight.flatten(0, 1),
        stride=layer.stride,
        padding=layer.padding,
        groups=groups * channels,
    )
    return out.reshape(rows, groups, channels, *out.shape[-2:]).permute(1, 2, 0, 3, 4).contiguous()


def _normalised(
    journey: Pass, name: str, layer: nn.BatchNorm2d, images: Tensor, ceiling: float | None
) -> Tensor:
    """Batch normalisation, then ReLU if there is a ceiling.

    In training every group is normalised by the statistics of its own rows.
    """
    params = journey.params
    running = kernels.BatchStatistics(params[f"{name}.running_mean"], params[f"{name}.running_var"])
    weight, bias = params[f"{name}.weight"], params[f"{name}.bias"]
    fast = kernels.usable(images)
    highest = kernels.NO_ACTIVATION if ceiling is None else ceiling
    if not journey.training:
        scale = weight / (running.variance + layer.eps).sqrt()
        if fast and not (images.requires_grad or scale.requires_grad):
            return kernels.scaled(images, scale, bias - running.mean * scale, highest)
        return _activated(_by_fixed_statistics(layer, images, running, weight, bias), ceiling)
    # the mean over a round's batches, until there are so many that it would move less than it should
    momentum = max(layer.momentum or 0.0, 1.0 / journey.number)
    if fast:
        out, moved = kernels.normalised(
            images, weight, bias, journey.counts, running, momentum, layer.eps, highest
        )
    else:
        out, own = _by_own_statistics(images, journey.counts, weight, bias, layer.eps)
        out = _activated(out, ceiling)
        moved = _moved(running, own, _unbiased(images, journey.counts), momentum)
    moved = moved._replace(variance=_with_a_variance(images, journey.counts, running, moved))
    for kind, old, new in zip(("mean", "var"), running, moved, strict=True):
        journey.statistics[f"{name}.running_{kind}"] = new.detach().to(old.dtype)
    return out


def _moved(
    running: kernels.BatchStatistics,
    own: kernels.BatchStatistics,
    unbiased: Tensor | float,
    momentum: float,
) -> kernels.BatchStatistics:
    """Running statistics after a batch whose own have a biased variance."""
    news = own.mean, own.variance * unbiased
    return kernels.BatchStatistics(
        *(
            torch.lerp(old, new.to(old.dtype), momentum)
            for old, new in zip(running, news, strict=True)
        )
    )


def _unbiased(images: Tensor, counts: Tensor | None) -> Tensor | float:
    """``n / (n - 1)`` for the ``n`` numbers of a channel; a single one has no variance of its own."""
    place = images[0, 0, 0].numel()
    if counts is None:
        numbers = images.shape[2] * place
        return numbers / max(1, numbers - 1)
    own = counts[:, None] * place
    return own / (own - 1).clamp_min(1)


def _with_a_variance(
    images: Tensor,
    counts: Tensor | None,
    running: kernels.BatchStatistics,
    moved: kernels.BatchStatistics,
) -> Tensor:
    """The new variances, but the old ones where a channel has a single number, and so none of its own."""
    if images[0, 0, 0].numel() > 1:
        return moved.variance
    if counts is None:
        return moved.variance if images.shape[2] > 1 else running.variance
    return torch.where(counts[:, None] > 1, moved.variance, running.variance.to(moved.variance))


def _activated(images: Tensor, ceiling: float | None) -> Tensor:
    if ceiling is None:
        return images
    return torch.relu(images) if ceiling == kernels.RELU else images.clamp(0.0, ceiling)


def _by_fixed_statistics(
    layer: nn.BatchNorm2d,
    images: Tensor,
    running: kernels.BatchStatistics,
    weight: Tensor,
    bias: Tensor,
) -> Tensor:
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


def _by_own_statistics(
    images: Tensor, counts: Tensor | None, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, kernels.BatchStatistics]:
    """Images normalised by the rows that are there; also their mean and biased variance ``(G, c)``."""
    groups, channels = images.shape[:2]
    whole = images[0, 0].numel()
    if counts is None and whole > 1:  # torch's own refuses to normalise a single number
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
        own = kernels.BatchStatistics(flat_mean.view_as(mean), biased.view_as(mean))
        return out.reshape(images.shape), own
    if counts is None:
        counts = torch.full((groups,), images.shape[2], device=images.device)
    exact = images.float() if images.dtype == torch.bfloat16 else images
    mask = torch.arange(images.shape[2], device=images.device) < counts[:, None]
    there = mask[:, None, :, None, None].to(exact.dtype)
    numbers = counts[:, None].clamp_min(1).to(exact.dtype) * images[0, 0, 0].numel()
    mean = (exact * there).sum((2, 3, 4)) / numbers
    centred = exact - mean[..., None, None, None]
    variance = (centred.square() * there).sum((2, 3, 4)) / numbers
    scale = weight.to(exact.dtype) / (variance + eps).sqrt()
    out = centred * scale[..., None, None, None] + bias.to(exact.dtype)[..., None, None, None]
    # rows that are not there would grow from layer to layer
    out = torch.where(there > 0, out, torch.zeros_like(out))
    return out.to(images.dtype), kernels.BatchStatistics(mean.detach(), variance.detach())


def _dense(params: Params, name: str, x: Tensor) -> Tensor:
    """``(G, n, f)`` to ``(G, n, f')``."""
    weight = params[f"{name}.weight"].mT
    if f"{name}.bias" not in params:
        return torch.bmm(x, weight)
    return torch.baddbmm(params[f"{name}.bias"].unsqueeze(1).to(x.dtype), x, weight)


def _on_images(layer: nn.Module, images: Tensor) -> Tensor:
    out: Tensor = layer(images.flatten(1, 2))
    return out.reshape(*images.shape[:3], *out.shape[-2:])


def _averaged(images: Tensor) -> Tensor:
    """``(G, c, n, h, w)`` to ``(G, n, c)``."""
    return images.mean((-2, -1)).transpose(1, 2)


def _flat(images: Tensor) -> Tensor:
    """``(G, c, n, h, w)`` to ``(G, n, c·h·w)``; what is flat already stays."""
    return images.transpose(1, 2).flatten(2) if images.dim() == 5 else images
