from __future__ import annotations

import pytest

from duoka.devices.device import Device
from duoka.errors import DeviceError
from duoka.frameworks.unseen import refuse_unseen


@pytest.mark.parametrize("framework", ["torch", "tensorflow", "jax"])
def test_a_gpu_that_the_framework_cannot_use_is_an_error_with_the_reason(framework):
    devices = pytest.importorskip(f"duoka.frameworks.{framework}.devices")
    count, reason = devices.count_gpus()
    if count:
        pytest.skip("there is a GPU here")
    with pytest.raises(DeviceError, match="does not see gpu:0") as caught:
        refuse_unseen(framework, Device("gpu", 0))
    assert reason in str(caught.value) and "CUDA_VISIBLE_DEVICES=-1" in str(caught.value)
    refuse_unseen(framework, Device("cpu", 0))


def test_a_cuda_that_does_not_start_is_told_from_a_build_without_one(monkeypatch):
    torch = pytest.importorskip("torch")
    from duoka.frameworks.torch import devices

    monkeypatch.setattr(torch.version, "cuda", "12.4")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(devices, "count_gpus", devices.count_gpus.__wrapped__)
    with pytest.raises(DeviceError, match=r"CUDA 12\.4 does not start"):
        refuse_unseen("torch", Device("gpu", 0))
