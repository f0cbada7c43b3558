"""Server optimisers: the server's step towards the clients' average.

The average minus the current parameters is a pseudo-gradient; the optimiser decides the step. While the
clients' learning rate falls, their moves get smaller, but moving averages still hold older, larger moves.
So the server stores moves divided by the present share of the rate, and multiplies its own step by it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

import torch

from fedgmm.core.params import Params, is_statistic

ServerKind = Literal["average", "momentum", "adam"]
SERVER_KINDS: tuple[str, ...] = get_args(ServerKind)


@dataclass(frozen=True)
class ServerState:
    """Moving averages of the pseudo-gradient and of its square, and the number of steps."""

    first: Params = field(default_factory=dict)
    second: Params = field(default_factory=dict)
    steps: int = 0


@dataclass(frozen=True)
class ServerOptimiser:
    """Settings of the server's step."""

    # ``"average"`` takes the average as it is; ``"momentum"`` and ``"adam"`` treat the difference
    # to it as a gradient
    kind: ServerKind = "average"
    lr: float = 1.0  # step size; for ``"adam"`` 0.01 is a good start
    momentum: float = 0.9  # decay of the first average
    decay: float = 0.99  # decay of the second average
    floor: float = 1e-3  # smallest denominator of Adam

    def step(
        self, current: Params, average: Params, state: ServerState, share: float = 1.0
    ) -> tuple[Params, ServerState]:
        """Return new parameters and the new state of the moving averages.

        ``current``, ``(M, ...)``, are the parameters that clients started from, and ``average`` is
        their average after local training. ``share`` is the clients' learning rate in this round,
        as a share of the full one.
        """
        if self.kind == "average":
            if self.lr == 1.0:
                return {name: average[name].to(old.dtype) for name, old in current.items()}, state
            share = 1.0  # without moving averages no older rate plays a part
        moved, first, second = {}, {}, {}
        for name, value in current.items():
            if is_statistic(name):  # a step could overshoot a variance below zero
                moved[name] = average[name].to(value.dtype)
                continue
            delta = (average[name].double() - value.double()) / share
            past = state.first.get(name, torch.zeros_like(delta))
            match self.kind:
                case "average":
                    step = delta
                case "momentum":
                    step = first[name] = self.momentum * past + delta
                case _:
                    first[name] = self.momentum * past + (1.0 - self.momentum) * delta
                    squares = state.second.get(name, torch.zeros_like(delta))
                    second[name] = self.decay * squares + (1.0 - self.decay) * delta.square()
                    step = first[name] / (second[name].sqrt() + self.floor)
            moved[name] = (value.double() + share * self.lr * step).to(value.dtype)
        return moved, ServerState(first, second, state.steps + 1)
