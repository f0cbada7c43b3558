"""Supervised networks as functions of stacked parameters.

A network's parameters are a dictionary of tensors. Stacked parameters have leading axes: any number
of axes for clients, then one for learners. ``logits`` evaluates all learners of all clients at once::

    parameters  (*C, M, ...)      inputs  (*C, n, *shape)      ->      logits  (*C, n, M, K)

- :class:`Dense`: linear learners and MLPs, as matrix products with leading axes;
- :class:`Convolutional`: the small network for images, as batched matrix products;
- :class:`~fedgmm.nets.stacked.Stacked`: modules of convolutions and batch normalisation;
- :class:`Vectorised`: any other ``torch.nn.Module``, vectorised by ``torch.func``.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.functional import dropout, max_pool2d, pad, relu

from fedgmm.core.params import Params
from fedgmm.nets.kernels import fused as kernels

ModuleFactory = Callable[[], nn.Module]
Pair = tuple[int, int]
"""Vertical and horizontal value of a convolution's option."""

_MODULE_LOCK = threading.Lock()


@dataclass(frozen=True)
class TrainingHints:
    """Settings that make the training of one kind of network fast or stable.

    Attributes:
        in_lanes: on a CPU, train groups of clients in parallel with one thread each, because threads
            inside an operation do not speed up small networks.
        max_clients: largest group of clients on a GPU; ``None`` means as many as fit in memory.
        even_batches: the batches of a client differ by at most one row, because the network uses
            statistics of each batch.
        recorded: record a round on a GPU and replay it, because its kernels take longer to start than
            to run. Such networks must be hashable.
    """

    in_lanes: bool = False
    max_clients: int | None = None
    even_batches: bool = False
    recorded: bool = False


class Network(Protocol):
    """A function from inputs and stacked parameters to class logits."""

    @property
    def classes(self) -> int:
        """Number of classes ``K``."""
        ...

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one row; ``(columns,)`` for networks that flatten their inputs."""
        ...

    @property
    def activations_per_row(self) -> int:
        """Approximate number of values that a learner holds per row in training, for memory budgets."""
        ...

    @property
    def hints(self) -> TrainingHints:
        """Settings for fast and stable training."""
        ...

    @property
    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the parameters of one learner."""
        ...

    def initial(self, generator: torch.Generator) -> Params:
        """Draw the parameters of one learner, float32, on the CPU."""
        ...

    def logits(self, params: Params, inputs: Tensor, training: bool = False) -> Tensor:
        """Return the logits of every learner, ``(*C, n, M, K)``; ``training`` enables dropout."""
        ...


