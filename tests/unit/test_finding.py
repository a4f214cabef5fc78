"""`duoka.device(name)`: which device a name leads to."""

import pytest

from duoka.devices.device import Device
from duoka.devices.finding import find_place
from duoka.devices.virtual import cut
from duoka.errors import DeviceError

CPU = Device("cpu", 0, cores=2)
CARDS = [Device("gpu", 0), Device("gpu", 1), CPU]


NAMES = ["gpu:1", "/gpu:1", "cuda:1", "gpu(1)", "/device:GPU:1", "/job:localhost/task:0/GPU:1"]


@pytest.mark.parametrize("name", NAMES)
def test_every_dialect_leads_to_the_same_card(name):
    place = find_place(name, CARDS)
    assert (place.device.name, place.note) == ("gpu:1", "")


def test_what_is_not_here_runs_on_the_cpu_and_is_named():
    place = find_place("/gpu:7", CARDS)
    assert place.device == CPU
    assert place.note == "gpu:7 is not here: what is placed there runs on cpu:0"


def test_without_soft_placement_it_is_an_error_that_lists_what_is_here():
    with pytest.raises(DeviceError, match="gpu:7 is not here") as caught:
        find_place("/gpu:7", CARDS, soft_placement=False)
    assert "Here are: gpu:0, gpu:1, cpu:0." in caught.value.do


def test_a_logical_device_with_the_name_of_the_whole_is_listed_once():
    with pytest.raises(DeviceError) as caught:
        find_place("/gpu:7", [CPU, Device("cpu", 0), Device("cpu", 1)], soft_placement=False)
    assert "Here are: cpu:0, cpu:1." in caught.value.do


def test_a_worker_finds_its_own_device_by_any_of_its_names():
    own = Device("gpu", 1)
    assert find_place("cuda:1", CARDS, own).device is own
    half = cut(Device("gpu", 1), 2)[1]
    assert find_place("gpu:1", CARDS, half).device is half
    assert find_place("gpu:1/v1", CARDS, half).device is half


def test_a_worker_may_use_the_cpu_beside_its_card():
    place = find_place("/cpu:0", CARDS, Device("gpu", 1))
    assert (place.device, place.note) == (CPU, "")


OTHERS = [(Device("gpu", 1), "/gpu:0"), (cut(CPU, 2)[1], "cpu:0/v0"), (cut(Device("gpu"), 2)[0], "gpu:0/v1")]


@pytest.mark.parametrize(("own", "name"), OTHERS)
def test_the_device_of_another_worker_means_the_worker_s_own(own, name):
    place = find_place(name, CARDS, own)
    assert place.device is own
    assert f"is not this worker's device: what is placed there runs on {own}" in place.note
    with pytest.raises(DeviceError, match="is not this worker's device") as caught:
        find_place(name, CARDS, own, soft_placement=False)
    assert own.name in caught.value.do


def test_what_is_nowhere_runs_on_the_cpu_of_a_worker():
    assert find_place("gpu:9", CARDS, Device("gpu", 1)).device == CPU
    own = cut(CPU, 2)[1]
    assert find_place("gpu:0", [CPU], own).device is own


def test_a_name_that_is_none_is_an_error_even_with_soft_placement():
    for name in ("gpu:x", "", "card:0", 3):
        with pytest.raises(DeviceError, match="is not the name of a device"):
            find_place(name, CARDS)
