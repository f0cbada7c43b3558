"""Learners ``P_θ(y|x)``: their likelihood, and their weighted training on many clients at once."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from fedgmm.core.linalg import matmul, solve, take
from fedgmm.core.networks import Dense, Network, Params, is_statistic
from fedgmm.core.pixels import as_numbers, crop_and_flip
from fedgmm.core.recording import recorder_of
from fedgmm.core.stacked import Stacked

_NUMBERS_AT_ONCE = 512 * 1024 * 1024  # activations of rows that shared learners look at
_LARGER_ON_ACCELERATORS = 4
_KEPT_FOR_THE_WAY_BACK = 8  # times as many numbers in training, about


def log_likelihoods(
    net: Network, params: Params, inputs: Tensor, labels: Tensor, training: bool = False
) -> Tensor:
    """``log P_θm(y_i|x_i)`` of every learner.

    Args:
        net: the network.
        params: stacked parameters, ``(*C, M, ...)``.
        inputs: ``(*C, n, *shape)``.
        labels: class indices, ``(*C, n)``.
        training: switches dropout on.

    Returns:
        ``(*C, n, M)``.
    """
    learners = len(next(iter(params.values())))
    most = _NUMBERS_AT_ONCE * _KEPT_FOR_THE_WAY_BACK // (learners * net.row_numbers)
    most *= 1 if inputs.device.type == "cpu" else _LARGER_ON_ACCELERATORS
    if inputs.dim() == len(net.input_shape) + 1 and len(inputs) > most and not training:
        size = max(1, most)
        parts = [slice(first, first + size) for first in range(0, len(inputs), size)]
        return torch.cat([log_likelihoods(net, params, inputs[p], labels[p]) for p in parts])
    if net.classes == 2:  # log P(y|x) = log σ(±(z₁ - z₀)): a softmax over two numbers is slow
        margins = _margins(net, params, inputs, training)
        return logsigmoid((margins * _signs(labels, margins.dtype)).mT).mT
    return _of_labels(torch.log_softmax(net.logits(params, inputs, training), dim=-1), labels)


def _of_labels(log_probabilities: Tensor, labels: Tensor) -> Tensor:
    """``(*C, n, M, K)`` at the labels ``(*C, n)``: ``(*C, n, M)``."""
    index = labels[..., None, None].expand(*log_probabilities.shape[:-1], 1)
    return log_probabilities.gather(-1, index).squeeze(-1)


def _margins(net: Network, params: Params, inputs: Tensor, training: bool = False) -> Tensor:
    """``z₁ - z₀`` of two classes, ``(*C, n, M)``; linear learners need only the difference."""
    if isinstance(net, Dense) and not net.hidden:
        weight, bias = params["0.weight"], params["0.bias"]
        x = inputs.flatten(weight.dim() - 2)
        difference = weight[..., 1, :] - weight[..., 0, :]
        # rows last in memory: what follows then runs along many rows, not along a few learners
        products = matmul(difference, x.mT) if x.dim() > 2 else difference @ x.mT
        return (products + (bias[..., 1] - bias[..., 0]).unsqueeze(-1)).mT
    logits = net.logits(params, inputs, training)
    return logits[..., 1] - logits[..., 0]


def _signs(labels: Tensor, dtype: torch.dtype) -> Tensor:
    """Two classes as ``±1``, ``(*C, n, 1)``."""
    return (2 * labels - 1).to(dtype).unsqueeze(-1)


# ---------------------------------------------------------------------- parameters as vectors


def stack(params: list[Params]) -> Params:
    """Parameters of several learners along a new first axis."""
    return {name: torch.stack([own[name] for own in params]) for name in params[0]}


def expand_clients(params: Params, clients: int) -> Params:
    """The same parameters for every client: ``(M, ...)`` to ``(C, M, ...)``, copied."""
    return {name: value.expand(clients, *value.shape).clone() for name, value in params.items()}


def take_clients(params: Params, index: Tensor | slice) -> Params:
    """Parameters of some clients, along the first axis."""
    return {name: value[index] for name, value in params.items()}


def weighted_sum(params: Params, weights: Tensor) -> Params:
    """``Σ_c w_c(m) θ_mc`` in float64: ``(C, M, ...)`` and ``(C, M)`` to ``(M, ...)``."""
    sums = {}
    for name, value in params.items():
        total = torch.einsum("cm,cmp->mp", weights.double(), _vectors(value).double())
        sums[name] = total.reshape(value.shape[1:])
    return sums


def add_params(sums: list[Params]) -> Params:
    """The sum of several sets of parameters, in their order."""
    return {name: torch.stack([own[name] for own in sums]).sum(0) for name in sums[0]}


def flatten(params: Params) -> Tensor:
    """All that is trained of each client and learner as one vector: ``(C, M, P)``, float64."""
    trained = [value for name, value in params.items() if not is_statistic(name)]
    return torch.cat([_vectors(value).double() for value in trained], dim=-1)


def _vectors(value: Tensor) -> Tensor:
    """``(C, M, ...)`` as ``(C, M, p)``; a parameter may be a single number."""
    return value.reshape(*value.shape[:2], -1)


# ---------------------------------------------------------------------- stochastic gradients


@dataclass(frozen=True)
class SGD:
    """Options of local training.

    Attributes:
        lr: learning rate.
        momentum: within a round; buffers start at zero every round.
        weight_decay: ``L2`` penalty, added to the gradient.
        proximal: strength ``ρ`` of ``ρ/2 ‖θ - anchor‖²``.
        batch_size: rows a step.
        epochs: passes over the client's rows.
        augment: random crops and flips of images, anew in every step.
    """

    lr: float = 0.1
    momentum: float = 0.0
    weight_decay: float = 0.0
    proximal: float = 0.0
    batch_size: int = 128
    epochs: int = 1
    augment: bool = False


@dataclass(frozen=True)
class Step:
    """One step of stacked training: which rows some clients of the plan see.

    Attributes:
        rows: row numbers, ``(A, B)``.
        mask: one for a row, zero for padding, ``(A, B)``.
        full: there is no padding.
    """

    rows: Tensor
    mask: Tensor
    full: bool = False

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
    offsets: Tensor, clients: Tensor, orders: list[Tensor], batch_size: int, even: bool = False
) -> BatchPlan:
    """Cut every client's shuffled rows into batches, for all clients side by side.

    Args:
        offsets: first row of each client and, last, the number of rows, ``(C_all + 1,)``.
        clients: codes of the clients that train, ``(C,)``.
        orders: one permutation of the rows an epoch, ``(N,)``, that keeps a client's rows together.
        batch_size: most rows a step.
        even: a client's batches differ by at most one row; otherwise all are whole but the last, which
            may hold a single row.
    """
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
            width = int((after - first).max())
            columns = first + torch.arange(width, device=offsets.device)
            mask = columns < after
            place = offsets[clients[:active], None] + columns
            full = bool(mask.all())
            steps.append(Step(order[torch.where(mask, place, 0)], mask, full))
    return BatchPlan(clients, steps)


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
        plan: the batches.
        options: the optimiser.
        anchor: centre of the proximal term, shaped like ``params``.

    Returns:
        Trained parameters, ``(C, M, ...)``.
    """

    def run(given: Given) -> list[Params]:
        params = {name: value.clone() for name, value in given.params[0].items()}
        centre = given.params[1] if anchor is not None else None
        velocity = _zeros_like(params) if options.momentum else None
        for step in given.steps:
            active = step.clients
            own = take_clients(params, active)
            gradients, statistics = batch_gradients(
                net, own, inputs, labels, given.weights, step, options.augment
            )
            with torch.no_grad():
                _remember(own, statistics)
                _descend(
                    own,
                    gradients,
                    options,
                    None if velocity is None else take_clients(velocity, active),
                    None if centre is None else take_clients(centre, active),
                )
        return [params]

    sets = [params] if anchor is None else [params, anchor]
    return _done(net, inputs, labels, options, Given(sets, plan.steps, weights), run)[0]


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
        plan: the batches.
        options: ``lr`` is ``η``.
        penalty: ``λ``.
        inner_steps: gradient steps of an inner problem.
        inner_lr: their size.

    Returns:
        The local learners and the personal ones, both ``(C, M, ...)``.
    """
    inner = SGD(lr=inner_lr, proximal=penalty)

    def run(given: Given) -> list[Params]:
        local = {name: value.clone() for name, value in given.params[0].items()}
        personal = {name: value.clone() for name, value in local.items()}
        for step in given.steps:
            active = step.clients
            own = take_clients(personal, active)
            for _ in range(inner_steps):
                gradients, statistics = batch_gradients(
                    net, own, inputs, labels, None, step, options.augment
                )
                _remember(own, statistics)
                _descend(own, gradients, inner, None, take_clients(local, active))
            for name, value in local.items():
                rate = 1.0 if is_statistic(name) else options.lr * penalty
                value[active].sub_(rate * (value[active] - personal[name][active]))
        return [local, personal]

    key = (options, penalty, inner_steps, inner_lr)
    local, personal = _done(net, inputs, labels, key, Given([params], plan.steps, None), run)
    return local, personal


@dataclass(frozen=True)
class Given:
    """What differs from round to round: sets of parameters, the batches, and the rows' weights."""

    params: list[Params]
    steps: list[Step]
    weights: Tensor | None


