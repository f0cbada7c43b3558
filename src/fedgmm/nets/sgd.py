"""Weighted SGD on all clients and learners at once: the clients' ``θ_mc`` of the M-step.

The server averages ``θ_mc`` to ``θ_m`` in :func:`fedgmm.core.em.average_learners`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from fedgmm.core.params import Params, is_statistic, take_clients
from fedgmm.nets.kernels.recording import recorder_of
from fedgmm.nets.learners import class_margins, label_signs, likelihoods_of_logits
from fedgmm.nets.networks import Dense, Network, OfModules, as_numbers
from fedgmm.support.linalg import matmul, take
from fedgmm.support.scratch import touched

Rate = float | Tensor
"""A learning rate: a number, or a scalar tensor so that one recording works for every rate."""

MARGIN = 4
"""Largest shift of a random crop, in pixels."""

_BYTES_AROUND = 64 * 1024  # that the system maps around a row of a file


@dataclass(frozen=True)
class SGD:
    """Options of local training."""

    lr: float = 0.1
    momentum: float = 0.0  # momentum within a round; buffers start at zero in every round
    weight_decay: float = 0.0  # ``L2`` penalty, added to the gradient
    proximal: float = 0.0  # strength ``ρ`` of ``ρ/2 ‖θ - anchor‖²``
    # largest norm of the gradient of the rows' loss, per client and learner; ``None`` disables
    # clipping
    clip_norm: float | None = None
    batch_size: int = 128  # rows per step
    epochs: int = 1  # passes over the client's rows
    augment: bool = False  # crop and flip images at random in every step


class TrainingRows(NamedTuple):
    """The rows of all clients, with the weight of each row in the loss of each learner."""

    inputs: Tensor  # ``(N, *shape)``
    labels: Tensor  # ``(N,)``
    # ``(N, M)`` or ``(N, 1)``; fastest with rows last in memory. ``None`` means one.
    weights: Tensor | None = None


@dataclass(frozen=True)
class Step:
    """The batches of one step of stacked training, one per active client."""

    rows: Tensor  # row indices, ``(A, B)``
    mask: Tensor  # one for a row, zero for padding at the end, ``(A, B)``
    full: bool = False  # there is no padding
    augment: bool = False  # crop and flip the images at random
    number: int = 1  # number of the step within the round, from one

    @property
    def counts(self) -> Tensor | None:
        """Number of rows per client, ``(A,)``; ``None`` if there is no padding."""
        return None if self.full else self.mask.sum(1)

    @property
    def clients(self) -> slice:
        """Positions of the active clients in the plan: always the first ones."""
        return slice(0, len(self.rows))


@dataclass(frozen=True)
class BatchPlan:
    """The batches of all clients for one round."""

    # client codes, sorted by descending number of rows, ``(C,)``. Clients without further batches
    # are therefore always at the end.
    clients: Tensor
    steps: list[Step]  # the steps of a round, in order


def plan_batches(
    offsets: Tensor,
    clients: Tensor,
    orders: list[Tensor],
    batch_size: int,
    even: bool = False,
    augment: bool = False,
    multiple: int = 1,
) -> BatchPlan:
    """Split the shuffled rows of every client into batches.

    Args:
        offsets: first row of each client, then the number of rows, ``(C_all + 1,)``.
        clients: codes of the clients that train, ``(C,)``.
        orders: one permutation of the rows per epoch, ``(N,)``, that keeps a client's rows together.
        batch_size: largest number of rows per step and client.
        even: make a client's batches differ by at most one row. Otherwise all batches are full except
            the last, which may have a single row.
        augment: crop and flip the images of every step at random.
        multiple: pad steps to a multiple of this many rows, which may exceed ``batch_size``.
    """
    device = offsets.device
    offsets, clients = offsets.cpu(), clients.cpu()  # otherwise every step waits for the GPU
    sizes = (offsets[1:] - offsets[:-1])[clients]
    by_size = torch.argsort(sizes, descending=True, stable=True)
    clients, sizes = clients[by_size], sizes[by_size]
    batches = (sizes + batch_size - 1) // batch_size
    steps: list[Step] = []
    for order in orders:
        for number in range(int(batches[0])):
            active = int((batches > number).sum())
            own, parts = sizes[:active, None], batches[:active, None]
            first = own * number // parts if even else torch.full_like(own, number * batch_size)
            after = own * (number + 1) // parts if even else (first + batch_size).clamp_max(own)
            width = padded_rows(int((after - first).max()), multiple)
            columns = first + torch.arange(width)
            mask = columns < after
            place = torch.where(mask, offsets[clients[:active], None] + columns, 0)
            rows = order[place.to(device)]
            step = Step(rows, mask.to(device), bool(mask.all()), augment, len(steps) + 1)
            steps.append(step)
    return BatchPlan(clients.to(device), steps)


def padded_rows(rows: int, multiple: int) -> int:
    """Round a number of rows up to a multiple."""
    return -(-rows // multiple) * multiple


def train_local(
    net: Network,
    params: Params,
    rows: TrainingRows,
    plan: BatchPlan,
    options: SGD,
    anchor: Params | None = None,
) -> Params:
    """Train every client and learner at once by weighted SGD.

    The loss of a batch is ``Σ_i w_i(m) · CE_i(θ_m) / Σ_i w_i(m)``. Weights are normalised within
    the client's batch, so a learner with small responsibilities still makes full steps.

    Parameters, the ``anchor`` of the proximal term and the result are ``(C, M, ...)`` in the plan's
    order of clients. The plan replaces ``batch_size``, ``epochs`` and ``augment`` of the options.
    """

    def run(given: RoundInputs) -> list[Params]:
        params = {name: value.clone() for name, value in given.params[0].items()}
        centre = given.params[1] if anchor is not None else None
        velocity = None
        if options.momentum:
            velocity = {name: torch.zeros_like(value) for name, value in params.items()}
        (rate,) = given.rates
        for step in given.steps:
            own = take_clients(params, step.clients)
            speed = None if velocity is None else take_clients(velocity, step.clients)
            near = None if centre is None else take_clients(centre, step.clients)
            _step_on_batch(net, own, given.rows, step, rate, options, speed, near)
        return [params]

    sets = [params] if anchor is None else [params, anchor]
    given = RoundInputs(sets, plan.steps, rows, [options.lr])
    return _run_or_replay(net, replace(options, lr=0.0), given, run)[0]


def train_moreau(
    net: Network,
    params: Params,
    rows: TrainingRows,
    plan: BatchPlan,
    options: SGD,
    penalty: float,
    inner_steps: int,
    inner_lr: float,
) -> tuple[Params, Params]:
    """Train every client at once by the local rounds of pFedMe; return local and personal learners.

    On each batch, gradient steps find the personal learner, which is the proximal point of the
    local one. The local learner then moves towards it::

        θ̃ ≈ argmin_θ  f(θ; batch) + λ/2 ‖θ - w‖²          w ← w - η λ (w - θ̃)

    The local learners ``w`` are ``params``, ``(C, M, ...)`` in the plan's order of clients, ``λ``
    is ``penalty`` and ``η`` is ``options.lr``; ``clip_norm`` applies to the ``inner_steps`` per
    batch.
    """
    inner = SGD(proximal=penalty, clip_norm=options.clip_norm)

    def run(given: RoundInputs) -> list[Params]:
        local = {name: value.clone() for name, value in given.params[0].items()}
        personal = {name: value.clone() for name, value in local.items()}
        outer_rate, inner_rate = given.rates
        for step in given.steps:
            active = step.clients
            own, near = take_clients(personal, active), take_clients(local, active)
            for _ in range(inner_steps):
                _step_on_batch(net, own, given.rows, step, inner_rate, inner, None, near)
            for name, value in local.items():
                rate = 1.0 if is_statistic(name) else outer_rate * penalty
                value[active].sub_(rate * (value[active] - personal[name][active]))
        return [local, personal]

    given = RoundInputs([params], plan.steps, rows, [options.lr, inner_lr])
    local, personal = _run_or_replay(net, (inner, inner_steps), given, run)
    return local, personal


def noise_variances(net: Network, params: Params, rows: TrainingRows, plan: BatchPlan) -> Tensor:
    """Return ``σ²_mc = Σ_i q_i(m) (y_i - f_θmc(x_i))² / Σ_i q_i(m)``, ``(C, M)``, for numbers.

    ``q_i(m)`` are the weights of the rows. The plan passes once over the clients' rows.
    """
    own = next(iter(params.values()))
    squares = torch.zeros(own.shape[:2], dtype=torch.float64, device=own.device)
    counts = torch.zeros_like(squares)
    with torch.no_grad():
        for step in plan.steps:
            x = as_numbers(_take_rows(rows.inputs, step.rows), own.dtype)
            mean = net.logits(take_clients(params, step.clients), x)[..., 0].double()
            w = step.mask.double().unsqueeze(-1).expand_as(mean)
            w = w if rows.weights is None else w * rows.weights[step.rows]
            residuals = _take_rows(rows.labels, step.rows).unsqueeze(-1) - mean
            squares[step.clients] += (w * residuals.square()).sum(1)
            counts[step.clients] += w.sum(1)
    return squares / counts.clamp_min(torch.finfo(counts.dtype).tiny)


@dataclass(frozen=True)
class RoundInputs:
    """Values of a round: parameter sets, batches, rows, learning rates."""

    params: list[Params]
    steps: list[Step]
    rows: TrainingRows
    rates: Sequence[Rate]


def _run_or_replay(
    net: Network,
    options: Hashable,
    given: RoundInputs,
    run: Callable[[RoundInputs], list[Params]],
) -> list[Params]:
    """Return ``run(given)``, from a recording if the network and the device allow it.

    A replay reads what is given again, but the inputs and labels stay where they are. ``options`` holds
    everything else that decides which kernels run, so other options are another recording.
    """
    inputs, labels, weights = given.rows
    if not _is_recorded(net, inputs):
        return run(given)
    names = [list(params) for params in given.params]
    kinds = [(step.full, step.augment) for step in given.steps]

    def work(tensors: Sequence[Tensor]) -> list[Tensor]:
        rest = iter(tensors)
        params = [{name: next(rest) for name in own} for own in names]
        steps = [replace(step, rows=next(rest), mask=next(rest)) for step in given.steps]
        rows = TrainingRows(inputs, labels, None if weights is None else next(rest))
        trained = run(RoundInputs(params, steps, rows, [next(rest) for _ in given.rates]))
        return [value for one in trained for value in one.values()]

    tensors = [value for own in given.params for value in own.values()]
    tensors += [value for step in given.steps for value in (step.rows, step.mask)]
    tensors += [] if weights is None else [weights]
    dtype, device = tensors[0].dtype, tensors[0].device
    # torch.full does not wait for the GPU; a copy from the CPU would
    tensors += [torch.full((), float(r), dtype=dtype, device=device) for r in given.rates]
    key = (run.__qualname__, options, tuple(kinds), inputs.data_ptr(), labels.data_ptr())
    outputs = recorder_of(net).run(key, work, tensors, keep_alive=(inputs, labels))
    first = names[0]  # every returned set has the names of the first one
    return [
        dict(zip(first, outputs[begin : begin + len(first)], strict=True))
        for begin in range(0, len(outputs), len(first))
    ]


def _is_recorded(net: Network, inputs: Tensor) -> bool:
    return inputs.is_cuda and net.hints.recorded


def _step_on_batch(
    net: Network,
    own: Params,
    rows: TrainingRows,
    step: Step,
    rate: Rate,
    options: SGD,
    velocity: Params | None,
    centre: Params | None,
) -> None:
    """Make one step of SGD in place, with learning rate ``rate`` instead of ``options.lr``.

    All parameters are updated by one call, because on a GPU a kernel per parameter takes longer to
    start than to run.
    """
    gradients, statistics = batch_gradients(net, own, rows, step)
    if statistics:
        torch._foreach_copy_([own[name] for name in statistics], list(statistics.values()))
    values, slopes = [own[name] for name in gradients], list(gradients.values())
    if options.clip_norm is not None:
        slopes = _clipped(slopes, options.clip_norm)
    if options.weight_decay:
        slopes = list(torch._foreach_add(slopes, values, alpha=options.weight_decay))
    if options.proximal and centre is not None:
        pulls = torch._foreach_sub(values, [centre[name] for name in gradients])
        slopes = list(torch._foreach_add(slopes, pulls, alpha=options.proximal))
    if velocity is not None:
        speeds = [velocity[name] for name in gradients]
        torch._foreach_mul_(speeds, options.momentum)
        torch._foreach_add_(speeds, slopes)
        slopes = speeds
    if isinstance(rate, Tensor):  # ``alpha`` would be a constant of the recording
        torch._foreach_sub_(values, torch._foreach_mul(slopes, rate))
    else:
        torch._foreach_add_(values, slopes, alpha=-rate)


def _clipped(gradients: list[Tensor], largest: float) -> list[Tensor]:
    """Scale gradients ``(A, M, ...)`` down to norm ``largest``, per client and learner.

    The result equals ``torch.nn.utils.clip_grad_norm_`` for each client and learner.
    """
    own = [g.unsqueeze(-1) for g in gradients]  # a parameter may be a single number
    norms = [torch.linalg.vector_norm(g, dim=tuple(range(2, g.ndim))) for g in own]
    norm = torch.linalg.vector_norm(torch.stack(norms), dim=0)  # (A, M)
    scale = (largest / (norm + 1e-6)).clamp_max(1.0)
    return [g * scale.reshape(*scale.shape, *(1,) * (g.ndim - 2)) for g in gradients]


def batch_loss(
    net: Network, params: Params, rows: TrainingRows, step: Step
) -> tuple[Tensor, Params]:
    """Return the weighted mean cross-entropy of one step, ``(A, M)``, and the new running statistics."""
    x, y, share = _batch(params, rows, step)
    if isinstance(net, OfModules):
        logits, statistics = net.forward(params, x, True, step.counts, step.number)
    else:
        logits, statistics = net.logits(params, x, training=True), {}
    return -(share * likelihoods_of_logits(logits, y)).sum(1), statistics


def batch_gradients(
    net: Network, params: Params, rows: TrainingRows, step: Step
) -> tuple[Params, Params]:
    """Return the gradients of :func:`batch_loss` per client and learner, and the new running statistics."""
    if isinstance(net, Dense) and not net.hidden:
        return _linear_gradients(net, params, *_batch(params, rows, step)), {}
    own = {name: value.detach() for name, value in params.items()}
    trained = [value.requires_grad_() for name, value in own.items() if not is_statistic(name)]
    losses, statistics = batch_loss(net, own, rows, step)
    # parameters that the module does not use get gradient zero
    gradients = torch.autograd.grad(losses.sum(), trained, materialize_grads=True)
    names = [name for name in own if not is_statistic(name)]
    return dict(zip(names, gradients, strict=True)), statistics


def _batch(params: Params, rows: TrainingRows, step: Step) -> tuple[Tensor, Tensor, Tensor]:
    """Return inputs ``(A, B, *shape)``, labels ``(A, B)`` and shares of the loss ``(A, B, M or 1)``."""
    dtype = next(iter(params.values())).dtype
    w = step.mask.unsqueeze(-1).to(dtype)
    if rows.weights is not None:
        # rows are last in memory, here and below, so products run along many rows, not a few learners
        taken = take(rows.weights.mT, step.rows.reshape(-1), axis=1).to(dtype)
        w = (w.mT * taken.reshape(-1, *step.rows.shape).transpose(0, 1)).mT
    share = w / w.sum(1, keepdim=True).clamp_min(torch.finfo(dtype).tiny)
    seen = _take_rows(rows.inputs, step.rows)
    x = as_numbers(crop_and_flip(seen) if step.augment else seen, dtype)
    return x, _take_rows(rows.labels, step.rows), share


def _linear_gradients(net: Dense, params: Params, x: Tensor, y: Tensor, share: Tensor) -> Params:
    """Return the gradients of linear learners in closed form, three times as fast as autograd.

    ``∂L/∂z = share · (softmax(z) - onehot(y))`` and ``∂L/∂W = Σ_i ∂L/∂z_i x_iᵀ``.
    """
    x = x.flatten(2)
    if net.classes == 2:  # softmax(z)₁ - y = -s σ(-s (z₁ - z₀)) with s = ±1
        signs = label_signs(y, x.dtype)
        slopes = torch.sigmoid(-signs * class_margins(params, x)) * signs * share
        weight, bias = matmul(slopes.mT, x), slopes.sum(1)
        return {
            "0.weight": torch.stack([weight, -weight], dim=2),
            "0.bias": torch.stack([bias, -bias], dim=2),
        }
    truth = torch.nn.functional.one_hot(y, net.classes).to(x.dtype)
    probabilities = torch.softmax(net.logits(params, x), -1)
    slopes = (probabilities - truth.unsqueeze(-2)) * share.unsqueeze(-1)
    weight = matmul(slopes.flatten(2).mT, x)
    return {"0.weight": weight.reshape_as(params["0.weight"]), "0.bias": slopes.sum(1)}


def _take_rows(values: Tensor, rows: Tensor) -> Tensor:
    """Return ``values[rows]`` for row indices ``(A, B)``; a flat selection is several times faster."""
    taken = take(values, rows.reshape(-1))
    touched(_BYTES_AROUND * rows.numel())
    return taken.reshape(*rows.shape, *values.shape[1:])


def crop_and_flip(images: Tensor) -> Tensor:
    """Shift each image by up to ``MARGIN`` pixels, filling with zeros, and mirror half of the images.

    Random numbers come from torch's global generator of the device, so recorded rounds draw new ones.
    """
    *lead, channels, height, width = images.shape
    flat = images.reshape(-1, channels, height * width)
    device, rows = images.device, len(flat)
    down, right = torch.randint(-MARGIN, MARGIN + 1, (2, rows, 1, 1), device=device)
    mirrored = torch.rand(rows, 1, 1, device=device) < 0.5
    y = torch.arange(height, device=device)[:, None] + down
    x = torch.arange(width, device=device)
    x = torch.where(mirrored, width - 1 - x, x) + right
    inside = (y >= 0) & (y < height) & (x >= 0) & (x < width)  # (rows, height, width)
    places = y.clamp(0, height - 1) * width + x.clamp(0, width - 1)
    moved = flat.gather(2, places.reshape(rows, 1, -1).expand(-1, channels, -1))
    moved = torch.where(inside.reshape(rows, 1, -1), moved, torch.zeros_like(moved))
    return moved.reshape(*lead, channels, height, width)
