from __future__ import annotations

import pytest
import torch

from fedgmm.nets.devices import resolve_device, resolve_dtype


def test_cpu_and_auto_are_devices():
    assert resolve_device("cpu") == torch.device("cpu")
    expected = "cuda" if torch.cuda.is_available() else "cpu"
    assert resolve_device("auto").type == expected


@pytest.mark.parametrize("name", ["gpu", "cuda:99", ""])
def test_an_unavailable_device_is_refused(name):
    with pytest.raises(ValueError, match="device"):
        resolve_device(name)


def test_dtypes():
    assert resolve_dtype("float32") is torch.float32
    assert resolve_dtype("float64") is torch.float64
    with pytest.raises(ValueError, match="float16"):
        resolve_dtype("float16")
