"""From options to a method: the network, the method, and a pretrained learner to start from."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from numpy.typing import NDArray

from fedgmm.core.params import Params
from fedgmm.core.server_optimisers import ServerOptimiser
from fedgmm.methods.base import DENSITY, AnyMethod
from fedgmm.methods.clustered import ClusteredFL
from fedgmm.methods.fedgmm import FedAvgPlus, FedGMM, without_density
from fedgmm.methods.gmm import FederatedGMM
from fedgmm.methods.local import Local
from fedgmm.methods.local_training import LocalTraining
from fedgmm.methods.pfedme import PFedMe
from fedgmm.nets.devices import resolve_dtype
from fedgmm.nets.networks import Dense, Network, function_of, network
from fedgmm.nets.sgd import SGD
from fedgmm.nets.stacked import Stacked
from fedgmm.training.options import TrainingOptions

_WITH_EXACT_STEPS = ("fedgmm", "fedem", "fedavg", "fedavg+")


def learner_network(
    options: TrainingOptions, input_shape: tuple[int, ...], classes: NDArray[Any]
) -> Network:
    """Return the learners' network; options that do not suit the inputs or classes raise ``ValueError``."""
    if not len(classes) and options.personal_labels is True:
        raise ValueError("personal_labels is for classes; leave it out for regression.")
    if len(classes) == 1 and options.algorithm != DENSITY:
        raise ValueError(
            f"The data have only one class ({classes.tolist()[0]!r}); classification needs two."
        )
    if options.augment and len(input_shape) != 3:
        raise ValueError(f"augment=True requires image inputs, got shape {input_shape}.")
    compute = torch.bfloat16 if options.precision == "mixed" else None
    return network(options.learner, input_shape, len(classes), compute, options.seed)


def pretrained_learner(options: TrainingOptions, net: Network) -> Params | None:
    """Return the learner that training starts from, ``(...)``, if a file of weights is given."""
    if options.pretrained is None:
        return None
    if not isinstance(net, Stacked):
        raise ValueError(
            f"pretrained={options.pretrained!r} needs learner='mobilenet', got {options.learner!r}."
        )
    generator = torch.Generator().manual_seed(options.seed)
    return net.pretrained(Path(options.pretrained), generator)


def build_warm_up(options: TrainingOptions, net: Network) -> AnyMethod:
    """Return FedAvg with the same options, for the rounds of the warm-up."""
    return build(replace(options, algorithm="fedavg", solver="sgd"), net)


def build(options: TrainingOptions, net: Network) -> AnyMethod:
    """Return the method that the options describe."""
    sgd = SGD(
        lr=options.lr,
        momentum=options.momentum,
        weight_decay=options.weight_decay,
        clip_norm=options.clip_norm,
        proximal=options.proximal if options.algorithm == "fedprox" else 0.0,
        batch_size=options.batch_size,
        epochs=options.local_epochs,
        augment=options.augment,
    )
    dtype = resolve_dtype(options.dtype)
    words: Any = options  # mypy does not know that the texts were checked
    training = LocalTraining(net, sgd, words.schedule, options.rounds, options.seed, dtype)
    server_lr = options.server_lr or (0.01 if options.server == "adam" else 1.0)
    server = ServerOptimiser(words.server, server_lr, options.server_momentum)
    components, learners = options.sizes
    start = words.start
    if start == "auto":  # one Gaussian gives no learner rows of its own
        start = "tied" if options.algorithm == "fedgmm" and components > 1 else "random"
    density = FederatedGMM(components, words.covariance_type, words.aggregation)
    mixture = FedGMM(
        training,
        learners,
        replace(density, reg_covar=options.reg_covar, dtype=dtype),
        start=start,
        solver=solver_of(options, net),
        ridge=options.ridge,
        independence=options.independence,
        server=server,
    )
    match options.algorithm:
        case "fedgmm":
            return mixture
        case "gmm":
            # one learner of one class has log P(y|x) = 0, so there is nothing to learn
            nothing = replace(training, sgd=replace(sgd, epochs=0))
            return replace(mixture, training=nothing, learners=1, solver="sgd", start="random")
        case "fedem":
            return without_density(mixture, learners)
        case "fedavg" | "fedprox":
            return without_density(mixture, 1)
        case "fedavg+":
            average = vars(without_density(mixture, 1))
            return FedAvgPlus(**average, tuning_epochs=options.finetune_epochs)
        case "local":
            return Local(training)
        case "clustered":
            return ClusteredFL(training, server=server)
        case _:
            return PFedMe(
                training, options.penalty, options.inner_steps, mixing=options.mixing, server=server
            )


def solver_of(options: TrainingOptions, net: Network) -> Any:
    """Return the solver of a method's learners, ``"sgd"`` or ``"newton"``."""
    net = function_of(net)
    if not isinstance(net, Dense) or net.hidden:
        if options.solver == "newton":
            raise ValueError("solver='newton' is exact for linear learners only; use solver='sgd'.")
        return "sgd"
    if options.solver == "auto":
        # an exact step solves a system of (K-1)(d+1) unknowns for every learner
        small = max(1, net.classes - 1) * (net.columns + 1) <= 1000
        return "newton" if small and options.algorithm in ("fedgmm", "fedem") else "sgd"
    return options.solver if options.algorithm in _WITH_EXACT_STEPS else "sgd"
