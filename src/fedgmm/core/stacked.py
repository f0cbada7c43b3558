"""Any convolutional module for stacked parameters, layer by layer in batched kernels.

The module's graph is walked with values that carry all clients and learners at once: images as
``(G, c, n, h, w)`` and vectors as ``(G, n, f)``, with ``G`` clients × learners. A 1×1 convolution is a
batched product, one that filters each channel by itself is a grouped convolution over ``G·c`` channels,
and batch normalisation takes its statistics over ``G·c`` channels, so every client and learner has its
own. ``torch.func.vmap`` does the same through grouped convolutions throughout, several times slower.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedgmm.core.convolutions import convolve
from fedgmm.core.networks import ModuleFactory, Params, Vectorised, is_statistic


class Pass(NamedTuple):
    """What a walk through the graph carries along.

    Attributes:
        params: of all groups, ``(G, ...)``.
        training: dropout is on, and batch normalisation takes its statistics from the batch.
        mask: which rows are there, ``(G, n)``; ``None`` means all.
        statistics: running means and variances after this batch, ``(G, c)``; filled on the way.
    """

    params: Params
    training: bool
    mask: Tensor | None
    statistics: Params


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

    factory: ModuleFactory
    input_shape: tuple[int, ...]
    classes: int
    compute: torch.dtype | None = None
    row_numbers: int = 400_000

    @cached_property
    def _plain(self) -> Vectorised:
        return Vectorised(self.factory, self.input_shape, self.classes)

    @cached_property
    def _graph(self) -> torch.fx.GraphModule:
        from torch.fx import symbolic_trace

        graph = symbolic_trace(self._plain._for_evaluation)
        for node in graph.graph.nodes:
            _operation(graph, node)  # raises where it does not know one
        return graph

    @property
    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """Parameters and running statistics, as the module declares them."""
        return {name: tuple(value.shape) for name, value in _state(self._plain._for_evaluation)}

    def initial(self, generator: torch.Generator) -> Params:
        """The module's own initialisation, seeded by the generator."""
        _ = self._graph  # tells what it does not know
        seed = int(torch.randint(2**62, (), generator=generator))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            module = self.factory()
        return {name: value.detach().clone() for name, value in _state(module)}

    def logits(self, params: Params, inputs: Tensor, training: bool = False) -> Tensor:
        """Logits ``(*C, n, M, K)``."""
        return self.walk(params, inputs, training, None)[0]

    def walk(
        self, params: Params, inputs: Tensor, training: bool, mask: Tensor | None
    ) -> tuple[Tensor, Params]:
        """Logits ``(*C, n, M, K)``, and the running statistics after a batch of training.

        Args:
            params: ``(*C, M, ...)``.
            inputs: ``(*C, n, channels, height, width)``.
            training: as in training.
            mask: which rows are there, ``(*C, n)``; the others do not touch the statistics.
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
        if mask is not None:
            mask = mask.reshape(-1, 1, rows).expand(-1, learners, -1).flatten(0, 1)
        journey = Pass(
            {n: v if is_statistic(n) else v.to(compute) for n, v in flat.items()},
            training,
            mask,
            {},
        )
        out = self._walk(images, journey)  # (G, n, K)
        logits = out.reshape(*lead, learners, rows, self.classes).transpose(-3, -2).to(dtype)
        statistics = {
            name: value.reshape(*lead, learners, -1) for name, value in journey.statistics.items()
        }
        return logits, statistics

    def _walk(self, images: Tensor, journey: Pass) -> Tensor:
        graph, values = self._graph, dict[Any, Any]()
        last_use = {}
        for node in graph.graph.nodes:
            for used in node.all_input_nodes:
                last_use[used] = node
        for node in graph.graph.nodes:
            if node.op == "placeholder":
                values[node] = images
            elif node.op == "output":
                out: Tensor = values[node.args[0]]
                return out
            else:
                given = [values[used] for used in node.all_input_nodes]
                values[node] = _operation(graph, node)(journey, *given)
                for used in node.all_input_nodes:
                    if last_use[used] is node:
                        del values[used]
        raise AssertionError("a graph has an output")


def _state(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Parameters and running statistics; how many batches there were is of no use."""
    statistics = [(name, value) for name, value in module.named_buffers() if is_statistic(name)]
    return [*module.named_parameters(), *statistics]


# ---------------------------------------------------------------------- layers


Operation = Callable[..., Tensor]


def _operation(graph: Any, node: Any) -> Operation:
    """How a node of the graph is computed for all groups at once."""
    if node.op in ("placeholder", "output"):
        return lambda *_: torch.empty(0)
    if node.op == "call_module":
        return _layer(graph.get_submodule(node.target), str(node.target))
    if node.target in (operator.add, torch.add, "add"):
        return lambda _, a, b: a + b
    if node.target in (torch.relu, functional.relu, "relu"):
        return lambda _, x: torch.relu(x)
    if node.target in ("mean", torch.mean) and tuple(_axes(node)) in ((2, 3), (-2, -1)):
        return lambda _, x: _averaged(x)
    if node.target in (torch.flatten, "flatten") and tuple(node.args[1:]) in ((1,), (1, -1)):
        return lambda _, x: _flat(x)
    raise ValueError(f"Stacked training does not know the operation {node.target!r}.")


