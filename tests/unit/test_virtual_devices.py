"""One device can be cut into several, and a run finds devices even where the cards it wants are missing."""

import numpy as np
import pytest

from duoka.devices.device import Device
from duoka.devices.probe import Inventory
from duoka.devices.virtual import choose, cut
from duoka.errors import DeviceError

CPU = Device("cpu", 0, cores=2, total_mb=8192)
GPUS = tuple(Device("gpu", index, total_mb=4096) for index in range(4))
NO_CARDS = Inventory((CPU,))
TWO_CARDS = Inventory((*GPUS[:2], CPU))
FOUR_CARDS = Inventory((*GPUS, CPU))


def names(choice):
    return [device.name for device in choice.devices]


def test_a_cpu_cut_in_four_gives_four_named_slices_without_a_limit():
    assert [part.name for part in cut(CPU, count=4)] == ["cpu:0/v0", "cpu:0/v1", "cpu:0/v2", "cpu:0/v3"]
    assert all(part.memory_limit_mb is None for part in cut(CPU, count=4))


def test_a_list_of_limits_says_how_many_slices_there_are():
    parts = cut(GPUS[0], memory_mb=[1024, 2048])
    assert [(part.name, part.memory_limit_mb) for part in parts] == [("gpu:0/v0", 1024), ("gpu:0/v1", 2048)]


def test_one_limit_holds_for_every_slice():
    assert [part.memory_limit_mb for part in cut(CPU, count=3, memory_mb=256)] == [256, 256, 256]
    assert [part.memory_limit_mb for part in cut(CPU, memory_mb=256)] == [256]


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"count": 0},
        {"count": -1},
        {"count": True},
        {"count": 2.0},
        {"count": "2"},
        {"count": 10**9},
        {"memory_mb": 0},
        {"memory_mb": []},
        {"memory_mb": [512, -1]},
        {"memory_mb": [512.5]},
        {"memory_mb": "512"},
        {"count": 3, "memory_mb": [512, 512]},
    ],
)
def test_a_cut_that_makes_no_sense_is_refused_with_a_reason(arguments):
    with pytest.raises(DeviceError) as caught:
        cut(CPU, **arguments)
    assert caught.value.why and caught.value.do


def test_limits_that_sum_above_the_memory_of_the_device_are_refused_with_both_numbers():
    with pytest.raises(DeviceError, match=r"6000 MB(.|\n)*4096 MB"):
        cut(GPUS[0], memory_mb=[3000, 3000])


def test_a_virtual_device_cannot_be_cut_again():
    with pytest.raises(DeviceError, match="cpu:0 into more"):
        cut(cut(CPU, count=2)[1], count=2)


def test_asking_for_nothing_takes_every_gpu_or_else_the_cpu():
    assert names(choose(None, TWO_CARDS)) == ["gpu:0", "gpu:1"]
    assert names(choose(None, NO_CARDS)) == ["cpu:0"]
    assert choose(None, NO_CARDS).notes == ()


def test_an_accelerator_of_another_kind_is_mentioned_when_nothing_is_asked_for():
    choice = choose(None, Inventory((Device("mps"), CPU)))
    assert names(choice) == ["cpu:0"]
    assert "mps:0 not used" in choice.notes[0]


@pytest.mark.parametrize("request_", [["mps:0"], "mps", Device("mps"), ["cpu", Device("mps")]])
def test_an_accelerator_of_another_kind_is_refused_even_where_it_exists(request_):
    with pytest.raises(DeviceError, match=r"mps.* cannot be used(.|\n)*CPUs and NVIDIA GPUs"):
        choose(request_, Inventory((Device("mps"), CPU)))


BROKEN = Inventory((CPU,), problems=("an NVIDIA driver is loaded, but does not answer: Driver/library mismatch",))


@pytest.mark.parametrize("request_", [1, 4, "4", ["gpu:0"], ["/gpu:0", "/gpu:1"]])
def test_cpu_devices_do_not_stand_in_for_a_gpu_that_does_not_work(request_):
    with pytest.raises(DeviceError, match="library mismatch") as caught:
        choose(request_, BROKEN)
    assert "CUDA_VISIBLE_DEVICES=-1" in caught.value.do and "virtual_devices" in caught.value.do


def test_what_the_cpu_was_named_for_runs_there_beside_a_gpu_that_does_not_work():
    assert names(choose(cut(CPU, count=2), BROKEN)) == ["cpu:0/v0", "cpu:0/v1"]
    assert names(choose(["cpu"], BROKEN)) == ["cpu:0"]


def test_asking_for_nothing_beside_a_gpu_that_does_not_work_takes_the_cpu_and_says_why():
    choice = choose(None, BROKEN)
    assert names(choice) == ["cpu:0"]
    assert choice.notes == BROKEN.problems


def test_a_gpu_that_works_is_used_beside_one_that_does_not():
    inventory = Inventory((GPUS[0], CPU), problems=("physical GPU 1 does not answer: GPU is lost",))
    assert names(choose(1, inventory)) == ["gpu:0"]
    with pytest.raises(DeviceError, match="GPU is lost"):
        choose(2, inventory)