def as_numbers(inputs: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert inputs to floating-point numbers as networks expect them.

    Bytes of images ``(..., n, channels, height, width)`` are scaled to [-1, 1]. All other inputs are
    only converted to ``dtype``.
    """
    numbers = inputs.to(dtype)
    image = inputs.dtype == torch.uint8 and inputs.dim() >= 4
    return numbers.div_(127.5).sub_(1.0) if image else numbers


# ---------------------------------------------------------------------- linear learners and MLPs


@dataclass(frozen=True)
class Dense:
    """Fully connected layers with ReLU between them; without hidden layers, logistic regression.

    Attributes:
        columns: inputs are flattened to this many numbers.
        classes: number of classes ``K``.
        hidden: widths of the hidden layers.
    """

    hints: ClassVar[TrainingHints] = TrainingHints(in_lanes=True)

    columns: int
    classes: int
    hidden: tuple[int, ...] = ()

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape to which inputs are flattened."""
        return (self.columns,)

    @property
    def activations_per_row(self) -> int:
        """Sum of the widths of all layers."""
        return sum(self.widths)

    @property
    def widths(self) -> tuple[int, ...]:
        """Width of every layer, from the inputs to the logits."""
        return (self.columns, *self.hidden, self.classes)

    @property
    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of a weight and a bias per layer."""
        shapes: dict[str, tuple[int, ...]] = {}
        for layer, (fan_in, fan_out) in enumerate(pairwise(self.widths)):
            shapes |= {f"{layer}.weight": (fan_out, fan_in), f"{layer}.bias": (fan_out,)}
        return shapes

    def initial(self, generator: torch.Generator) -> Params:
        """Draw uniformly from ``±1/√fan_in``, torch's default for linear layers."""
        params: Params = {}
        for name, shape in self.parameter_shapes.items():
            bound = 1.0 / math.sqrt(self.widths[int(name.split(".")[0])])
            params[name] = (2.0 * torch.rand(shape, generator=generator) - 1.0) * bound
        return params

    def logits(self, params: Params, inputs: Tensor, training: bool = False) -> Tensor:
        """Return the logits ``(*C, n, M, K)``; ``training`` has no effect."""
        clients = params["0.weight"].dim() - 3
        x = inputs.flatten(clients + 1)
        weight, bias = params["0.weight"], params["0.bias"]
        # All learners read the same rows, so their first layers are one product.
        learners, width = weight.shape[-3], weight.shape[-2]
        hidden = x @ weight.flatten(-3, -2).mT + bias.flatten(-2).unsqueeze(-2)
        hidden = hidden.reshape(*hidden.shape[:-1], learners, width)
        for layer in range(1, len(self.widths) - 1):
            weight, bias = params[f"{layer}.weight"], params[f"{layer}.bias"]
            hidden = torch.relu(hidden).transpose(-3, -2) @ weight.mT + bias.unsqueeze(-2)
            hidden = hidden.transpose(-3, -2)
        return hidden


# ---------------------------------------------------------------------- any module


@dataclass(frozen=True)
class Vectorised:
    """Any module, evaluated for stacked parameters by ``torch.func.vmap``.

    Attributes:
        factory: makes a module that maps ``(n, *shape)`` to logits ``(n, K)``.
        input_shape: shape of one row.
        classes: number of classes ``K``.
    """

    hints: ClassVar[TrainingHints] = TrainingHints()

    factory: ModuleFactory
    input_shape: tuple[int, ...]
    classes: int

    @property
    def activations_per_row(self) -> int:
        """Estimate: tens of channels of the input's size, forward and backward."""
        return 64 * math.prod(self.input_shape)

    # Two modules, because the mode is state of a module and several threads may evaluate at once.
    @cached_property
    def _for_training(self) -> nn.Module:
        return self._meta_module().train()

    @cached_property
    def _for_evaluation(self) -> nn.Module:
        return self._meta_module().eval()

    def _meta_module(self) -> nn.Module:
        # A new module draws random numbers; fork_rng leaves the global generator unchanged.
        with _MODULE_LOCK, torch.random.fork_rng(devices=[]):
            return self.factory().to("meta")

    @property
    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes that the module declares."""
        try:
            with torch.device("meta"):  # allocates nothing: shapes from a file may be huge
                module = self.factory()
        except (RuntimeError, NotImplementedError):  # the constructor reads its own values
            module = self._for_evaluation
        return {name: tuple(value.shape) for name, value in module.named_parameters()}

    def initial(self, generator: torch.Generator) -> Params:
        """Draw the module's own initialisation, seeded by the generator."""
        module = seeded_module(self.factory, generator)
        self._check(module)
        return {name: value.detach().clone() for name, value in module.named_parameters()}

    def _check(self, module: nn.Module) -> None:
        """Raise if stacked training does not support the module."""
        if not isinstance(module, nn.Module):
            raise TypeError(f"The learner's factory must make a torch.nn.Module, got {module!r}.")
        kind = type(module).__name__
        if not any(True for _ in module.parameters()):
            raise ValueError(f"{kind} has no parameters to train.")
        if any(True for _ in module.buffers()):
            raise ValueError(
                f"{kind} has buffers (such as BatchNorm's running statistics), "
                "which are not supported; use GroupNorm or LayerNorm."
            )
        mode = module.training
        try:
            with torch.no_grad():
                shape = tuple(module.eval()(torch.zeros(2, *self.input_shape)).shape)
        except (RuntimeError, TypeError, IndexError) as error:
            reason = str(error).splitlines()[0]
            raise ValueError(
                f"{kind} cannot read rows of shape {self.input_shape}: {reason}."
            ) from None
        finally:
            module.train(mode)
        if shape != (2, self.classes):
            raise ValueError(
                f"{kind} must turn 2 rows into logits of shape {(2, self.classes)}, one per class; "
                f"it returned shape {shape}."
            )

    def logits(self, params: Params, inputs: Tensor, training: bool = False) -> Tensor:
        """Return the logits ``(*C, n, M, K)``."""
        module = self._for_training if training else self._for_evaluation

        def one(own: Params, x: Tensor) -> Tensor:
            out: Tensor = functional_call(module, own, (x,))
            return out

        # All learners of a client read the same rows.
        every_learner = vmap(one, in_dims=(0, None), out_dims=-2, randomness="different")
        name, own = next(iter(module.named_parameters()))
        for _ in range(params[name].dim() - own.dim() - 1):  # one vmap per client axis
            every_learner = vmap(every_learner, in_dims=(0, 0), randomness="different")
        out: Tensor = every_learner(params, inputs)
        return out


def seeded_module(factory: ModuleFactory, generator: torch.Generator) -> nn.Module:
    """Make a module whose initialisation depends on the generator only."""
    seed = int(torch.randint(2**62, (), generator=generator))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return factory()


# ---------------------------------------------------------------------- the small convolutional network


class ConvNet(nn.Module):
    """Two convolutions (3×3, max pooling, dropout) and two dense layers, for small images."""

    def __init__(self, channels: int, size: int, classes: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(channels, 32, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(32, 64, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Dropout(dropout),
        )
        self.classifier = nn.Sequential(
            nn.Linear(64 * (size // 4) ** 2, 128),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Linear(128, classes),
        )
        # He's initialisation: with torch's default, signals shrink from layer to layer and the first
        # rounds learn nothing.
        for name, value in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(value)
            elif not name.startswith("classifier.3"):
                nn.init.kaiming_normal_(value, nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits ``(n, K)`` of images ``(n, channels, size, size)``."""
        logits: Tensor = self.classifier(self.features(x).flatten(1))
        return logits


class _Patches(torch.autograd.Function):
    """Autograd function of :func:`patches`.

    Its own backward pass adds slices in place; autograd would allocate a full tensor per slice.
    """

    @staticmethod
    def forward(ctx: Any, images: Tensor, size: Pair, stride: Pair, padding: Pair) -> Tensor:
        padded = pad(images, (padding[1], padding[1], padding[0], padding[0]))
        # The first, second, … neighbour of every position is a strided slice of the padded images.
        rows, columns = (
            [slice(first, whole - own + first + 1, step) for first in range(own)]
            for whole, own, step in zip(padded.shape[-2:], size, stride, strict=True)
        )
        ctx.slices = [(down, right) for down in rows for right in columns]
        ctx.padded, ctx.padding = padded.shape, padding
        return torch.stack([padded[..., down, right] for down, right in ctx.slices], 1).flatten(
            1, 2
        )

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        gradient = gradients[0]
        gradient = gradient.reshape(len(gradient), len(ctx.slices), -1, *gradient.shape[2:])
        padded = gradient.new_zeros(ctx.padded)
        for tap, (down, right) in enumerate(ctx.slices):
            padded[..., down, right] += gradient[:, tap]
        (top, left), (height, width) = ctx.padding, ctx.padded[-2:]
        return padded[..., top : height - top, left : width - left], None, None, None


def patches(
    images: Tensor, size: Pair = (3, 3), stride: Pair = (1, 1), padding: Pair = (1, 1)
) -> Tensor:
    """Return the neighbourhood of every position, with zeros outside of the image.

    Images ``(G, c, n, h, w)`` become ``(G, k·k·c, n, h', w')``.
    """
    found: Tensor = _Patches.apply(images, size, stride, padding)  # type: ignore[no-untyped-call]
    return found


def convolve(
    images: Tensor, weight: Tensor, stride: Pair = (1, 1), padding: Pair = (1, 1)
) -> Tensor:
    """Convolve the images of every group with the group's own filters, without a bias.

    ``torch.func.vmap`` turns a stack of convolutions into one grouped convolution, which GPUs run far
    below their speed. Here every convolution is a matrix product of weights and patches::

        weights  (G, c', k·k·c)   @   patches  (G, k·k·c, n·h'·w')        G: clients × learners

    Args:
        images: ``(G, c, n, h, w)``. Channels come before images, so the output of one product is the
            input of the next without a copy.
        weight: ``(G, c', c, k, k)``.
        stride: step between positions.
        padding: zeros around the images.

    Returns:
        ``(G, c', n, h', w')``.
    """
    size = (weight.shape[-2], weight.shape[-1])
    kernel = weight.permute(0, 1, 3, 4, 2).flatten(2)  # (G, c', k·k·c), in the order of patches
    seen = patches(images, size, stride, padding)
    out = torch.bmm(kernel, seen.flatten(2))
    return out.reshape(*out.shape[:2], *seen.shape[2:])


def _max_pool_relu(images: Tensor, bias: Tensor) -> Tensor:
    """Pool 2×2 pixels, add the bias ``(G, c)`` and apply ReLU.

    The bias is added after pooling because it does not change which pixel is the largest, and there
    are a quarter as many numbers.
    """
    pooled = max_pool2d(images.flatten(1, 2), 2)
    pooled = pooled.reshape(*images.shape[:3], *pooled.shape[-2:])
    return relu(pooled + bias[..., None, None, None])


@dataclass(frozen=True)
class Convolutional:
    """:class:`ConvNet` for stacked parameters, with the same parameter names and results.

    Attributes:
        channels: channels of the images.
        size: height and width of the images.
        classes: number of classes ``K``.
        dropout: share of activations that are dropped in training.
        compute: dtype of the products; ``None`` means the dtype of the parameters.
    """

    # 64 clients fill a GPU. Larger groups would add padding, because their clients differ more in size.
    hints: ClassVar[TrainingHints] = TrainingHints(max_clients=64)

    channels: int
    size: int
    classes: int
    dropout: float = 0.0
    compute: torch.dtype | None = None

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one image."""
        return (self.channels, self.size, self.size)

    @property
    def activations_per_row(self) -> int:
        """Size of the patches of the second convolution, its inputs and its outputs."""
        return 3 * 9 * 32 * (self.size // 2) ** 2

    @cached_property
    def _vectorised(self) -> Vectorised:
        return Vectorised(self.module, self.input_shape, self.classes)

    def module(self) -> ConvNet:
        """Make one network of this kind."""
        return ConvNet(self.channels, self.size, self.classes, self.dropout)

    @property
    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes that the module declares."""
        return self._vectorised.parameter_shapes

    def initial(self, generator: torch.Generator) -> Params:
        """Draw the module's own initialisation, seeded by the generator."""
        return self._vectorised.initial(generator)

    def logits(self, params: Params, inputs: Tensor, training: bool = False) -> Tensor:
        """Return the logits ``(*C, n, M, K)``; on a CPU by torch's convolutions, which are faster there."""
        if inputs.device.type == "cpu":
            return self._vectorised.logits(params, inputs, training)
        return self.stacked_logits(params, inputs, training)

    def stacked_logits(self, params: Params, inputs: Tensor, training: bool = False) -> Tensor:
        """Return the logits ``(*C, n, M, K)`` by batched matrix products."""
        own = params["features.0.weight"]
        lead, learners = own.shape[:-5], own.shape[-5]
        dtype = self.compute or own.dtype
        stacked = {name: value.flatten(0, len(lead)).to(dtype) for name, value in params.items()}
        rows = inputs.shape[len(lead)]
        images = inputs.reshape(-1, rows, self.channels, self.size, self.size).to(dtype)
        hidden = dropout(self._features(stacked, images), self.dropout, training)
        for layer in ("classifier.0", "classifier.3"):
            bias, weight = stacked[f"{layer}.bias"].unsqueeze(1), stacked[f"{layer}.weight"]
            hidden = torch.baddbmm(bias, hidden, weight.mT)
            if layer == "classifier.0":
                hidden = dropout(relu(hidden), self.dropout, training)
        logits = hidden.reshape(*lead, learners, rows, self.classes).transpose(-3, -2)
        return logits.to(own.dtype)

    def _features(self, stacked: Params, images: Tensor) -> Tensor:
        """Return the output of both convolutions, ``(A·M, n, c·h·w)``, of images ``(A, n, c, h, w)``."""
        first, second = (
            (stacked[f"features.{k}.weight"], stacked[f"features.{k}.bias"]) for k in (0, 3)
        )
        if kernels.usable_blocks(images, first[0], second[0]):
            hidden = kernels.channel_block(kernels.pixel_block(images, *first), *second)
            return hidden.permute(0, 1, 4, 2, 3).flatten(2)
        # All learners of a client read the same images, so their first convolutions are one product.
        weight = first[0].reshape(len(images), -1, *first[0].shape[2:])
        hidden = convolve(images.transpose(1, 2), weight)
        hidden = _max_pool_relu(hidden.reshape(len(first[0]), -1, *hidden.shape[2:]), first[1])
        hidden = _max_pool_relu(convolve(hidden, second[0]), second[1])
        return hidden.transpose(1, 2).flatten(2)


# ---------------------------------------------------------------------- networks by name


LEARNERS = ("linear", "mlp", "cnn", "mobilenet")


def network(
    learner: str | ModuleFactory,
    input_shape: tuple[int, ...],
    classes: int,
    compute: torch.dtype | None = None,
) -> Network:
    """Return a network by name (``"linear"``, ``"mlp"``, ``"cnn"``, ``"mobilenet"``) or from a factory.

    Args:
        learner: a name, or a function without arguments that makes a ``torch.nn.Module``.
        input_shape: shape of one input, ``(d,)`` or ``(channels, height, width)``.
        classes: number of classes ``K``.
        compute: dtype of a convolutional network's products on an accelerator; ``None`` means the
            dtype of the parameters.

    Raises:
        TypeError: a module in place of a function that makes one.
        ValueError: an unknown name, or a network that does not suit the inputs.
    """
    if isinstance(learner, nn.Module):
        raise TypeError(
            f"learner must make a new module on every call, got an instance of "
            f"{type(learner).__name__}; pass a function, such as lambda: {type(learner).__name__}(...)."
        )
    if callable(learner):
        return Vectorised(learner, input_shape, classes)
    columns = math.prod(input_shape)
    match learner:
        case "linear":
            return Dense(columns, classes)
        case "mlp":
            return Dense(columns, classes, hidden=(64,))
        case "cnn":
            if len(input_shape) != 3 or input_shape[1] != input_shape[2] or input_shape[1] < 4:
                raise ValueError(
                    f"learner='cnn' requires square images (channels, size, size) of at least 4 pixels, "
                    f"got inputs of shape {input_shape}."
                )
            channels, size, _ = input_shape
            return Convolutional(channels, size, classes, compute=compute)
        case "mobilenet":
            from fedgmm.nets.backbones import MobileNetV2
            from fedgmm.nets.stacked import Stacked

            if len(input_shape) != 3 or input_shape[0] != 3:
                raise ValueError(
                    f"learner='mobilenet' requires colour images (3, height, width), got inputs of shape "
                    f"{input_shape}."
                )
            return Stacked(partial(MobileNetV2, classes), input_shape, classes, compute)
    raise ValueError(
        f"learner must be one of {list(LEARNERS)} or a module factory, got {learner!r}."
    )