def _done(
    net: Network,
    inputs: Tensor,
    labels: Tensor,
    options: Hashable,
    given: Given,
    run: Callable[[Given], list[Params]],
) -> list[Params]:
    """``run(given)``; large networks on an accelerator record it and replay it from then on."""
    if not (inputs.is_cuda and isinstance(net, Stacked)):
        return run(given)
    names = [list(params) for params in given.params]
    shape = [step.full for step in given.steps]

    def work(tensors: Sequence[Tensor]) -> list[Tensor]:
        rest = iter(tensors)
        params = [{name: next(rest) for name in own} for own in names]
        steps = [replace(step, rows=next(rest), mask=next(rest)) for step in given.steps]
        found = run(Given(params, steps, None if given.weights is None else next(rest)))
        return [value for one in found for value in one.values()]

    tensors = [value for own in given.params for value in own.values()]
    tensors += [value for step in given.steps for value in (step.rows, step.mask)]
    tensors += [] if given.weights is None else [given.weights]
    key = (run.__qualname__, options, tuple(shape), inputs.data_ptr(), labels.data_ptr())
    found = recorder_of(net).run(key, work, tensors, kept=(inputs, labels))
    first = names[0]  # what comes out has the names of what went in
    return [
        dict(zip(first, found[begin : begin + len(first)], strict=True))
        for begin in range(0, len(found), len(first))
    ]


