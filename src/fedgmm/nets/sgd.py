"""Stochastic gradients: weighted training of learners on many clients at once."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedgmm.core.linalg import matmul, take
from fedgmm.core.params import Params, is_statistic, take_clients
from fedgmm.nets.kernels.recording import recorder_of
from fedgmm.nets.learners import at_labels, class_margins, label_signs, log_likelihoods
from fedgmm.nets.networks import Dense, Network
from fedgmm.nets.pixels import as_numbers, crop_and_flip
from fedgmm.nets.stacked import Stacked

Rate = float | Tensor
"""A learning rate: a number, or a tensor without axes for a recording that serves every rate."""


@dataclass(frozen=True)
class SGD:
    """Options of local training.

    Attributes:
        lr: learning rate.
        momentum: within a round; buffers start at zero every round.
        weight_decay: ``L2`` penalty, added to the gradient.
        proximal: strength ``ρ`` of ``ρ/2 ‖θ - anchor‖²``.
        clip_norm: largest norm of a gradient of the rows' loss, of each client and learner by itself;
            ``None`` lets it be as large as it is.
        batch_size: rows a step.
        epochs: passes over the client's rows.
        augment: random crops and flips of images, anew in every step.
    """

    lr: float = 0.1
    momentum: float = 0.0
    weight_decay: float = 0.0
    proximal: float = 0.0
    clip_norm: float | None = None
    batch_size: int = 128
    epochs: int = 1
    augment: bool = False


@dataclass(frozen=True)
class Step:
    """One step of stacked training: which rows some clients of the plan see.

    Attributes:
        rows: row numbers, ``(A, B)``.
        mask: one for a row, zero for padding, which comes last, ``(A, B)``.
        full: there is no padding.
        augment: random crops and flips of the images.
        number: of the step within the round, from one.
    """

    rows: Tensor
    mask: Tensor
    full: bool = False
    augment: bool = False
    number: int = 1

    @property
    def counts(self) -> Tensor | None:
        """How many rows each client has, ``(A,)``; ``None`` where there is no padding."""
        return None if self.full else self.mask.sum(1)

    @property
    def clients(self) -> slice:
        """Their places in the plan: its first ones."""
        return slice(0, len(self.rows))


@dataclass(frozen=True)
class BatchPlan:
    """Who sees which rows, in which step.

    Attributes:
        clients: client codes with the most rows first, ``(C,)``; those that are done drop off the end.
        steps: the steps of a round, in order.
    """

    clients: Tensor
    steps: list[Step]


def plan_batches(
    offsets: Tensor,
    clients: Tensor,
    orders: list[Tensor],
    batch_size: int,
    even: bool = False,
    augment: bool = False,
    multiple: int = 1,
) -> BatchPlan:
    """Cut every client's shuffled rows into batches, for all clients side by side.

    Args:
        offsets: first row of each client and, last, the number of rows, ``(C_all + 1,)``.
        clients: codes of the clients that train, ``(C,)``.
        orders: one permutation of the rows an epoch, ``(N,)``, that keeps a client's rows together.
        batch_size: most rows a step.
        even: a client's batches differ by at most one row; otherwise all are whole but the last, which
            may hold a single row.
        augment: every step crops and flips its images at random.
        multiple: steps are padded to a multiple of so many rows, which may be more than a batch.
    """
    device = offsets.device
    offsets, clients = offsets.cpu(), clients.cpu()  # a card would be waited for again and again
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
    """How many rows a step has when it is padded to a multiple of so many."""
    return -(-rows // multiple) * multiple


def train_local(
    net: Network,
    params: Params,
    inputs: Tensor,
    labels: Tensor,
    weights: Tensor | None,
    plan: BatchPlan,
    options: SGD,
    anchor: Params | None = None,
) -> Params:
    """Weighted SGD on every client and learner at once.

    The loss of a batch is ``Σ_i w_i(m) · CE_i(θ_m) / Σ_i w_i(m)``: weights are normalised within the
    client's batch, so a small responsibility does not mean a small step.

    Args:
        net: the network.
        params: start, ``(C, M, ...)`` in the plan's order of clients.
        inputs: all rows, ``(N, *shape)``.
        labels: class indices, ``(N,)``.
        weights: responsibilities of the learners, ``(N, M)``, fastest with rows last in memory;
            ``None`` means one.
        plan: the batches, and whether images are cropped and flipped.
        options: the optimiser; what of them is about batches is left to the plan.
        anchor: centre of the proximal term, shaped like ``params``.

    Returns:
        Trained parameters, ``(C, M, ...)``.
    """

    def run(given: Given) -> list[Params]:
        params = {name: value.clone() for name, value in given.params[0].items()}
        centre = given.params[1] if anchor is not None else None
        velocity = _zeros_like(params) if options.momentum else None
        (rate,) = given.rates
        for step in given.steps:
            active = step.clients
            own = take_clients(params, active)
            gradients, statistics = batch_gradients(net, own, inputs, labels, given.weights, step)
            with torch.no_grad():
                _remember(own, statistics)
                _descend(
                    own,
                    gradients,
                    rate,
                    options,
                    None if velocity is None else take_clients(velocity, active),
                    None if centre is None else take_clients(centre, active),
                )
        return [params]

    sets = [params] if anchor is None else [params, anchor]
    given = Given(sets, plan.steps, weights, [options.lr])
    return _done(net, inputs, labels, replace(options, lr=0.0), given, run)[0]


def train_moreau(
    net: Network,
    params: Params,
    inputs: Tensor,
    labels: Tensor,
    plan: BatchPlan,
    options: SGD,
    penalty: float,
    inner_steps: int,
    inner_lr: float,
) -> tuple[Params, Params]:
    """The local rounds of pFedMe on every client at once.

    On each batch the personal learner is the proximal point of the local one, found by gradient
    steps, and the local learner then moves towards it::

        θ̃ ≈ argmin_θ  f(θ; batch) + λ/2 ‖θ - w‖²          w ← w - η λ (w - θ̃)

    Args:
        net: the network.
        params: local learners ``w``, ``(C, M, ...)`` in the plan's order of clients.
        inputs: all rows, ``(N, *shape)``.
        labels: class indices, ``(N,)``.
        plan: the batches, and whether images are cropped and flipped.
        options: ``lr`` is ``η``; ``clip_norm`` is for the steps of the inner problem.
        penalty: ``λ``.
        inner_steps: gradient steps of an inner problem.
        inner_lr: their size.

    Returns:
        The local learners and the personal ones, both ``(C, M, ...)``.
    """
    inner = SGD(proximal=penalty, clip_norm=options.clip_norm)

    def run(given: Given) -> list[Params]:
        local = {name: value.clone() for name, value in given.params[0].items()}
        personal = {name: value.clone() for name, value in local.items()}
        outer_rate, inner_rate = given.rates
        for step in given.steps:
            active = step.clients
            own = take_clients(personal, active)
            for _ in range(inner_steps):
                gradients, statistics = batch_gradients(net, own, inputs, labels, None, step)
                _remember(own, statistics)
                _descend(own, gradients, inner_rate, inner, None, take_clients(local, active))
            for name, value in local.items():
                rate = 1.0 if is_statistic(name) else outer_rate * penalty
                value[active].sub_(rate * (value[active] - personal[name][active]))
        return [local, personal]

    given = Given([params], plan.steps, None, [options.lr, inner_lr])
    local, personal = _done(net, inputs, labels, (inner, inner_steps), given, run)
    return local, personal


@dataclass(frozen=True)
class Given:
    """What differs from round to round: sets of parameters, batches, the rows' weights, and rates."""

    params: list[Params]
    steps: list[Step]
    weights: Tensor | None
    rates: Sequence[Rate]


