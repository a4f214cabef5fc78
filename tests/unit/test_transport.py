"""Which transport a run takes, and what its workers' environment says about it."""

import pytest

from duoka.devices.device import Device
from duoka.devices.virtual import cut
from duoka.errors import LaunchError
from duoka.runtime.environment import transport_asked, worker_environment
from duoka.runtime.plan import Plan, choose_transport
from duoka.runtime.run import describe_plan

CARDS = (Device("gpu", 0), Device("gpu", 2))
HALVES = tuple(cut(Device("gpu", 0, total_mb=8000), memory_mb=[1000, 1000]))
CORES = tuple(cut(Device("cpu"), 3))


def test_cards_use_nccl_and_cpu_devices_share_memory():
    assert choose_transport(CARDS, None) == "nccl"
    assert choose_transport(CARDS[:1], None) == "nccl"
    assert choose_transport(CORES, None) == "shm"


def test_two_workers_on_one_card_share_memory_because_nccl_refuses_them():
    assert choose_transport(HALVES, None) == "shm"
    assert choose_transport((*CARDS, CORES[0]), None) == "shm"


def test_a_transport_that_is_asked_for_is_taken_or_refused():
    assert choose_transport(CORES, "torch") == "gloo"
    assert choose_transport(CARDS, "torch") == "nccl"
    assert choose_transport(CARDS, "shm") == choose_transport(CORES, "shm") == "shm"
    for devices in (HALVES, (*CARDS, CORES[0])):
        with pytest.raises(LaunchError, match="DUOKA_TRANSPORT=torch cannot be used with gpu:0"):
            choose_transport(devices, "torch")


def test_only_known_transports_can_be_asked_for():
    assert transport_asked({}) is None and transport_asked({"DUOKA_TRANSPORT": ""}) is None
    assert transport_asked({"DUOKA_TRANSPORT": "torch"}) == "torch"
    assert transport_asked({"DUOKA_TRANSPORT": "shm"}) == "shm"
    with pytest.raises(LaunchError, match="DUOKA_TRANSPORT=gloo cannot be used"):
        transport_asked({"DUOKA_TRANSPORT": "gloo"})


def test_nccl_listens_on_no_network_address_unless_the_user_says_so():
    plan = Plan(devices=CARDS, num_replicas=2, threads=1, transport="nccl")
    assert worker_environment({}, plan, 0)["NCCL_SOCKET_IFNAME"] == "lo"
    assert worker_environment({"NCCL_SOCKET_IFNAME": "eth0"}, plan, 0)["NCCL_SOCKET_IFNAME"] == "eth0"
    assert "NCCL_SOCKET_IFNAME" not in worker_environment({}, Plan(devices=CORES, num_replicas=3, threads=1), 0)


def test_the_first_line_of_a_run_names_a_transport_that_is_not_shared_memory():
    shared = Plan(devices=CORES, num_replicas=3, threads=1)
    assert "torch" not in describe_plan(shared)
    carried = Plan(devices=CORES, num_replicas=3, threads=1, transport="gloo")
    assert describe_plan(carried) == describe_plan(shared) + ", PyTorch by torch.distributed (Gloo)"
    assert Plan.from_json(carried.to_json()) == carried
    alone = Plan(devices=CORES[:1], num_replicas=3, threads=1, transport="gloo")
    assert "torch" not in describe_plan(alone), "nothing travels"
