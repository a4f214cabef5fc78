"""Sums that Gloo carries between real workers: their bits, their memory, and what happens when a worker is lost."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from duoka.collectives.torch_distributed import TorchDistributed
from duoka.errors import DuokaError
from tests.conftest import run_workers
from tests.contract.test_collectives import cancelling, digest

pytestmark = [pytest.mark.torch]

SIZE = 70_001  # not a multiple of any number of workers here
MOMENTS = ["depositing", "arriving", "arrived", "sending", "sent", "gathering", "reduced", "completed"]
DTYPES = ["float32", "float64", "float16", "bfloat16", "complex64", "complex128", "bool"]
DTYPES += ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]


def on_tensors(control, *, exact: bool = True) -> TorchDistributed:
    return TorchDistributed(control, "gloo", torch.device("cpu"), exact=exact)


def run(num_workers: int, num_replicas: int, body: Callable[..., Any], *args: Any, deadline_s: float = 10.0) -> list:
    launched = run_workers(num_workers, num_replicas, body, *args, deadline_s=deadline_s)
    assert launched.outcome.exit_code == 0, launched.outcome.failure
    assert sorted(launched.results) == list(range(num_workers))
    return [launched.results[worker] for worker in range(num_workers)]


def write(slot: Any, values: np.ndarray) -> None:
    """Into an array or a tensor: the same bits, whatever the type is called."""
    place = slot.view(torch.uint8).numpy() if isinstance(slot, torch.Tensor) else slot.view(np.uint8)
    place[:] = values.view(np.uint8)


def read(result: Any) -> np.ndarray:
    return result.view(torch.uint8).numpy() if isinstance(result, torch.Tensor) else result.view(np.uint8)


def add_up(collective, buffers, values: Callable[[int, int], np.ndarray], name: str = ""):
    """One exchange; values(position, replica) is what a replica gives for the buffer at that position."""
    exchange = collective.exchange(buffers, name)
    while True:
        for replica in exchange.missing:
            for position, buffer in enumerate(buffers):
                write(exchange.slot(buffer, replica), values(position, replica))
            exchange.deposit(replica, b"%d" % replica)
        if exchange.commit():
            break
    assert exchange.notes == [b"%d" % replica for replica in range(collective.num_replicas)]
    return [read(exchange.result(buffer)) for buffer in buffers]


# Bits.


def values_of(name: str, replica: int, size: int) -> np.ndarray:
    rng = np.random.default_rng(replica)
    dtype = np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)
    if dtype.kind == "b":
        return rng.integers(0, 2, size).astype(bool)
    if dtype.kind in "iu":
        return rng.integers(0, 256, size * dtype.itemsize).astype(np.uint8).view(dtype)
    values = rng.normal(size=(size, 2)) * 10.0 ** rng.integers(-3, 4, size=(size, 2))
    return (values[:, 0] + (1j * values[:, 1] if dtype.kind == "c" else 0)).astype(dtype)


def sums_in_every_type(control) -> list[list[str]]:
    """By shared memory, and by Gloo in the order of the tree: all types in one exchange, empty and tiny ones too."""
    sizes = [0, 1, 2, 1003]
    kinds = [(name, size) for name in DTYPES for size in sizes]
    dtypes = {name: ml_dtypes.bfloat16 if name == "bfloat16" else name for name in DTYPES}

    def values(position: int, replica: int) -> np.ndarray:
        name, size = kinds[position]
        return values_of(name, replica, size)

    found = []
    for collective in (control, on_tensors(control)):
        buffers = [collective.buffer(size, dtypes[name]) for name, size in kinds]
        for _ in range(2):
            results = add_up(collective, buffers, values)
        found.append([digest(result) for result in results])
    return found


@pytest.mark.parametrize("num_workers", [1, 2, 3])
def test_every_type_of_number_has_the_bits_of_shared_memory(num_workers):
    for shared, carried in run(num_workers, 5, sums_in_every_type):
        assert carried == shared


def sum_as_the_library_does(control) -> list[Any]:
    collective = on_tensors(control, exact=False)
    wide = np.random.default_rng(3).normal(size=(control.num_replicas, SIZE))
    buffers = [collective.buffer(SIZE, "f4"), collective.buffer(SIZE, "c8"), collective.buffer(SIZE, "i2")]

    def values(position: int, replica: int) -> np.ndarray:
        as_float = wide[replica].astype("f4")
        return [as_float, (as_float + 2j).astype("c8"), (as_float * 100).astype("i2")][position]

    results = [result.copy() for result in add_up(collective, buffers, values)]
    near = np.abs(results[0].view("f4") - wide.sum(axis=0)).max()
    near_complex = np.abs(results[1].view("c8") - wide.sum(axis=0) - 2j * control.num_replicas).max()
    whole = sum((wide[r].astype("f4") * 100).astype("i2").astype(int) for r in range(control.num_replicas))
    return [digest(*results), float(near), float(near_complex), bool((results[2].view("i2") == whole).all())]


@pytest.mark.parametrize(("num_workers", "num_replicas"), [(1, 3), (2, 5), (3, 3), (3, 8)])
def test_the_librarys_own_sums_are_near_and_equal_on_all_workers(num_workers, num_replicas):
    told = run(num_workers, num_replicas, sum_as_the_library_does)
    assert len({bits for bits, *_ in told}) == 1
    for _, near, near_complex, is_whole in told:
        assert near < 1e-5 and near_complex < 1e-5 and is_whole


def sum_in_both_ways(control) -> list[str]:
    values = cancelling(control.num_replicas, SIZE)
    found = []
    for exact in (True, False):
        collective = on_tensors(control, exact=exact)
        found += [digest(*add_up(collective, [collective.buffer(SIZE, "f4")], lambda _, replica: values[replica]))]
    return found


def test_the_librarys_own_sums_have_other_bits():
    """Else the tests of exact sums would prove nothing."""
    for exact, inexact in run(3, 8, sum_in_both_ways):
        assert exact != inexact


# Memory.


def count_slots(control) -> int:
    collective = on_tensors(control)
    buffer = collective.buffer(1000, "f4")
    for _ in range(3):
        add_up(collective, [buffer], lambda *_: np.ones(1000, "f4"))
    return len(buffer._slots)


def test_a_worker_holds_memory_for_its_own_replicas_only():
    assert run(3, 8, count_slots) == [3, 3, 2]


def deposit_and_count_shared_pieces(control) -> int:
    collective = on_tensors(control)
    before = control._arena._asked.total()
    buffer = collective.buffer(1_000_000, "f4")
    add_up(collective, [buffer], lambda *_: np.ones(1_000_000, "f4"))
    return control._arena._asked.total() - before


def test_numbers_on_a_device_take_no_shared_memory():
    assert run(2, 2, deposit_and_count_shared_pieces) == [0, 0]


def use_host_memory(control) -> list[Any]:
    """Programs on arrays: `strategy.sum_over_replicas` asks for scratch."""
    collective = on_tensors(control)
    scratch = collective.scratch(5, "f8")
    exchange = collective.exchange([scratch])
    for replica in exchange.missing:
        exchange.slot(scratch, replica)[:] = replica
        exchange.deposit(replica)
    assert exchange.commit()
    total = np.asarray(collective.all_reduce([torch.full((3,), r + 1.0) for r in collective.replicas]))
    return [float(exchange.result(scratch)[0]), total.tolist()]


def test_scratch_is_host_memory_and_tensors_may_be_given_to_plain_calls():
    assert run(2, 3, use_host_memory) == [[3.0, [6.0, 6.0, 6.0]]] * 2


# Connections.


def listen_on() -> set[str]:
    """The addresses that this process listens on, in the hexadecimal writing of the kernel."""
    mine = set()
    for entry in os.listdir("/proc/self/fd"):
        try:
            mine.add(os.readlink(f"/proc/self/fd/{entry}"))
        except FileNotFoundError:
            continue
    found = set()
    for table in ("tcp", "tcp6", "udp", "udp6"):
        with open(f"/proc/net/{table}") as file:
            for line in file.read().splitlines()[1:]:
                fields = line.split()
                is_waiting = fields[3] == "0A" or table.startswith("udp")
                if is_waiting and f"socket:[{fields[9]}]" in mine:
                    found.add(fields[1].split(":")[0])
    return found


def exchange_and_list_addresses(control) -> list[str]:
    collective = on_tensors(control)
    add_up(collective, [collective.buffer(SIZE, "f4")], lambda *_: np.ones(SIZE, "f4"))
    return sorted(listen_on())


def test_only_the_loopback_address_is_listened_on():
    assert run(3, 3, exchange_and_list_addresses) == [["0100007F"]] * 3


def exchange_beside_a_default_group(control, path: str) -> list[float]:
    """Other libraries in the script make the default group, before and after ours."""
    import torch.distributed as dist

    collective = on_tensors(control)
    buffer = collective.buffer(3, "f4")
    first = float(add_up(collective, [buffer], lambda *_: np.ones(3, "f4"))[0].view("f4")[0])
    store = dist.FileStore(path, 2)
    dist.init_process_group("gloo", store=store, rank=control.worker, world_size=2)
    theirs = torch.ones(1)
    dist.all_reduce(theirs)
    second = float(add_up(collective, [buffer], lambda *_: np.full(3, 2, "f4"))[0].view("f4")[0])
    dist.destroy_process_group()
    third = float(add_up(collective, [buffer], lambda *_: np.full(3, 3, "f4"))[0].view("f4")[0])
    return [first, float(theirs), second, third]


def test_a_script_may_have_a_default_group_of_its_own(tmp_path):
    assert run(2, 2, exchange_beside_a_default_group, str(tmp_path / "store")) == [[2.0, 2.0, 4.0, 6.0]] * 2


# Misuse.


def error_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except DuokaError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def differ(control, how: str) -> str:
    is_odd_one = control.worker == 1
    collective = on_tensors(control, exact=not (how == "exact" and is_odd_one))
    if how == "order" and is_odd_one:
        collective.buffer(3, "f4")
    size = SIZE + (how == "size" and is_odd_one)
    buffer = collective.buffer(size, "f8" if how == "type" and is_odd_one else "f4")
    name = "b" if how == "name" and is_odd_one else "a"
    values = np.ones(size, buffer.dtype)
    if how == "call" and is_odd_one:
        return error_of(collective.barrier)
    return error_of(lambda: add_up(collective, [buffer], lambda *_: values, name))


@pytest.mark.parametrize("how", ["exact", "order", "size", "type", "name", "call"])
def test_unequal_exchanges_are_told_to_all_workers(how):
    told = run(3, 3, differ, how)
    assert set(told) == {told[0]} and told[0].startswith("MismatchError: The workers did not call the same thing")


def misuse(control) -> list[str]:
    collective = on_tensors(control)
    buffer = collective.buffer(3, "f4")
    return [
        error_of(lambda: collective.buffer(-1, "f4")),
        error_of(lambda: collective.buffer(3, "S5")),
        error_of(lambda: collective.exchange([buffer, buffer])),
    ]


def test_wrong_buffers_are_refused():
    for negative, text, twice in run(2, 2, misuse):
        assert negative.startswith("MismatchError: A buffer of -1 numbers.")
        assert text.startswith("MismatchError: A tensor cannot hold |S5.")
        assert twice.startswith("MismatchError: One exchange was given the same buffer twice.")


def use_in_a_child(control) -> str:
    collective = on_tensors(control)
    buffer = collective.buffer(3, "f4")
    add_up(collective, [buffer], lambda *_: np.ones(3, "f4"))
    reading, writing = os.pipe()
    if os.fork() == 0:
        os.write(writing, error_of(lambda: collective.exchange([buffer])).encode())
        os._exit(0)
    told = os.read(reading, 10_000).decode()
    os.wait()
    collective.barrier()
    return told


def test_a_forked_child_is_refused():
    for told in run(2, 2, use_in_a_child):
        assert told.startswith("LaunchError: A child process used the strategy of its parent.")


# Losses.


def train(control, victim: int | None, moment: str, *, exact: bool = True) -> list[str]:
    """Six steps, whose values depend on the step; the victim dies at a moment of the third."""
    if control.worker == victim:
        control.moment = die_at(moment, collective_step=lambda: control.meeting.steps == 2)
    collective = on_tensors(control, exact=exact)
    buffers = [collective.buffer(SIZE, "f4"), collective.buffer(3, "f8")]
    hashes = []
    for step in range(6):
        wide = cancelling(control.num_replicas, SIZE, seed=step)

        def values(position: int, replica: int, wide: np.ndarray = wide, step: int = step) -> np.ndarray:
            return wide[replica] if position == 0 else np.full(3, replica + step + 0.1)

        hashes.append(digest(*add_up(collective, buffers, values, f"step {step}")))
        collective.end_step()
    return hashes


def die_at(moment: str, collective_step: Callable[[], bool]) -> Callable[[str], None]:
    def maybe_die(name: str) -> None:
        if name == moment and collective_step():
            os.kill(os.getpid(), signal.SIGKILL)

    return maybe_die


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_step_in_which_a_worker_is_killed_ends_with_the_same_bits(victim, moment):
    (calm,) = run(1, 5, train, None, "")
    launched = run_workers(3, 5, train, victim, moment, deadline_s=15.0)
    assert launched.outcome.lost == [(victim, signal.SIGKILL)]
    assert launched.outcome.exit_code == 0, launched.outcome.failure
    assert [launched.results[worker] for worker in range(3) if worker != victim] == [calm, calm]


def test_the_last_worker_goes_on_alone():
    (calm,) = run(1, 4, train, None, "")
    launched = run_workers(2, 4, train, 0, "sent", deadline_s=15.0)
    assert launched.outcome.lost == [(0, signal.SIGKILL)]
    assert launched.results == {1: calm}


def train_without_exact_sums(control, victim: int | None) -> list[str]:
    return train(control, victim, "sent", exact=False)


def test_survivors_agree_on_the_librarys_own_sums_after_a_loss():
    launched = run_workers(3, 5, train_without_exact_sums, 1, deadline_s=15.0)
    assert launched.outcome.lost == [(1, signal.SIGKILL)]
    assert launched.outcome.exit_code == 0, launched.outcome.failure
    assert launched.results[0] == launched.results[2]


def lose_two(control) -> list[str]:
    if control.worker == 1:
        control.moment = die_at("sent", lambda: control.meeting.steps == 1)
    if control.worker == 2:  # in the step that is done again
        control.moment = die_at("sent", lambda: control.meeting.membership.generation == 1)
    return train(control, None, "")


def test_two_workers_are_lost_in_one_step():
    (calm,) = run(1, 4, train, None, "")
    launched = run_workers(4, 4, lose_two, deadline_s=15.0)
    assert sorted(launched.outcome.lost) == [(1, signal.SIGKILL), (2, signal.SIGKILL)]
    assert launched.results == {0: calm, 3: calm}


def die_while_connecting(control) -> list[str]:
    """One worker has arrived and dies before it connects: nobody waits for it until the deadline."""
    if control.worker == 1:
        control.moment = die_at("arrived", lambda: True)
    return train(control, None, "")


def test_a_worker_lost_while_all_connect_is_not_waited_for():
    (calm,) = run(1, 3, train, None, "")
    launched = run_workers(3, 3, die_while_connecting, deadline_s=1000.0)
    assert launched.outcome.lost == [(1, signal.SIGKILL)]
    assert set(map(tuple, launched.results.values())) == {tuple(calm)}


def stop_in_the_middle(control) -> None:
    """One worker is stopped, not dead: the others give up at the deadline and say who it is."""
    collective = on_tensors(control)
    buffer = collective.buffer(SIZE, "f4")
    add_up(collective, [buffer], lambda *_: np.ones(SIZE, "f4"))
    collective.end_step()
    if control.worker == 2:
        control.moment = lambda name: os.kill(os.getpid(), signal.SIGSTOP) if name == "sending" else None
    add_up(collective, [buffer], lambda *_: np.ones(SIZE, "f4"))


def test_a_worker_that_is_stopped_in_the_middle_is_named_at_the_deadline():
    launched = run_workers(3, 3, stop_in_the_middle, deadline_s=8.0)
    assert launched.outcome.exit_code == 75
    told = launched.outcome.failure["traceback"]
    assert "worker 2 (cpu:0/v2) has not added its part at step 1 for 8 s" in told
    assert "is stopped (SIGSTOP)" in told


def break_the_connection(control) -> None:
    """The connections of one worker break, and nobody is lost: the run ends, and says which worker it was."""
    collective = on_tensors(control)
    buffer = collective.buffer(SIZE, "f4")
    add_up(collective, [buffer], lambda *_: np.ones(SIZE, "f4"))
    collective.end_step()
    if control.worker == 1:
        control.moment = lambda name: shut_down_connections() if name == "sending" else None
    add_up(collective, [buffer], lambda *_: np.ones(SIZE, "f4"))


def shut_down_connections() -> None:
    for entry in os.listdir("/proc/self/fd"):
        try:
            connection = socket.socket(fileno=os.dup(int(entry)))
        except OSError:
            continue  # closed, or no socket
        with connection:
            listens = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            if connection.family == socket.AF_INET and not listens:
                connection.shutdown(socket.SHUT_RDWR)


def test_a_broken_connection_without_a_loss_ends_the_run_with_a_clear_error():
    launched = run_workers(3, 3, break_the_connection, deadline_s=1000.0)
    assert launched.outcome.lost == []
    told = launched.outcome.failure["traceback"]
    assert "WorkerLost: Worker" in told and "lost its connection to the others at step 1" in told


@pytest.mark.skipif(torch.distributed.is_nccl_available(), reason="this PyTorch has NCCL")
def test_a_library_that_is_not_there_is_named():
    def body(control) -> str:
        return error_of(lambda: TorchDistributed(control, "nccl", torch.device("cpu"), exact=True))

    for told in run(2, 2, body):
        assert told.startswith("LaunchError: This PyTorch (") and "has no nccl." in told