def _done(
    net: Network,
    inputs: Tensor,
    labels: Tensor,
    options: Hashable,
    given: Given,
    run: Callable[[Given], list[Params]],
) -> list[Params]:
    """``run(given)``; some networks on an accelerator record it and replay it from then on.

    ``options`` are what else decides the kernels: whatever is given is read anew in every replay.
    """
    if not _recorded(net, inputs):
        return run(given)
    names = [list(params) for params in given.params]
    kinds = [(step.full, step.augment) for step in given.steps]

    def work(tensors: Sequence[Tensor]) -> list[Tensor]:
        rest = iter(tensors)
        params = [{name: next(rest) for name in own} for own in names]
        steps = [replace(step, rows=next(rest), mask=next(rest)) for step in given.steps]
        weights = None if given.weights is None else next(rest)
        found = run(Given(params, steps, weights, [next(rest) for _ in given.rates]))
        return [value for one in found for value in one.values()]

    tensors = [value for own in given.params for value in own.values()]
    tensors += [value for step in given.steps for value in (step.rows, step.mask)]
    tensors += [] if given.weights is None else [given.weights]
    dtype, device = tensors[0].dtype, tensors[0].device
    # filled in, not copied from the CPU, which would wait for the card
    tensors += [torch.full((), float(r), dtype=dtype, device=device) for r in given.rates]
    key = (run.__qualname__, options, tuple(kinds), inputs.data_ptr(), labels.data_ptr())
    found = recorder_of(net).run(key, work, tensors, kept=(inputs, labels))
    first = names[0]  # what comes out has the names of what went in
    return [
        dict(zip(first, found[begin : begin + len(first)], strict=True))
        for begin in range(0, len(found), len(first))
    ]


def _recorded(net: Network, inputs: Tensor) -> bool:
    return inputs.is_cuda and net.handling.recorded


def _remember(own: Params, statistics: Params) -> None:
    """Put new running statistics in the place of the old."""
    if statistics:
        torch._foreach_copy_([own[name] for name in statistics], list(statistics.values()))