def _axes(node: Any) -> Any:
    return node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", ())


def _layer(layer: nn.Module, name: str) -> Operation:
    match layer:
        case nn.Conv2d():
            return _convolution(layer, name)
        case nn.BatchNorm2d():
            return lambda journey, x: _normalised(journey, name, layer, x)
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
            out = out + journey.params[f"{name}.bias"][..., None, None, None]
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
    return convolve(images, weight, None, (down, right), (padding[0], padding[1]))


def _each_channel(layer: nn.Conv2d, weight: Tensor, images: Tensor) -> Tensor:
    """``(G, c, 1, k, k)`` on ``(G, c, n, h, w)``: each channel has a filter of its own."""
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


def _normalised(journey: Pass, name: str, layer: nn.BatchNorm2d, images: Tensor) -> Tensor:
    """Batch normalisation; in training every group by the statistics of its own rows."""
    groups, channels = images.shape[:2]
    params = journey.params
    mean, variance = params[f"{name}.running_mean"], params[f"{name}.running_var"]
    weight, bias = params[f"{name}.weight"], params[f"{name}.bias"]
    flat = images.reshape(1, groups * channels, -1)
    if not journey.training:
        out = functional.batch_norm(
            flat,
            mean.flatten(),
            variance.flatten(),
            weight.flatten().to(mean.dtype),
            bias.flatten().to(mean.dtype),
            eps=layer.eps,
        )
        return out.reshape(images.shape)
    momentum = 0.1 if layer.momentum is None else layer.momentum
    if journey.mask is None:
        new_mean, new_variance = mean.flatten().clone(), variance.flatten().clone()
        out = functional.batch_norm(
            flat,
            new_mean,
            new_variance,
            weight.flatten().to(mean.dtype),
            bias.flatten().to(mean.dtype),
            training=True,
            momentum=momentum,
            eps=layer.eps,
        ).reshape(images.shape)
    else:
        out, own_mean, own_variance, numbers = _masked_normal(
            images, journey.mask, weight, bias, layer.eps
        )
        # a single number has no variance of its own
        unbiased = own_variance * numbers / (numbers - 1.0).clamp_min(1.0)
        new_mean = torch.lerp(mean, own_mean.to(mean.dtype), momentum)
        new_variance = torch.lerp(variance, unbiased.to(mean.dtype), momentum)
    journey.statistics[f"{name}.running_mean"] = new_mean.detach().reshape(groups, channels)
    journey.statistics[f"{name}.running_var"] = new_variance.detach().reshape(groups, channels)
    return out


def _masked_normal(
    images: Tensor, mask: Tensor, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The same over the rows that are there; also their mean and variance ``(G, c)``, and how many.

    The count ``(G, 1)`` is that of the numbers which each channel has.
    """
    exact = images.float() if images.dtype == torch.bfloat16 else images
    there = mask[:, None, :, None, None].to(exact.dtype)
    numbers = mask.sum(1, keepdim=True).clamp_min(1).to(exact.dtype) * images[0, 0, 0].numel()
    mean = (exact * there).sum((2, 3, 4)) / numbers
    centred = exact - mean[..., None, None, None]
    variance = (centred.square() * there).sum((2, 3, 4)) / numbers
    scale = weight.to(exact.dtype) / (variance + eps).sqrt()
    out = centred * scale[..., None, None, None] + bias.to(exact.dtype)[..., None, None, None]
    return out.to(images.dtype), mean.detach(), variance.detach(), numbers


def _dense(params: Params, name: str, x: Tensor) -> Tensor:
    """``(G, n, f)`` to ``(G, n, f')``."""
    weight = params[f"{name}.weight"].mT
    if f"{name}.bias" not in params:
        return torch.bmm(x, weight)
    return torch.baddbmm(params[f"{name}.bias"].unsqueeze(1), x, weight)


def _on_images(layer: nn.Module, images: Tensor) -> Tensor:
    out: Tensor = layer(images.flatten(1, 2))
    return out.reshape(*images.shape[:3], *out.shape[-2:])


def _averaged(images: Tensor) -> Tensor:
    """``(G, c, n, h, w)`` to ``(G, n, c)``."""
    return images.mean((-2, -1)).transpose(1, 2)


def _flat(images: Tensor) -> Tensor:
    """``(G, c, n, h, w)`` to ``(G, n, c·h·w)``; what is flat already stays."""
    return images.transpose(1, 2).flatten(2) if images.dim() == 5 else images
