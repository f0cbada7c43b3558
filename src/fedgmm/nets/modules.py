"""Any ``torch.nn.Module`` as a learner.

``torch.func.vmap`` evaluates the module for all clients and learners at once. It cannot do that for all
modules: recurrent layers, control flow that depends on the data, or running statistics of batches that
are padded. Those are evaluated in a loop over clients and learners, which is slower.

Trained parameters and running statistics are the learner. Everything else is constant: parameters with
``requires_grad=False`` and buffers. All clients and learners share one copy of them, which belongs to
the network.
"""

from __future__ import annotations

import hashlib
import math
import re
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.functional import pad
from torch.nn.modules.batchnorm import _NormBase

from fedgmm.core.params import Params
from fedgmm.nets.networks import ModuleFactory, OfModules, TrainingHints, as_numbers

_LOCK = threading.RLock()  # of new modules and trials, which use torch's global random numbers
_STATISTICS = ("running_mean", "running_var")
_LARGEST_INTEGER = 2**24  # float32, in which rows travel, has all integers up to here
_NORMALISES = "its batch normalisation uses the rows of one client at a time"
_MIXES = "its output for a row depends on the other rows"
_LOOKUP = ("scalar types: Long", "index out of range")  # in errors of nn.Embedding


@dataclass(frozen=True)
class ModuleNetwork(OfModules):
    """A network that runs copies of a module side by side, by ``torch.func.vmap`` or in a loop."""

    # makes a module that maps ``(n, *shape)`` to logits ``(n, K)``. The module or the factory may
    # have the attribute ``integer_inputs = True``; the module then gets int64 inputs.
    factory: ModuleFactory
    input_shape: tuple[int, ...]  # shape of one row
    classes: int
    seed: int = 0  # draws random constants, and the first learner in the same draw
    # constants of a saved model, in place of those that the factory makes
    given: Params | None = field(default=None, compare=False, repr=False)

    def __getstate__(self) -> dict[str, Any]:
        """Return the fields only, because the rest can be made again."""
        return {one.name: getattr(self, one.name) for one in fields(self)}

    @property
    def activations_per_row(self) -> int:
        """Estimate: tens of channels of the input's size, forward and backward."""
        return 64 * math.prod(self.input_shape)

    @property
    def hints(self) -> TrainingHints:
        """Ask for batches of equal size if the module has batch normalisation."""
        return TrainingHints(even_batches=bool(self._momenta))

    # ------------------------------------------------------------------ parameters and constants

    @property
    def _generator(self) -> torch.Generator:
        return torch.Generator().manual_seed(self.seed)

    @cached_property
    def _module(self) -> nn.Module:
        """The module of the first learner, in the mode of training; nothing changes it."""
        module = seeded_module(self.factory, self._generator)
        if not isinstance(module, nn.Module):
            raise TypeError(
                f"learner must be a function that makes a torch.nn.Module; it made {module!r}."
            )
        if any(isinstance(p, nn.parameter.UninitializedParameter) for p in module.parameters()):
            raise ValueError(
                f"{type(module).__name__} has lazy layers, whose sizes are not known; give the sizes."
            )
        return _training_mode(module)

    @cached_property
    def _momenta(self) -> dict[str, float]:
        """Names of the running statistics, and how much a batch counts (0 for a mean over batches)."""
        return {
            f"{name}.{kind}".lstrip("."): layer.momentum or 0.0
            for name, layer in _normalisations(self._module)
            for kind in _STATISTICS
        }

    @cached_property
    def constants(self) -> Params:
        """Frozen parameters and buffers, which all learners share."""
        if self.given is not None:
            return self.given
        frozen = [(n, v) for n, v in self._module.named_parameters() if not v.requires_grad]
        values: list[tuple[str, Tensor]] = [*frozen, *self._module.named_buffers()]
        return {n: v.detach() for n, v in values if n not in self._momenta}

    @property
    def fingerprint(self) -> str:
        """A checksum of the constants."""
        digest = hashlib.sha256()
        for name, value in sorted(self.constants.items()):
            digest.update(f"{name} {value.dtype} {tuple(value.shape)} ".encode())
            digest.update(value.cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()

    @property
    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the trained parameters and the running statistics."""
        return {name: tuple(value.shape) for name, value in self._learned(self._module)}

    def initial(self, generator: torch.Generator) -> Params:
        """Draw the module's own initialisation, seeded by the generator."""
        module = seeded_module(self.factory, generator)
        return {name: value.detach().clone() for name, value in self._learned(module)}

    def _learned(self, module: nn.Module) -> list[tuple[str, Tensor]]:
        trained = [(n, v) for n, v in module.named_parameters() if v.requires_grad]
        if not trained:
            frozen = " (all are frozen)" if any(True for _ in module.parameters()) else ""
            raise ValueError(f"{type(module).__name__} has no parameters to train{frozen}.")
        return trained + [(n, v) for n, v in module.named_buffers() if n in self._momenta]

    @property
    def integer_inputs(self) -> bool:
        """Whether the module reads integers, such as token ids for ``nn.Embedding``."""
        return any(getattr(one, "integer_inputs", False) for one in (self.factory, self._module))

    # ------------------------------------------------------------------ evaluation

    def forward(
        self,
        params: Params,
        inputs: Tensor,
        training: bool,
        counts: Tensor | None = None,
        number: int = 1,
    ) -> tuple[Tensor, Params]:
        """Return the logits and the running statistics, see :meth:`OfModules.forward`."""
        x = inputs.long() if self.integer_inputs else inputs
        try:
            if self._reason_to_loop(training) is None:
                return self._stacked(params, x, training), {}
            return self._looped(params, x, training, counts, number)
        except IndexError as error:
            if not self.integer_inputs:
                raise
            raise ValueError(
                f"{type(self._module).__name__} cannot read integers from {int(inputs.min())} to "
                f"{int(inputs.max())}: {error}."
            ) from error

    def _stacked(self, params: Params, inputs: Tensor, training: bool) -> Tensor:
        """Return the logits by ``vmap``."""
        constants = self._constants_like(params)
        with self._borrowed(training) as module:

            def one(own: Params, x: Tensor) -> Tensor:
                out: Tensor = functional_call(module, {**constants, **own}, (x,))
                return out

            # All learners of a client read the same rows.
            every_learner = vmap(one, in_dims=(0, None), out_dims=-2, randomness="different")
            for _ in range(inputs.dim() - len(self.input_shape) - 1):  # one vmap per client axis
                every_learner = vmap(every_learner, in_dims=(0, 0), randomness="different")
            # a copy, because a module may write to its inputs
            out: Tensor = every_learner(params, inputs.clone())
        return out

    def _looped(
        self,
        params: Params,
        inputs: Tensor,
        training: bool,
        counts: Tensor | None,
        number: int,
    ) -> tuple[Tensor, Params]:
        """Return the same as :meth:`forward`, for one client and learner after the other."""
        axes = inputs.dim() - len(self.input_shape) - 1
        lead = next(iter(params.values())).shape[: axes + 1]  # (*C, M)
        # unbind, because the gradient of an index is as large as all learners together
        learners = {n: v.flatten(0, axes).unbind() for n, v in params.items()}
        rows = inputs.reshape(-1, *inputs.shape[axes:])
        sizes = [inputs.shape[axes]] * len(rows) if counts is None else counts.flatten().tolist()
        constants = self._constants_like(params)
        found: list[Tensor] = []
        statistics: dict[str, list[Tensor]] = {name: [] for name in self._momenta if training}
        with self._borrowed(training) as module:
            for place in range(math.prod(lead)):
                client = place // lead[-1]
                # a copy, because a module may write to its inputs
                x = rows[client, : int(sizes[client])].clone()
                if statistics and len(x) == 1:  # torch refuses to normalise a single number
                    x = torch.cat([x, x])
                own = {name: values[place] for name, values in learners.items()}
                batch = {name: own[name].detach().clone() for name in statistics}
                out = functional_call(module, {**constants, **own, **batch}, (x,))
                out = out[: int(sizes[client])]
                found.append(pad(out, (0, 0, 0, rows.shape[1] - len(out))))
                for name, new in batch.items():
                    # a single number has variance zero, which would scale up later inputs
                    if sizes[client] == 1 and name.endswith("running_var"):
                        new = torch.where(new == 0, own[name], new)
                    share = max(self._momenta[name], 1.0 / number)
                    statistics[name].append(torch.lerp(own[name].detach(), new, share))
        logits = torch.stack(found).reshape(*lead, -1, self.classes).transpose(-3, -2)
        return logits, {n: torch.stack(v).reshape(*lead, -1) for n, v in statistics.items()}

    @contextmanager
    def _borrowed(self, training: bool) -> Iterator[nn.Module]:
        """Lend a module whose own values are not used.

        Each thread needs its own, because ``functional_call`` changes the module while it runs.
        """
        idle = self._idle[training]
        try:
            module = idle.pop()
        except IndexError:
            module = seeded_module(self.factory, self._generator)
            if module is self._module:
                raise TypeError(
                    "learner must make a new module on every call, but it returned the same "
                    f"{type(module).__name__} twice."
                ) from None
            _training_mode(module)
            for _, layer in _normalisations(module):
                layer.momentum = 1.0  # so that it leaves the statistics of the batch
            if not training:
                module.eval()
        try:
            yield module
        finally:
            idle.append(module)

    @cached_property
    def _idle(self) -> dict[bool, list[nn.Module]]:
        return {True: [], False: []}

    def _constants_like(self, params: Params) -> Params:
        """Return the constants with the device and the floating-point type of the parameters."""
        first = next(iter(params.values()))
        key = first.device, first.dtype
        if key not in self._converted:
            with torch.inference_mode(False):  # otherwise training could not use them later
                self._converted[key] = {
                    name: value.to(first.device, first.dtype if value.is_floating_point() else None)
                    for name, value in self.constants.items()
                }
        kept = self._converted[key]
        # a module may count its calls, and the network does not
        return {n: v if v.is_floating_point() else v.clone() for n, v in kept.items()}

    @cached_property
    def _converted(self) -> dict[tuple[torch.device, torch.dtype], Params]:
        return {}

    # ------------------------------------------------------------------ trials

    @cached_property
    def _reasons(self) -> dict[bool, str | None]:
        return {}

    def _reason_to_loop(self, training: bool) -> str | None:
        """Return why ``vmap`` cannot evaluate the module; ``None`` if it can. A reason is a warning."""
        if training not in self._reasons:
            with _LOCK:
                self._reasons[training] = self._tried(training)
            reason, other = self._reasons[training], self._reasons.get(not training)
            if reason is not None and other is None:
                warnings.warn(
                    f"{type(self._module).__name__} cannot be computed for all clients at once "
                    f"({reason}); a loop over clients and learners is used, which is slower.",
                    stacklevel=2,
                )
        return self._reasons[training]

    def _tried(self, training: bool) -> str | None:
        if training and self._momenta:
            return _NORMALISES
        with torch.inference_mode(False), _trial():
            one = {name: value.detach() for name, value in self._learned(self._module)}
            params = {n: v.expand(2, 2, *v.shape).clone() for n, v in one.items()}
            for value in params.values():
                value.requires_grad_(training)
            generator = torch.Generator().manual_seed(0)
            x = torch.rand(2, 3, *self.input_shape, generator=generator)
            x = x.long() if self.integer_inputs else x
            other = x.clone()
            other[:, 1:] = 1
            try:
                with torch.no_grad():
                    plain, changed = (
                        self._looped(params, one, False, None, 1)[0] for one in (x, other)
                    )
                    if not _close(plain[:, 0], changed[:, 0]):
                        return _MIXES
                found = self._stacked(params, x, training)
                if training:
                    torch.autograd.grad(found.sum(), list(params.values()), materialize_grads=True)
            except Exception as error:  # any error of torch or of the module
                known, operation = str(error), re.search(r"aten::\w+", str(error))
                if operation:
                    known = f"torch.func.vmap does not support {operation[0]}"
                return known.split("\n")[0].split(". ")[0].removeprefix("vmap: ")
            if not training and not _close(plain, found):
                return "torch.func.vmap returns other numbers than the module"
        return None

    def check(self, inputs: Tensor) -> None:
        """Raise if the module cannot be trained on rows such as ``inputs``, ``(N, *shape)``."""
        kind, expected = type(self._module).__name__, f"(n, {self.classes})"
        own = dict(self._learned(self._module))
        # not as many rows as classes, so that a transposed output is found; the extremes of token ids
        some = torch.arange(3 if self.classes == 2 else 2) % len(inputs)
        some[:2] = torch.stack([inputs.argmin(), inputs.argmax()]).cpu() // inputs[0].numel()
        rows = as_numbers(inputs[some.to(inputs.device)].cpu(), next(iter(own.values())).dtype)
        self.check_integers(inputs)
        if self.integer_inputs:
            rows = rows.long()
        params = {n: v.detach()[None].clone() for n, v in own.items()}
        for name, value in params.items():
            value.requires_grad_(name not in self._momenta)
        for training in (False, True):
            out = self._checked_call(kind, params, rows, training)
            if not isinstance(out, Tensor):
                raise ValueError(
                    f"{kind} must return one tensor of shape {expected}, not {type(out).__name__}."
                )
            if tuple(out.shape) != (len(rows), self.classes):
                outputs = "one logit per class" if self.classes > 1 else "one number per row"
                raise ValueError(
                    f"{kind} must return {outputs}, shape {expected}; for {len(rows)} rows it returned "
                    f"shape {tuple(out.shape)}."
                )
            if not bool(torch.isfinite(out).all()):
                raise ValueError(f"{kind} returns NaN or infinity for the first rows.")
        if self.classes > 1 and bool((out >= 0).all() & _close(out.sum(-1), out.new_ones(()))):
            warnings.warn(
                f"{kind} returns probabilities; it should return logits, so leave its softmax out.",
                stacklevel=2,
            )
        if not out.requires_grad:
            raise ValueError(f"The logits of {kind} do not depend on its trained parameters.")
        for training in (False, True):
            self._reason_to_loop(training)

    def check_integers(self, inputs: Tensor) -> None:
        """Raise if the module reads integers and the inputs ``(N, *shape)`` are other numbers."""
        if not self.integer_inputs:
            return
        numbers = as_numbers(inputs, torch.float64)
        if bool(((numbers != numbers.round()) | (numbers.abs() > _LARGEST_INTEGER)).any()):
            raise ValueError(
                f"{type(self._module).__name__} has integer_inputs = True, but the inputs are not all "
                f"integers of at most {_LARGEST_INTEGER:,}."
            )

    def _checked_call(self, kind: str, params: Params, rows: Tensor, training: bool) -> Any:
        """Call the module once, with an error that says what it could not read."""
        values = {name: value.clone() for name, value in self.constants.items()}
        values |= {n: v[0].clone() if n in self._momenta else v[0] for n, v in params.items()}
        with self._borrowed(training) as module:
            try:
                with _trial():
                    out = functional_call(module, values, (rows.clone(),))
            except Exception as error:  # the module is the user's, so any error can come
                reason, hint = str(error).split("\n")[0] or type(error).__name__, ""
                if self.integer_inputs and isinstance(error, IndexError):
                    hint = f" The rows hold integers from {int(rows.min())} to {int(rows.max())}."
                elif not self.integer_inputs and any(part in reason for part in _LOOKUP):
                    hint = (
                        " If they are integers such as token ids, set integer_inputs = True on the "
                        "module; if only some columns are, use standardise=False and convert them in "
                        "the module."
                    )
                raise ValueError(
                    f"{kind} cannot read rows of shape {self.input_shape}: {reason}.{hint}"
                ) from error
        for name, value in self.constants.items():
            if value.is_floating_point() and not torch.equal(values[name], value):
                raise ValueError(
                    f"{kind} changes its buffer {name!r} when it is called. Only batch normalisation may "
                    "do that, because a change would have to be averaged over clients."
                )
        return out


def seeded_module(factory: ModuleFactory, generator: torch.Generator) -> nn.Module:
    """Make a module whose initialisation depends on the generator only."""
    seed = int(torch.randint(2**62, (), generator=generator))
    # tensors that are made in inference mode could never be trained
    with _LOCK, torch.inference_mode(False), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            return factory()
        except TypeError as error:
            if not isinstance(factory, type):
                raise
            name = factory.__name__  # a class that needs arguments
            raise TypeError(
                f"learner must be a function without arguments, such as lambda: {name}(...); {error}."
            ) from error


def _training_mode(module: nn.Module) -> nn.Module:
    """Switch to training; layers that the factory left in the mode of evaluation stay in it.

    So do normalisations whose own parameters are frozen, because their statistics are part of them.
    """
    left = [one for one in module.modules() if not one.training] if module.training else []
    module.train()
    for layer in left:
        layer.training = False
    for layer in module.modules():
        own = [p.requires_grad for p in layer.parameters()]
        if isinstance(layer, _NormBase) and own and not any(own):
            layer.training = False
    return module


def _normalisations(module: nn.Module) -> list[tuple[str, _NormBase]]:
    """Return the layers with running statistics that training changes, by name."""
    return [
        (name, layer)
        for name, layer in module.named_modules()
        if isinstance(layer, _NormBase) and layer.running_mean is not None and layer.training
    ]


def _close(one: Tensor, other: Tensor) -> bool:
    return torch.allclose(one, other, rtol=1e-3, atol=1e-4, equal_nan=True)


@contextmanager
def _trial() -> Iterator[None]:
    """Restore torch's random numbers; torch's own slow path of ``vmap`` counts as an error."""
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        torch.manual_seed(0)
        warnings.filterwarnings("error", message=".*performance drop")
        yield