def test_a_number_takes_the_first_cards():
    assert names(choose(3, FOUR_CARDS)) == ["gpu:0", "gpu:1", "gpu:2"]
    assert names(choose(np.int64(2), FOUR_CARDS)) == ["gpu:0", "gpu:1"]
    assert choose(3, FOUR_CARDS).notes == ()


@pytest.mark.parametrize("inventory", [NO_CARDS, TWO_CARDS])
def test_four_devices_where_four_cards_are_missing_are_virtual_cpu_devices_and_it_says_so(inventory):
    choice = choose(4, inventory)
    assert names(choice) == ["cpu:0/v0", "cpu:0/v1", "cpu:0/v2", "cpu:0/v3"]
    assert "4 virtual CPU devices" in choice.notes[0]


def test_without_soft_placement_missing_cards_are_an_error_that_lists_what_is_here():
    with pytest.raises(DeviceError, match="gpu:0, gpu:1, cpu:0"):
        choose(4, TWO_CARDS, soft_placement=False)
    with pytest.raises(DeviceError, match=r"gpu:2 and gpu:7(.|\n)*gpu:0, gpu:1, cpu:0"):
        choose(["gpu:0", "gpu:2", "gpu:7"], TWO_CARDS, soft_placement=False)


def test_one_device_without_a_card_is_simply_the_cpu():
    choice = choose(1, NO_CARDS)
    assert names(choice) == ["cpu:0"]
    assert choice.notes == ()


@pytest.mark.parametrize("request_", [0, -1, True, False, 2.0, "0", "-3", 10**6, object()])
def test_a_count_that_is_no_count_is_an_error(request_):
    with pytest.raises(DeviceError, match="cpu:0"):
        choose(request_, NO_CARDS)


def test_names_are_taken_in_the_order_given_in_any_dialect():
    assert names(choose(["/gpu:2", "cuda:0"], FOUR_CARDS)) == ["gpu:2", "gpu:0"]
    assert names(choose([GPUS[3], "cpu"], FOUR_CARDS)) == ["gpu:3", "cpu:0"]
    assert names(choose(GPUS[1], FOUR_CARDS)) == ["gpu:1"]


def test_text_from_a_command_line_is_a_number_or_names_with_commas():
    assert names(choose("gpu:0, gpu:2", FOUR_CARDS)) == ["gpu:0", "gpu:2"]
    assert names(choose("2", FOUR_CARDS)) == ["gpu:0", "gpu:1"]
    assert names(choose("cpu", FOUR_CARDS)) == ["cpu:0"]


def test_chosen_devices_keep_what_is_known_about_them_and_their_limits():
    assert choose("gpu:1", FOUR_CARDS).devices[0].total_mb == 4096
    parts = cut(CPU, memory_mb=[100, 200])
    assert [device.memory_limit_mb for device in choose(parts, NO_CARDS).devices] == [100, 200]
    assert names(choose(["cpu:0/v2", "cpu:0/v5"], NO_CARDS)) == ["cpu:0/v2", "cpu:0/v5"]


def test_a_named_card_that_is_missing_is_replaced_and_named_in_the_notes():
    choice = choose(["gpu:0", "gpu:5", "cpu:0/v0", "gpu:6"], TWO_CARDS)
    assert names(choice) == ["gpu:0", "cpu:0/v1", "cpu:0/v0", "cpu:0/v2"]
    assert [note.split()[0] for note in choice.notes] == ["gpu:5", "gpu:6"]


def test_the_limit_of_a_missing_card_holds_for_the_device_in_its_place():
    choice = choose(cut(Device("gpu", 0), memory_mb=[300, 400]), NO_CARDS)
    assert [(d.name, d.memory_limit_mb) for d in choice.devices] == [("cpu:0/v0", 300), ("cpu:0/v1", 400)]


@pytest.mark.parametrize("request_", [["gpuu:0"], ["mps"], ["cpu:1"], [], "", "gpu:0,", [0, 1], "0,1", [None]])
def test_what_cannot_be_meant_is_an_error_even_with_soft_placement(request_):
    with pytest.raises(DeviceError, match="gpu:0, gpu:1, cpu:0"):
        choose(request_, TWO_CARDS)


def test_a_device_named_twice_is_an_error_that_shows_how_to_share_it():
    with pytest.raises(DeviceError, match=r"4 times(.|\n)*devices=4(.|\n)*virtual_devices\('cpu:0', count=4\)"):
        choose(["cpu:0", "cpu", "/cpu:0", "CPU:0"], NO_CARDS)
    with pytest.raises(DeviceError, match="2 times"):
        choose(["gpu:0", "cuda:0"], TWO_CARDS)


def test_a_name_without_a_number_says_that_it_means_one_card_of_several():
    assert "gpu:0 only" in choose("cuda", TWO_CARDS).notes[0]
    assert choose("cpu", TWO_CARDS).notes == ()
