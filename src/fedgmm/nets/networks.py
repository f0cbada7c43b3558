"""Supervised networks as functions of stacked parameters.

A network's parameters are a dictionary of tensors. Stacked parameters carry leading axes: any number
for clients, then one for learners. ``logits`` evaluates all of them at once::

    parameters  (*C, M, ...)      inputs  (*C, n, *shape)      ->      logits  (*C, n, M, K)

Linear networks and MLPs are written with matrix products that take leading axes; any other
``torch.nn.Module`` is vectorised by ``torch.func``.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise
from typing import ClassVar, Protocol

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from fedgmm.core.params import Params

ModuleFactory = Callable[[], nn.Module]

_MAKING_MODULES = threading.Lock()


@dataclass(frozen=True)
class Handling:
    """How networks of a kind are trained well.

    Attributes:
        in_lanes: on a CPU, groups of clients train side by side with one thread each, since threads
            inside an operation gain nothing.
        most_clients: in a group on a card; ``None`` means as many as fit its memory.
        even_batches: a client's batches differ by at most one row, since their own statistics matter.
        recorded: a round on a card is recorded and replayed, since its kernels take longer to start
            than to run. Such networks have a hash.
    """

    in_lanes: bool = False
    most_clients: int | None = None
    even_batches: bool = False
    recorded: bool = False


class Network(Protocol):
    """Something that turns inputs into class logits."""

    @property
    def classes(self) -> int:
        """``K``."""
        ...

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Of one row; a single number of columns for networks that flatten."""
        ...

    @property
    def row_numbers(self) -> int:
        """About how many numbers a learner holds at once for each row, for memory budgets."""
        ...

    @property
    def handling(self) -> Handling:
        """How it is trained well."""
        ...

    @property
    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """The parameters of one learner."""
        ...

    def initial(self, generator: torch.Generator) -> Params:
        """Random parameters of one learner, float32, on the CPU."""
        ...

    def logits(self, params: Params, inputs: Tensor, training: bool = False) -> Tensor:
        """Logits of every learner: ``(*C, n, M, K)``; ``training`` switches dropout on."""
        ...


@dataclass(frozen=True)
class Dense:
    """Fully connected layers with ReLU between them; without hidden layers, logistic regression.

    Attributes:
        columns: inputs are flattened to this many numbers.
        classes: ``K``.
        hidden: widths of the hidden layers.
    """

    handling: ClassVar[Handling] = Handling(in_lanes=True)

    columns: int
    classes: int
    hidden: tuple[int, ...] = ()

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Inputs of any shape are flattened to this one."""
        return (self.columns,)

    @property
    def row_numbers(self) -> int:
        """All layers."""
        return sum(self.widths)

    @property
    def widths(self) -> tuple[int, ...]:
        """Numbers a row, from the inputs to the logits."""
        return (self.columns, *self.hidden, self.classes)

    @property
    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """A weight and a bias for each layer."""
        shapes: dict[str, tuple[int, ...]] = {}
        for layer, (fan_in, fan_out) in enumerate(pairwise(self.widths)):
            shapes |= {f"{layer}.weight": (fan_out, fan_in), f"{layer}.bias": (fan_out,)}
        return shapes

    def initial(self, generator: torch.Generator) -> Params:
        """Uniform in ``±1/√fan_in``, torch's own default for linear layers."""
        params: Params = {}
        for name, shape in self.parameter_shapes.items():
            bound = 1.0 / math.sqrt(self.widths[int(name.split(".")[0])])
            params[name] = (2.0 * torch.rand(shape, generator=generator) - 1.0) * bound
        return params

    def logits(self, params: Params, inputs: Tensor, training: bool = False) -> Tensor:
        """Logits ``(*C, n, M, K)``; there is nothing random in them."""
        clients = params["0.weight"].dim() - 3
        x = inputs.flatten(clients + 1)
        weight, bias = params["0.weight"], params["0.bias"]
        # The learners read the same rows: one product for all of them.
        learners, width = weight.shape[-3], weight.shape[-2]
        hidden = x @ weight.flatten(-3, -2).mT + bias.flatten(-2).unsqueeze(-2)
        hidden = hidden.reshape(*hidden.shape[:-1], learners, width)
        for layer in range(1, len(self.widths) - 1):
            weight, bias = params[f"{layer}.weight"], params[f"{layer}.bias"]
            hidden = torch.relu(hidden).transpose(-3, -2) @ weight.mT + bias.unsqueeze(-2)
            hidden = hidden.transpose(-3, -2)
        return hidden


