"""Processes forked from one that has imported everything, because imports take most of their time."""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from pathlib import Path

import numpy as np

from fedgmm.training.checkpoint import Checkpoint
from fedgmm.training.in_process import train
from supervised import federation

IMPORTS = [
    *("fedgmm.cli.runs", "fedgmm.runs.fitting", "fedgmm.training.distributed"),
    *("safetensors.torch", "sklearn.cluster", "sklearn.metrics"),
]

forks = multiprocessing.get_context("forkserver" if hasattr(os, "fork") else None)
"""Starts processes, with the interface of ``multiprocessing``."""

if hasattr(os, "fork"):
    forks.set_forkserver_preload(IMPORTS)


def command(arguments: list[str], environment: dict[str, str], log: Path) -> None:
    """Run a command of fedgmm; its output goes into a file."""
    from fedgmm.cli import main

    os.environ |= environment
    sys.argv = ["fedgmm", *arguments]
    with log.open("w", encoding="utf-8") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.exit(main())


def slow_training(path: Path, algorithm: str, options: dict, pause: bool) -> None:
    """Train with a checkpoint; with ``pause``, the ninth round comes after a minute."""
    rounds = []

    def wait(entry):
        rounds.append(entry)
        if len(rounds) == 8 and pause:
            time.sleep(60)
        time.sleep(0.002)

    data = five_clients()
    train(data, algorithm, checkpoint=Checkpoint(path, 1), on_round=[wait], **options)


def five_clients():
    """Return the data of :func:`slow_training`."""
    return federation(np.random.default_rng(5), sizes=(20, 40, 17, 26, 9))
