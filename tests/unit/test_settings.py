"""memory_fraction, memory_limit_mb, allow_growth and device_count of a strategy."""

import pytest

from duoka.devices.device import Device
from duoka.devices.probe import Inventory
from duoka.devices.settings import Settings, keep_first_gpus, limit_devices, read_settings
from duoka.devices.virtual import choose, cut
from duoka.errors import DeviceError
from duoka.runtime.environment import memory_variables
from duoka.runtime.plan import Plan

CPU = Device("cpu", 0, total_mb=8000)
CARDS = Inventory((Device("gpu", 0, total_mb=1000), Device("gpu", 1, total_mb=1000), CPU))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"memory_fraction": 0}, "above 0, and at most 1"),
        ({"memory_fraction": 1.01}, "above 0, and at most 1"),
        ({"memory_fraction": -0.5}, "above 0, and at most 1"),
        ({"memory_fraction": float("nan")}, "above 0, and at most 1"),
        ({"memory_fraction": True}, "above 0, and at most 1"),
        ({"memory_fraction": "0.8"}, "above 0, and at most 1"),
        ({"memory_fraction": 0.8, "memory_limit_mb": 100}, "are given together"),
        ({"memory_limit_mb": 0}, "whole number from 1"),
        ({"memory_limit_mb": 10.5}, "whole number from 1"),
        ({"device_count": {"GPU": -1}}, "device_count['GPU']=-1"),
        ({"device_count": {"CPU": 0}}, "device_count['CPU']=0"),
        ({"device_count": {"TPU": 1}}, "the kinds are GPU and CPU"),
        ({"device_count": {"GPU": 1, "gpu": 2}}, "each once"),
        ({"device_count": {0: 1}}, "the kinds are GPU and CPU"),
        ({"device_count": 4}, "devices=4 is the number of workers"),
    ],
)
def test_what_cannot_be_meant_is_an_error(given, words):
    with pytest.raises(DeviceError) as caught:
        read_settings(**given)
    assert words in str(caught.value)


def test_kinds_are_read_in_upper_and_lower_case_and_no_gpus_can_be_meant():
    assert read_settings(device_count={"gpu": 0, "Cpu": 56}) == Settings(num_gpus=0, num_cpus=56)
    assert read_settings(memory_fraction=1) == Settings(memory_fraction=1.0)


def test_the_first_gpus_count_and_the_others_are_as_if_not_here():
    kept = keep_first_gpus(CARDS, 1)
    assert [device.name for device in kept.devices] == ["gpu:0", "cpu:0"]
    assert [device.name for device in choose(None, kept).devices] == ["gpu:0"]
    assert choose(["gpu:1"], kept).notes == ("gpu:1 is not here: cpu:0/v0, a virtual CPU device, takes its place",)
    assert keep_first_gpus(CARDS, None) is CARDS


def test_more_gpus_than_there_are_is_said():
    assert keep_first_gpus(CARDS, 3).notes == ('device_count={"GPU": 3}: 2 GPUs here',)


def test_a_limit_holds_on_every_device():
    limited = limit_devices(choose(2, CARDS).devices, Settings(memory_limit_mb=300))
    assert [device.memory_limit_mb for device in limited] == [300, 300]


def test_a_fraction_is_of_the_device_s_own_memory():
    def limits(devices):
        return [device.memory_limit_mb for device in limit_devices(devices, Settings(memory_fraction=0.8))]

    assert limits([CPU]) == [6400]
    assert limits(cut(CPU, 2)) == [3200, 3200], "of a half each"
    assert limits(cut(CPU, memory_mb=[1000, 500])) == [800, 400]


def test_limits_that_contradict_one_another_or_the_device_are_errors():
    with pytest.raises(DeviceError, match="has a limit of 500 MB already"):
        limit_devices(cut(CPU, memory_mb=[500]), Settings(memory_limit_mb=300))
    with pytest.raises(DeviceError, match="2 workers would take 10000 MB"):
        limit_devices(cut(CPU, 2), Settings(memory_limit_mb=5000))
    with pytest.raises(DeviceError, match="cannot be worked out"):
        limit_devices([Device("gpu", 0)], Settings(memory_fraction=0.5))


def test_a_card_s_limits_are_in_the_environment_of_its_worker_and_a_cpu_has_none():
    limited = limit_devices(CARDS.devices[1:], Settings(memory_limit_mb=250))
    card, cpu = (Plan((device,), 1, 1, allow_growth=True) for device in limited)
    assert memory_variables(card, 0) == {
        "TF_FORCE_GPU_ALLOW_GROWTH": "true",
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.2500",
    }
    assert memory_variables(cpu, 0) == {}


def test_the_plan_that_a_worker_reads_has_the_settings():
    plan = Plan((Device("cpu", memory_limit_mb=5),), 1, 1, allow_growth=False, logical_cpus=4)
    assert Plan.from_json(plan.to_json()) == plan
    assert plan.needs_supervisor
    assert Plan((CPU,), 1, 1, hides_cards=True).needs_supervisor
    assert not Plan((CPU,), 1, 1).needs_supervisor
