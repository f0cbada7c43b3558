"""Where tensors live and in which precision the heavy products run."""

from __future__ import annotations

import platform
from typing import Any

import torch

_MEMORY_SHARE = 0.4
_smaller_shares: dict[torch.device, float] = {}  # of devices whose memory ran out in this training

_DTYPES = {"float32": torch.float32, "float64": torch.float64}


def resolve_device(name: str) -> torch.device:
    """A torch device from its name, or from ``"auto"``: a CUDA card if there is one, else the CPU."""
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
    """``"float64"`` or ``"float32"`` as a torch dtype."""
    if name not in _DTYPES:
        raise ValueError(f"dtype must be one of {sorted(_DTYPES)}, got {name!r}.")
    return _DTYPES[name]


def accelerator_memory(device: torch.device) -> int:
    """Bytes that training may use on an accelerator: a share of all, so that every run does the same.

    Where others use the same device, that may be too much: see :func:`use_less_memory`.
    """
    return int(_smaller_shares.get(device, _MEMORY_SHARE) * _total_memory(device))


def use_less_memory(device: torch.device) -> None:
    """Halve what this training may use on an accelerator."""
    _smaller_shares[device] = _smaller_shares.get(device, _MEMORY_SHARE) / 2


def forget_smaller_shares() -> None:
    """Another training begins, whose needs are others."""
    _smaller_shares.clear()


def _total_memory(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).total_memory)


def what_ran_out(error: Exception) -> str:
    """The sentences of torch's error about memory that are for users; the rest is for its developers."""
    return ". ".join(str(error).split(". ")[:2])


def environment() -> dict[str, Any]:
    """What a figure depends on: versions and the processor."""
    from importlib.metadata import version

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
