"""Exact steps of linear learners, from sums over rows and over clients.

Newton steps for classes, and least squares for numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedgmm.core.params import NOISE, Params
from fedgmm.support.linalg import matmul, solve

_MANY_CLASSES = 16  # above, no array has K² numbers per row; not tuned for speed
_SMALLEST_RIDGE = 1e-9


@dataclass(frozen=True)
class NewtonSums:
    """Gradient and Hessian of the weighted cross-entropy of ``M`` linear learners.

    Both are sums over rows and over clients. Coordinates are contrasts of the classes: logits are
    ``contrasts(K) @ β``, so two classes need one coordinate, and no coordinate is redundant.
    """

    gradient: Tensor  # ``(M, (K-1)·p)`` with ``p = columns + 1``
    hessian: Tensor  # ``(M, (K-1)·p, (K-1)·p)``
    second: Tensor  # ``Σ_i w_i(m) x_i x_iᵀ``, ``(M, p, p)``; bounds how far a step moves the logits
    weight: Tensor  # ``Σ_i w_i(m)``, ``(M,)``


def contrasts(classes: int) -> Tensor:
    """Return an orthonormal basis ``(K, K-1)`` of the logits that sum to zero."""
    helmert: Tensor = torch.zeros(classes, classes - 1, dtype=torch.float64)
    for k in range(1, classes):
        helmert[:k, k - 1] = 1.0
        helmert[k, k - 1] = -float(k)
    lengths: Tensor = torch.linalg.vector_norm(helmert, dim=0)
    return helmert / lengths


def newton_sums(logits: Tensor, inputs: Tensor, labels: Tensor, weights: Tensor) -> NewtonSums:
    """Return gradient and Hessian of ``Σ_i w_i(m) CE_i(θ_m)`` on a block of rows.

    ``logits`` of the current learners are ``(n, M, K)``; ``inputs`` are ``(n, d)``,
    ``labels`` ``(n,)``, and ``weights`` ``w_i(m)``, ``(n, M)``.
    """
    classes = logits.shape[-1]
    x = _with_constant(inputs)
    basis = contrasts(classes).to(x.device)
    probabilities = torch.softmax(logits.double(), dim=-1)
    truth = torch.nn.functional.one_hot(labels, classes).double()
    w = weights.double()
    # ∂CE/∂β = Bᵀ (p - y) xᵀ
    error = (probabilities - truth[:, None]) @ basis * w[..., None]
    gradient = error.flatten(1).mT @ x
    # ∂²CE/∂β² = Bᵀ (diag p - p pᵀ) B ⊗ x xᵀ
    pb = probabilities @ basis
    m, r, p = logits.shape[1], classes - 1, x.shape[1]
    if classes > _MANY_CLASSES:  # the same without K² numbers per row
        spread = _gram(x, (probabilities * w[..., None]).flatten(1)).reshape(m, classes, p, p)
        z = (pb[..., None] * x[:, None, None]).flatten(2).transpose(0, 1)
        outer = (z * w.mT[..., None]).mT @ z
        hessian = (
            torch.einsum("kr,mkpq,ks->mrpsq", basis, spread, basis).reshape(outer.shape) - outer
        )
        return NewtonSums(gradient.reshape(m, r * p), hessian, _gram(x, w), w.sum(0))
    curvature = torch.einsum("kr,nmk,ks->nmrs", basis, probabilities, basis)
    curvature = (curvature - pb[..., :, None] * pb[..., None, :]) * w[..., None, None]
    hessian = torch.empty(m, r, p, r, p, dtype=x.dtype, device=x.device)
    for a in range(r):
        for b in range(a, r):
            block = _gram(x, curvature[:, :, a, b])
            hessian[:, a, :, b] = block
            hessian[:, b, :, a] = block.mT
    flat = (m, r * p, r * p)
    return NewtonSums(gradient.reshape(flat[:2]), hessian.reshape(flat), _gram(x, w), w.sum(0))


def newton_step(params: Params, sums: NewtonSums, ridge: float, bias_ridge: float = 1e-3) -> Params:
    """Return the learners after a damped step, ``β ← β - τ (H + ridge·I)⁻¹ (g + ridge·β)``.

    Logistic loss is self-concordant in the logits. With ``δ`` the root mean square change of the
    logits that a full step would make, ``τ = log(1 + δ) / δ`` keeps the step from overshooting
    where the curvature has died away, and tends to one as the steps get small.

    By default the bias is penalised just enough to keep the system solvable, because a column
    without spread, or a learner without rows, has no curvature of its own. ``bias_ridge`` above
    ``ridge`` has no effect. A learner without rows keeps its parameters.

    ``params`` are ``0.weight`` ``(M, K, d)`` and ``0.bias`` ``(M, K)``; ``sums`` run over the rows
    of all clients.
    """
    weight, bias = params["0.weight"].double(), params["0.bias"].double()
    m, k, d = weight.shape
    basis = contrasts(k).to(weight.device)
    beta = (basis.mT @ torch.cat([weight, bias[..., None]], dim=-1)).reshape(m, -1)
    penalty = torch.full((k - 1, d + 1), ridge, dtype=torch.float64, device=weight.device)
    penalty[:, -1] = min(ridge, bias_ridge)
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


# ---------------------------------------------------------------------- numbers


@dataclass(frozen=True)
class LeastSquaresSums:
    """Sums of ``M`` linear learners of numbers, around the learners as they are.

    They run over rows and over clients, with the residuals ``r_i(m) = y_i - f_θm(x_i)`` and a
    constant one behind each ``x_i``.
    """

    gradient: Tensor  # ``Σ_i w_i(m) r_i(m) x_i``, ``(M, p)`` with ``p = columns + 1``
    second: Tensor  # ``Σ_i w_i(m) x_i x_iᵀ``, ``(M, p, p)``
    squares: Tensor  # ``Σ_i w_i(m) r_i(m)²``, ``(M,)``
    weight: Tensor  # ``Σ_i w_i(m)``, ``(M,)``


def least_squares_sums(
    outputs: Tensor, inputs: Tensor, labels: Tensor, weights: Tensor
) -> LeastSquaresSums:
    """Return the sums of a block of rows.

    ``outputs`` are ``(n, M, ...)`` with ``f_θm(x_i)`` first along the last axis; ``inputs`` are
    ``(n, d)``, ``labels`` ``(n,)``, and ``weights`` ``w_i(m)``, ``(n, M)``.
    """
    x, w = _with_constant(inputs), weights.double()
    residuals = labels.double()[:, None] - outputs[..., 0].double()
    weighted = w * residuals
    return LeastSquaresSums(weighted.mT @ x, _gram(x, w), (weighted * residuals).sum(0), w.sum(0))


def least_squares_step(params: Params, sums: LeastSquaresSums, ridge: float) -> Params:
    """Return the learners that minimise ``Σ_i w_i(m) (y_i - f_θm(x_i))² + ridge ‖W_m‖²``, and ``σ²_m``.

    ``β ← β + δ`` with ``δ = (Σ w x xᵀ + ridge·I)⁻¹ (Σ w r x - ridge·β)``, and
    ``σ²_m = Σ w (r - δᵀx)² / Σ w``. The bias is not penalised. A learner without rows keeps its
    parameters. ``params`` are ``0.weight`` ``(M, 1, d)``, ``0.bias`` ``(M, 1)`` and ``σ²``
    ``(M,)``.
    """
    weight, bias = params["0.weight"].double(), params["0.bias"].double()
    beta = torch.cat([weight[:, 0], bias], dim=-1)
    penalty = torch.full_like(beta[0], max(ridge, _SMALLEST_RIDGE))
    penalty[-1] = _SMALLEST_RIDGE
    delta = solve(sums.second + torch.diag(penalty), sums.gradient - penalty * beta)
    alive = (sums.weight > 1e-9) & torch.isfinite(delta).all(-1)
    # Σ w (r - δᵀx)² = Σ w r² - 2 δᵀ Σ w r x + δᵀ (Σ w x xᵀ) δ
    curvature = torch.einsum("mp,mpq,mq->m", delta, sums.second, delta)
    squares = sums.squares - 2.0 * (delta * sums.gradient).sum(-1) + curvature
    variance = squares.clamp_min(0.0) / sums.weight.clamp_min(1e-9)
    beta = torch.where(alive[:, None], beta + delta, beta)
    variance = torch.where(alive, variance, params[NOISE].double())
    dtype = params["0.weight"].dtype
    return {
        "0.weight": beta[:, None, :-1].to(dtype),
        "0.bias": beta[:, -1:].to(dtype),
        NOISE: variance.to(dtype),
    }


def _with_constant(inputs: Tensor) -> Tensor:
    """Return inputs ``(n, ...)`` as float64 with a constant one behind them, ``(n, p)``."""
    x = inputs.flatten(1).double()
    return torch.cat([x, torch.ones(len(x), 1, dtype=x.dtype, device=x.device)], dim=1)


def _gram(x: Tensor, weights: Tensor) -> Tensor:
    """Return ``Σ_i v_i(m) x_i x_iᵀ``, ``(M, p, p)``, as one product; ``v`` are the weights, ``(n, M)``."""
    (n, p), m = x.shape, weights.shape[1]
    scaled = (weights.mT[:, None] * x.mT).reshape(m * p, n)
    return matmul(scaled, x).reshape(m, p, p)