def _zeros_like(params: Params) -> Params:
    return {name: torch.zeros_like(value) for name, value in params.items()}


def _descend(
    own: Params,
    gradients: Params,
    rate: Rate,
    options: SGD,
    velocity: Params | None,
    centre: Params | None,
) -> None:
    """One step of SGD, in place; ``rate`` is its learning rate, whatever that of ``options``.

    All parameters at once: on a card, a kernel for each of a hundred parameters takes longer to start
    than to run.
    """
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
    if isinstance(rate, Tensor):  # ``alpha`` would be a number in the recording
        torch._foreach_sub_(values, torch._foreach_mul(slopes, rate))
    else:
        torch._foreach_add_(values, slopes, alpha=-rate)


def _clipped(gradients: list[Tensor], largest: float) -> list[Tensor]:
    """Gradients ``(A, M, ...)``, scaled down where a client's and learner's norm exceeds ``largest``.

    The same as ``torch.nn.utils.clip_grad_norm_`` for each of them.
    """
    own = [g.unsqueeze(-1) for g in gradients]  # a parameter may be a single number
    norms = [torch.linalg.vector_norm(g, dim=tuple(range(2, g.ndim))) for g in own]
    norm = torch.linalg.vector_norm(torch.stack(norms), dim=0)  # (A, M)
    scale = (largest / (norm + 1e-6)).clamp_max(1.0)
    return [g * scale.reshape(*scale.shape, *(1,) * (g.ndim - 2)) for g in gradients]


def batch_loss(
    net: Network, params: Params, inputs: Tensor, labels: Tensor, weights: Tensor | None, step: Step
) -> tuple[Tensor, Params]:
    """Weighted mean cross-entropy of one step, ``(A, M)``, and running statistics after it, if any."""
    x, y, share = _batch(params, inputs, labels, weights, step)
    if isinstance(net, Stacked):
        logits, statistics = net.walk(params, x, True, step.counts, step.number)
        likelihood = at_labels(torch.log_softmax(logits, dim=-1), y)
    else:
        likelihood, statistics = log_likelihoods(net, params, x, y, training=True), {}
    return -(share * likelihood).sum(1), statistics


def batch_gradients(
    net: Network, params: Params, inputs: Tensor, labels: Tensor, weights: Tensor | None, step: Step
) -> tuple[Params, Params]:
    """Gradient of every client's and learner's own :func:`batch_loss`, and new running statistics."""
    if isinstance(net, Dense) and not net.hidden:
        batch = _batch(params, inputs, labels, weights, step)
        return _linear_gradients(net, params, *batch), {}
    own = {name: value.detach() for name, value in params.items()}
    trained = [value.requires_grad_() for name, value in own.items() if not is_statistic(name)]
    losses, statistics = batch_loss(net, own, inputs, labels, weights, step)
    # zero for a parameter that the module never uses
    gradients = torch.autograd.grad(losses.sum(), trained, materialize_grads=True)
    names = [name for name in own if not is_statistic(name)]
    return dict(zip(names, gradients, strict=True)), statistics


def _batch(
    params: Params, inputs: Tensor, labels: Tensor, weights: Tensor | None, step: Step
) -> tuple[Tensor, Tensor, Tensor]:
    """Rows ``(A, B, *shape)``, labels ``(A, B)`` and each row's share of the loss, ``(A, B, M or 1)``."""
    dtype = next(iter(params.values())).dtype
    w = step.mask.unsqueeze(-1).to(dtype)
    if weights is not None:
        # rows last in memory, here and below: products then run along many rows, not a few learners
        taken = take(weights.mT, step.rows.reshape(-1), axis=1).to(dtype)
        w = (w.mT * taken.reshape(-1, *step.rows.shape).transpose(0, 1)).mT
    share = w / w.sum(1, keepdim=True).clamp_min(torch.finfo(dtype).tiny)
    seen = _take_rows(inputs, step.rows)
    x = as_numbers(crop_and_flip(seen) if step.augment else seen, dtype)
    return x, _take_rows(labels, step.rows), share


def _linear_gradients(net: Dense, params: Params, x: Tensor, y: Tensor, share: Tensor) -> Params:
    """The closed form for linear learners, three times as fast as differentiating.

    ``∂L/∂z = share · (softmax(z) - onehot(y))`` and ``∂L/∂W = Σ_i ∂L/∂z_i x_iᵀ``.
    """
    x = x.flatten(2)
    if net.classes == 2:  # softmax(z)₁ - y = -s σ(-s (z₁ - z₀)) with s = ±1
        signs = label_signs(y, x.dtype)
        slopes = torch.sigmoid(-signs * class_margins(net, params, x)) * signs * share
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
    """``values[rows]`` for row numbers ``(A, B)``; a flat selection is several times faster."""
    taken = take(values, rows.reshape(-1))
    return taken.reshape(*rows.shape, *values.shape[1:])