def _remember(own: Params, statistics: Params) -> None:
    """Put new running statistics in the place of the old."""
    if statistics:
        torch._foreach_copy_([own[name] for name in statistics], list(statistics.values()))


def _zeros_like(params: Params) -> Params:
    return {name: torch.zeros_like(value) for name, value in params.items()}


def _descend(
    own: Params, gradients: Params, options: SGD, velocity: Params | None, centre: Params | None
) -> None:
    """One step of SGD, in place.

    All parameters at once: on a card, a kernel for each of a hundred parameters takes longer to start
    than to run.
    """
    values, slopes = [own[name] for name in gradients], list(gradients.values())
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
    torch._foreach_add_(values, slopes, alpha=-options.lr)


def batch_loss(
    net: Network,
    params: Params,
    inputs: Tensor,
    labels: Tensor,
    weights: Tensor | None,
    step: Step,
    augment: bool = False,
) -> tuple[Tensor, Params]:
    """Weighted mean cross-entropy of one step, ``(A, M)``, and running statistics after it, if any."""
    x, y, share = _batch(params, inputs, labels, weights, step, augment)
    if isinstance(net, Stacked):
        logits, statistics = net.walk(params, x, True, None if step.full else step.mask)
        likelihood = _of_labels(torch.log_softmax(logits, dim=-1), y)
    else:
        likelihood, statistics = log_likelihoods(net, params, x, y, training=True), {}
    return -(share * likelihood).sum(1), statistics


