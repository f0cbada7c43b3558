"""Devices, dtypes and memory budgets."""

from __future__ import annotations

import platform
from importlib.metadata import version
from typing import Any

import torch

_MEMORY_SHARE = 0.4
_smaller_shares: dict[torch.device, float] = {}  # devices that ran out of memory in this run

_DTYPES = {"float32": torch.float32, "float64": torch.float64}


def resolve_device(name: str) -> torch.device:
    """Return a torch device by name; ``"auto"`` is a CUDA GPU if there is one, else the CPU."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, TypeError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(
            f"device={name!r} cannot be used here ({reason}); use 'cpu', 'cuda' or 'auto'."
        ) from None
    return device


def resolve_dtype(name: str) -> torch.dtype:
    """Return the torch dtype ``"float64"`` or ``"float32"``."""
    if name not in _DTYPES:
        raise ValueError(f"dtype must be one of {sorted(_DTYPES)}, got {name!r}.")
    return _DTYPES[name]


def accelerator_memory(device: torch.device) -> int:
    """Return the number of bytes that training may use on an accelerator.

    This is a fixed share of the device's total memory, so that every run forms the same groups of
    clients. If other programs use the device it may be too much: see :func:`use_less_memory`.
    """
    return int(_smaller_shares.get(device, _MEMORY_SHARE) * _total_memory(device))


def use_less_memory(device: torch.device) -> None:
    """Halve the memory that this training run may use on an accelerator."""
    _smaller_shares[device] = _smaller_shares.get(device, _MEMORY_SHARE) / 2


def reset_memory_shares() -> None:
    """Restore the default memory budgets before another training run."""
    _smaller_shares.clear()


def _total_memory(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).total_memory)


def out_of_memory_reason(error: Exception) -> str:
    """Return the first two sentences of torch's out-of-memory error; the rest is for torch's developers."""
    return ". ".join(str(error).split(". ")[:2])


def environment() -> dict[str, Any]:
    """Return the versions and the hardware that a result depends on."""
    from fedgmm import __version__

    return {
        "fedgmm": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": version("numpy"),
        "scipy": version("scipy"),
        "scikit-learn": version("scikit-learn"),
        "machine": platform.machine(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "threads": torch.get_num_threads(),
    }