@dataclass(frozen=True)
class Vectorised:
    """Any module, evaluated for stacked parameters by ``torch.func.vmap``.

    Attributes:
        factory: makes a module that maps ``(n, *shape)`` to logits ``(n, K)``.
        input_shape: of one row.
        classes: ``K``.
    """

    handling: ClassVar[Handling] = Handling()

    factory: ModuleFactory
    input_shape: tuple[int, ...]
    classes: int

    @property
    def row_numbers(self) -> int:
        """A guess: tens of channels as large as the input, forwards and back."""
        return 64 * math.prod(self.input_shape)

    # Two skeletons, since a module's mode is state and lanes may evaluate at the same time.
    @cached_property
    def _for_training(self) -> nn.Module:
        return self._skeleton().train()

    @cached_property
    def _for_evaluation(self) -> nn.Module:
        return self._skeleton().eval()

    def _skeleton(self) -> nn.Module:
        # making a module draws numbers; the program's own generator must not notice
        with _MAKING_MODULES, torch.random.fork_rng(devices=[]):
            return self.factory().to("meta")

    @property
    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """As the module declares them."""
        try:
            with torch.device("meta"):  # shapes from a file may be absurd: allocate nothing
                module = self.factory()
        except (RuntimeError, NotImplementedError):  # it looks at its numbers while it is made
            module = self._for_evaluation
        return {name: tuple(value.shape) for name, value in module.named_parameters()}

    def initial(self, generator: torch.Generator) -> Params:
        """The module's own initialisation, seeded by the generator."""
        seed = int(torch.randint(2**62, (), generator=generator))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            module = self.factory()
        self._check(module)
        return {name: value.detach().clone() for name, value in module.named_parameters()}

    def _check(self, module: nn.Module) -> None:
        """Raise unless the module is one that stacked training can handle."""
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
                f"{kind} must turn 2 rows into logits of shape {(2, self.classes)}, one for each "
                f"class; it gave {shape}."
            )

    def logits(self, params: Params, inputs: Tensor, training: bool = False) -> Tensor:
        """Logits ``(*C, n, M, K)``."""
        module = self._for_training if training else self._for_evaluation

        def one(own: Params, x: Tensor) -> Tensor:
            out: Tensor = functional_call(module, own, (x,))
            return out

        # learners share their client's rows
        every_learner = vmap(one, in_dims=(0, None), out_dims=-2, randomness="different")
        name, own = next(iter(module.named_parameters()))
        for _ in range(params[name].dim() - own.dim() - 1):  # the clients' axes
            every_learner = vmap(every_learner, in_dims=(0, 0), randomness="different")
        out: Tensor = every_learner(params, inputs)
        return out


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
        # He's start: torch's own makes signals fade, and the first rounds are lost to it
        for name, value in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(value)
            elif not name.startswith("classifier.3"):
                nn.init.kaiming_normal_(value, nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        """Logits ``(n, K)`` of images ``(n, channels, size, size)``."""
        logits: Tensor = self.classifier(self.features(x).flatten(1))
        return logits


LEARNERS = ("linear", "mlp", "cnn", "mobilenet")


def network(
    learner: str | ModuleFactory,
    input_shape: tuple[int, ...],
    classes: int,
    compute: torch.dtype | None = None,
) -> Network:
    """A network by name (``"linear"``, ``"mlp"``, ``"cnn"``, ``"mobilenet"``) or from a module factory.

    Args:
        learner: a name, or a function without arguments that makes a ``torch.nn.Module``.
        input_shape: shape of one input, ``(d,)`` or ``(channels, height, width)``.
        classes: ``K``.
        compute: dtype of a convolutional network's products on an accelerator; ``None`` means that
            of the parameters.
    """
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
                    f"learner='cnn' needs square images (channels, size, size) of at least 4 pixels, "
                    f"got inputs of shape {input_shape}."
                )
            from fedgmm.nets.convolutions import Convolutional

            channels, size, _ = input_shape
            return Convolutional(channels, size, classes, compute=compute)
        case "mobilenet":
            from fedgmm.nets.backbones import MobileNetV2
            from fedgmm.nets.stacked import Stacked

            if len(input_shape) != 3 or input_shape[0] != 3:
                raise ValueError(
                    f"learner='mobilenet' needs colour images (3, height, width), got inputs of shape "
                    f"{input_shape}."
                )
            return Stacked(partial(MobileNetV2, classes), input_shape, classes, compute)
    raise ValueError(
        f"learner must be one of {list(LEARNERS)} or a module factory, got {learner!r}."
    )