def batch_gradients(
    net: Network,
    params: Params,
    inputs: Tensor,
    labels: Tensor,
    weights: Tensor | None,
    step: Step,
    augment: bool = False,
) -> tuple[Params, Params]:
    """Gradient of every client's and learner's own :func:`batch_loss`, and new running statistics."""
    if isinstance(net, Dense) and not net.hidden:
        batch = _batch(params, inputs, labels, weights, step, augment)
        return _linear_gradients(net, params, *batch), {}
    own = {name: value.detach() for name, value in params.items()}
    trained = [value.requires_grad_() for name, value in own.items() if not is_statistic(name)]
    losses, statistics = batch_loss(net, own, inputs, labels, weights, step, augment)
    # zero for a parameter that the module never uses
    gradients = torch.autograd.grad(losses.sum(), trained, materialize_grads=True)
    names = [name for name in own if not is_statistic(name)]
    return dict(zip(names, gradients, strict=True)), statistics


def _batch(
    params: Params,
    inputs: Tensor,
    labels: Tensor,
    weights: Tensor | None,
    step: Step,
    augment: bool = False,
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
    x = as_numbers(crop_and_flip(seen) if augment else seen, dtype)
    return x, _take_rows(labels, step.rows), share


def _linear_gradients(net: Dense, params: Params, x: Tensor, y: Tensor, share: Tensor) -> Params:
    """The closed form for linear learners, three times as fast as differentiating.

    ``∂L/∂z = share · (softmax(z) - onehot(y))`` and ``∂L/∂W = Σ_i ∂L/∂z_i x_iᵀ``.
    """
    x = x.flatten(2)
    if net.classes == 2:  # softmax(z)₁ - y = -s σ(-s (z₁ - z₀)) with s = ±1
        signs = _signs(y, x.dtype)
        slopes = torch.sigmoid(-signs * _margins(net, params, x)) * signs * share
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


# ---------------------------------------------------------------------- exact steps, linear learners


@dataclass(frozen=True)
class NewtonSums:
    """Gradient and Hessian of the weighted cross-entropy of ``M`` linear learners.

    Both are sums over rows and over clients. Coordinates are contrasts of the classes: logits are
    ``contrasts(K) @ β``, so two classes need one coordinate and none is redundant.

    Attributes:
        gradient: ``(M, (K-1)·p)`` with ``p = columns + 1``.
        hessian: ``(M, (K-1)·p, (K-1)·p)``.
        second: ``Σ_i w_i(m) x_i x_iᵀ``, ``(M, p, p)``; tells how far a step moves the logits.
        weight: ``Σ_i w_i(m)``, ``(M,)``.
    """

    gradient: Tensor
    hessian: Tensor
    second: Tensor
    weight: Tensor


_SMALLEST_RIDGE = 1e-9


def contrasts(classes: int) -> Tensor:
    """An orthonormal basis ``(K, K-1)`` of the logits that sum to zero."""
    helmert: Tensor = torch.zeros(classes, classes - 1, dtype=torch.float64)
    for k in range(1, classes):
        helmert[:k, k - 1] = 1.0
        helmert[k, k - 1] = -float(k)
    lengths: Tensor = torch.linalg.vector_norm(helmert, dim=0)
    return helmert / lengths


def newton_sums(
    net: Dense, params: Params, inputs: Tensor, labels: Tensor, weights: Tensor
) -> NewtonSums:
    """Gradient and Hessian of ``Σ_i w_i(m) CE_i(θ_m)`` on a block of rows.

    Args:
        net: a linear network.
        params: ``(M, ...)``.
        inputs: ``(n, d)``.
        labels: ``(n,)``.
        weights: ``w_i(m)``, ``(n, M)``.
    """
    x = inputs.flatten(1).double()
    x = torch.cat([x, torch.ones(len(x), 1, dtype=x.dtype, device=x.device)], dim=1)
    basis = contrasts(net.classes).to(x.device)
    probabilities = torch.softmax(net.logits(params, inputs).double(), dim=-1)
    truth = torch.nn.functional.one_hot(labels, net.classes).double()
    w = weights.double()
    # ∂CE/∂β = Bᵀ (p - y) xᵀ
    error = (probabilities - truth[:, None]) @ basis * w[..., None]
    gradient = error.flatten(1).mT @ x
    # ∂²CE/∂β² = Bᵀ (diag p - p pᵀ) B ⊗ x xᵀ
    pb = probabilities @ basis
    curvature = torch.einsum("kr,nmk,ks->nmrs", basis, probabilities, basis)
    curvature = (curvature - pb[..., :, None] * pb[..., None, :]) * w[..., None, None]
    n, m, r, _ = curvature.shape
    p = x.shape[1]

    def gram(row_weights: Tensor) -> Tensor:
        """``Σ_i v_i(m) x_i x_iᵀ``, ``(M, p, p)``, as one product for all learners."""
        scaled = (row_weights.mT[:, None] * x.mT).reshape(m * p, n)
        return matmul(scaled, x).reshape(m, p, p)

    hessian = torch.empty(m, r, p, r, p, dtype=x.dtype, device=x.device)
    for a in range(r):
        for b in range(a, r):
            block = gram(curvature[:, :, a, b])
            hessian[:, a, :, b] = block
            hessian[:, b, :, a] = block.mT
    flat = (m, r * p, r * p)
    return NewtonSums(gradient.reshape(flat[:2]), hessian.reshape(flat), gram(w), w.sum(0))


def newton_step(net: Dense, params: Params, sums: NewtonSums, ridge: float) -> Params:
    """A damped Newton step, ``β ← β - τ (H + ridge·I)⁻¹ (g + ridge·β)``, for every learner with weight.

    Logistic loss is self-concordant in the logits: with ``δ`` the root mean square change of the
    logits that a full step would make, ``τ = log(1 + δ) / δ`` keeps it from overshooting where the
    curvature has died away, and tends to one as the steps get small.

    The bias is not penalised beyond what keeps the system solvable: a column without spread, or a
    learner that no row belongs to, has no curvature of its own.
    """
    weight, bias = params["0.weight"].double(), params["0.bias"].double()
    m, k, d = weight.shape
    basis = contrasts(k).to(weight.device)
    beta = (basis.mT @ torch.cat([weight, bias[..., None]], dim=-1)).reshape(m, -1)
    penalty = torch.full((k - 1, d + 1), ridge, dtype=torch.float64, device=weight.device)
    penalty[:, -1] = min(ridge, 1e-3)
    penalty = penalty.reshape(-1).clamp_min(_SMALLEST_RIDGE)
    system = sums.hessian + torch.diag(penalty)
    direction = solve(system, sums.gradient + penalty * beta)
    moves = direction.reshape(m, k - 1, d + 1)
    squares = torch.einsum("mrp,mpq,mrq->m", moves, sums.second, moves).clamp_min(0.0)
    change = (squares / sums.weight.clamp_min(1e-9)).sqrt().clamp_min(1e-12)
    damping = (torch.log1p(change) / change)[:, None]
    alive = (sums.weight > 1e-9)[:, None] & torch.isfinite(direction).all(-1, keepdim=True)
    beta = torch.where(alive, beta - damping * direction, beta)
    logits = basis @ beta.reshape(m, k - 1, d + 1)
    dtype = params["0.weight"].dtype
    return {"0.weight": logits[..., :d].to(dtype), "0.bias": logits[..., d].to(dtype)}
