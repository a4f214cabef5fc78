"""Names of devices are understood in every dialect, and a wrong one gets an error that helps."""

import json

import pytest

from duoka.devices.device import Device, Holder
from duoka.devices.names import DeviceName, parse
from duoka.errors import DeviceError

HERE = [Device("gpu", 0), Device("gpu", 1), Device("cpu", 0)]


@pytest.mark.parametrize(
    "text",
    [
        "gpu:0",
        "/gpu:0",
        "/device:GPU:0",
        "GPU:0",
        "cuda:0",
        "gpu(0)",
        " Cuda:0 ",
        "device:gpu:0",
        "gpu",
        "cuda",
    ],
)
def test_every_dialect_for_the_first_gpu_means_gpu_0(text):
    assert parse(text) == DeviceName("gpu", 0, None)


@pytest.mark.parametrize("text", ["cpu", "cpu:0", "/cpu:0", "CPU:0", "/device:CPU:0", "cpu(0)"])
def test_every_dialect_for_the_cpu_means_cpu_0(text):
    assert parse(text) == DeviceName("cpu", 0, None)


def test_a_full_tensorflow_name_of_this_process_means_its_device():
    assert str(parse("/job:localhost/replica:0/task:0/device:GPU:1")) == "gpu:1"
    assert str(parse("/job:localhost/replica:0/task:0/gpu:1")) == "gpu:1"
    assert str(parse("/task:0/device:CPU:0")) == "cpu:0"


@pytest.mark.parametrize("text", ["/job:worker/replica:0/task:0/device:GPU:1", "/job:localhost/task:3/gpu:1"])
def test_a_tensorflow_name_of_another_task_is_not_taken_for_a_card_here(text):
    with pytest.raises(DeviceError, match="another process"):
        parse(text)


def test_the_name_of_a_virtual_device_is_read_back():
    for device in [
        Device("cpu", 0, virtual=2),
        Device("gpu", 3, virtual=0),
        Device("gpu", 11),
    ]:
        assert parse(device.name) == DeviceName(device.kind, device.index, device.virtual)
    assert Device("cpu", 0, virtual=2).name == "cpu:0/v2"


@pytest.mark.parametrize("text", ["mps", "mps:0", "xpu:0", "/device:TPU:0", "hpu(1)", "vulkan:0"])
def test_a_kind_that_duoka_cannot_compute_on_is_refused_by_name(text):
    with pytest.raises(DeviceError, match="CPUs and NVIDIA GPUs") as caught:
        parse(text, [Device("vulkan", 0), Device("cpu", 0)])
    assert text in caught.value.what and caught.value.do.endswith("Here are: cpu:0.")


@pytest.mark.parametrize(
    "text",
    ["gpu:x", "gpuu:0", "gpu:-1", "gpu0", "", "0", "/", "gpu:0:1", "gpu:0/2", "gpu(0", "gpu:٣", "gpu:1.0"],
)
def test_a_wrong_name_gets_an_error_that_lists_what_is_here(text):
    with pytest.raises(DeviceError) as caught:
        parse(text, HERE)
    assert repr(text) in caught.value.what
    assert "gpu:0, gpu:1, cpu:0" in str(caught.value)
    assert caught.value.why and caught.value.do


def test_a_number_is_not_a_name_and_the_error_says_which_name_to_write():
    with pytest.raises(DeviceError, match="'gpu:3'"):
        parse(3)


def test_a_device_survives_the_way_through_json_with_all_that_is_known_about_it():
    device = Device(
        "gpu",
        0,
        virtual=1,
        memory_limit_mb=1024,
        title="NVIDIA A100",
        physical_index=3,
        uuid="GPU-1",
        total_mb=40960,
        free_mb=40000,
        holders=(Holder(7, "python", 512), Holder(8, "unknown", None)),
    )
    back = Device.from_json(json.loads(json.dumps(device.to_json(), allow_nan=False)))
    assert back == device
    assert back.to_json() == device.to_json()
    assert back.holders == ((7, "python", 512), (8, "unknown", None))


def test_devices_are_equal_by_place_and_limit_and_not_by_what_is_known_about_them():
    assert Device("cpu", 0, free_mb=1) == Device("cpu", 0, free_mb=2)
    assert Device("cpu", 0, virtual=0) != Device("cpu", 0)
    assert Device("cpu", 0, virtual=0, memory_limit_mb=1) != Device("cpu", 0, virtual=0)
