"""Supervised networks as functions of stacked parameters.

A network's parameters are a dictionary of tensors. Stacked parameters have leading axes: any number
of axes for clients, then one for learners. ``logits`` evaluates all learners of all clients at once::

    parameters  (*C, M, ...)      inputs  (*C, n, *shape)      ->      logits  (*C, n, M, K)

- :class:`Dense`: linear learners and MLPs, as matrix products with leading axes;
- :class:`~fedgmm.nets.convolutional.Convolutional`: the small network for images, as batched products;
- :class:`~fedgmm.nets.stacked.Stacked`: modules of convolutions and batch normalisation;
- :class:`~fedgmm.nets.modules.ModuleNetwork`: any other ``torch.nn.Module``.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import ClassVar, Protocol

import torch
from torch import Tensor, nn

from fedgmm.core.params import NOISE, Params, is_statistic

ModuleFactory = Callable[[], nn.Module]

SMALLEST_VARIANCE = 1e-6
"""The smallest ``σ²`` of standardised numbers, because a learner of few rows may fit them exactly."""


@dataclass(frozen=True)
class TrainingHints:
    """Settings that make the training of one kind of network fast or stable."""

    # on a CPU, train groups of clients in parallel with one thread each, because threads inside an
    # operation do not speed up small networks
    in_lanes: bool = False
    # largest group of clients on a GPU; ``None`` means as many as fit in memory
    max_clients: int | None = None
    # the batches of a client differ by at most one row, because the network uses statistics of each
    # batch
    even_batches: bool = False
    # record a round on a GPU and replay it, because its kernels take longer to start than to run.
    # Such networks must be hashable.
    recorded: bool = False


class Network(Protocol):
    """A function from inputs and stacked parameters to class logits."""

    @property
    def classes(self) -> int:
        """Number of classes ``K``; zero for numbers, see :class:`Regression`."""

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one row; ``(columns,)`` for networks that flatten their inputs."""

    @property
    def activations_per_row(self) -> int:
        """Approximate number of values that a learner holds per row in training, for memory budgets."""

    @property
    def hints(self) -> TrainingHints:
        """Settings for fast and stable training."""

    @property
    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the parameters of one learner."""

    def initial(self, generator: torch.Generator) -> Params:
        """Draw the parameters of one learner, float32, on the CPU."""

    def logits(self, params: Params, inputs: Tensor, training: bool = False) -> Tensor:
        """Return the logits of every learner, ``(*C, n, M, K)``; ``training`` enables dropout."""


class OfModules(ABC):
    """A network that evaluates modules, which may have running statistics of batch normalisation."""

    @abstractmethod
    def forward(
        self,
        params: Params,
        inputs: Tensor,
        training: bool,
        counts: Tensor | None = None,
        number: int = 1,
    ) -> tuple[Tensor, Params]:
        """Return the logits ``(*C, n, M, K)`` and the running statistics after a batch of training.

        Parameters are ``(*C, M, ...)`` and inputs ``(*C, n, *shape)``. ``training`` enables dropout
        and normalises by the statistics of the batch. ``counts``, ``(*C,)``, are rows per client;
        padding follows them and does not change the statistics. ``number`` counts the batches
        within the round, from one. The statistics of batch one replace the old ones, which belong
        to the weights before the server changed them.
        """

    def logits(self, params: Params, inputs: Tensor, training: bool = False) -> Tensor:
        """Return the logits ``(*C, n, M, K)``."""
        return self.forward(params, inputs, training)[0]


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
    """Fully connected layers with ReLU between them; without hidden layers, logistic regression."""

    hints: ClassVar[TrainingHints] = TrainingHints(in_lanes=True)

    columns: int  # inputs are flattened to this many numbers
    classes: int
    hidden: tuple[int, ...] = ()  # widths of the hidden layers

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


# ---------------------------------------------------------------------- numbers


@dataclass(frozen=True)
class Regression:
    """A network of one output for numbers: ``P_θ(y|x) = N(y; f_θ(x), σ²)``.

    ``σ²`` is a parameter of each learner that no gradient trains.
    """

    net: Network  # computes ``f_θ(x)``

    @property
    def classes(self) -> int:
        """Zero: there are no classes."""
        return 0

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one row."""
        return self.net.input_shape

    @property
    def activations_per_row(self) -> int:
        """Those of ``f_θ``."""
        return self.net.activations_per_row

    @property
    def hints(self) -> TrainingHints:
        """Those of ``f_θ``."""
        return self.net.hints

    @property
    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the parameters of ``f_θ``, and of ``σ²``."""
        return {**self.net.parameter_shapes, NOISE: ()}

    def initial(self, generator: torch.Generator) -> Params:
        """Draw the parameters of ``f_θ``; ``σ²`` is that of standardised numbers."""
        own = self.net.initial(generator)
        if any(map(is_statistic, own)):
            raise ValueError(
                "Batch normalisation is not supported for regression; use GroupNorm or LayerNorm."
            )
        return {**own, NOISE: torch.ones(())}

    def logits(self, params: Params, inputs: Tensor, training: bool = False) -> Tensor:
        """Return ``f_θ(x)`` and ``σ²``, ``(*C, n, M, 2)``.

        In training ``σ²`` is one, so that the loss is the squared error for any noise.
        """
        own = {name: value for name, value in params.items() if name != NOISE}
        mean = self.net.logits(own, inputs, training)[..., 0]
        variance = params[NOISE].clamp_min(SMALLEST_VARIANCE).unsqueeze(-2).expand_as(mean)
        return torch.stack([mean, torch.ones_like(mean) if training else variance], dim=-1)


def function_of(net: Network) -> Network:
    """Return the network of logits or of ``f_θ(x)``, without the noise of a :class:`Regression`."""
    return net.net if isinstance(net, Regression) else net


# ---------------------------------------------------------------------- networks by name


LEARNERS = ("linear", "mlp", "cnn", "mobilenet")


def network(
    learner: str | ModuleFactory,
    input_shape: tuple[int, ...],
    classes: int,
    compute: torch.dtype | None = None,
    seed: int = 0,
) -> Network:
    """Return a network by name (``"linear"``, ``"mlp"``, ``"cnn"``, ``"mobilenet"``) or from a factory.

    Args:
        learner: a name, or a function without arguments that makes a ``torch.nn.Module``.
        input_shape: shape of one input, ``(d,)`` or ``(channels, height, width)``.
        classes: number of classes ``K``; zero for numbers, see :class:`Regression`.
        compute: dtype of a convolutional network's products on an accelerator; ``None`` means the
            dtype of the parameters.
        seed: of the frozen parameters and buffers of a factory's module.
    """
    if isinstance(learner, nn.Module):
        raise TypeError(
            f"learner must make a new module on every call, got an instance of "
            f"{type(learner).__name__}; pass a function, such as lambda: {type(learner).__name__}(...)."
        )
    if not classes:
        return Regression(network(learner, input_shape, 1, compute, seed))
    if callable(learner):
        from fedgmm.nets.modules import ModuleNetwork

        return ModuleNetwork(learner, input_shape, classes, seed)
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
            from fedgmm.nets.convolutional import Convolutional

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
