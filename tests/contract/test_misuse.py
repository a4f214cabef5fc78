"""Calls that a program gets wrong: each ends in an error that says so, on every worker, and nobody waits in vain."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from duoka.collectives.staging import NOTE_BYTES
from duoka.errors import DeadlineExceeded, DuokaError
from duoka.runtime.worker import attachment
from duoka.session import WorkerSession
from duoka.strategies.mirrored import Mirrored
from tests.conftest import run_workers

SMALL, LARGE = 10, 60_000  # floats: one meeting, or two with the work shared by slices


def run(num_workers: int, num_replicas: int, body: Callable[..., Any], *args: Any, deadline_s: float = 10.0) -> list:
    """What the body gave back on each worker; all of them have come to its end."""
    launched = run_workers(num_workers, num_replicas, body, *args, deadline_s=deadline_s)
    assert launched.outcome.exit_code == 0, launched.outcome.failure
    assert sorted(launched.results) == list(range(num_workers))
    return [launched.results[worker] for worker in range(num_workers)]


def error_of(call: Callable[[], Any]) -> str:
    """What a call says when it fails. Only our errors are caught: a ValueError from within fails the test."""
    try:
        call()
    except DuokaError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def kind_of(call: Callable[[], Any]) -> str:
    return error_of(call).partition(":")[0]


def ones(collective, shape, dtype="f4") -> list[np.ndarray]:
    return [np.ones(shape, dtype) for _ in collective.replicas]


def exchange_once(collective, buffers, name="", value=1):
    exchange = collective.exchange(buffers, name)
    for replica in exchange.missing:
        for buffer in buffers:
            exchange.slot(buffer, replica)[:] = value
        exchange.deposit(replica)
    assert exchange.commit()
    return exchange


def strategy_of(collective) -> Mirrored:
    """A strategy on the collective of this worker, which is a fork: no other test sees the change."""
    session = WorkerSession(attachment().plan, collective.worker, collective)
    Mirrored.connect = staticmethod(lambda request: session)
    return Mirrored()


# Workers that do not call the same thing.

UNEQUAL_CALLS = {  # what most workers call, and what one of them calls
    "shapes": (lambda c: c.all_reduce(ones(c, (2, 3))), lambda c: c.all_reduce(ones(c, (3, 2)))),
    "sizes": (lambda c: c.all_reduce(ones(c, SMALL)), lambda c: c.all_reduce(ones(c, SMALL + 1))),
    "large_sizes": (lambda c: c.all_reduce(ones(c, LARGE)), lambda c: c.all_reduce(ones(c, LARGE + 1))),
    "small_and_large": (lambda c: c.all_reduce(ones(c, SMALL)), lambda c: c.all_reduce(ones(c, LARGE))),
    "types": (lambda c: c.all_reduce(ones(c, SMALL, "f4")), lambda c: c.all_reduce(ones(c, SMALL, "i4"))),
    "large_types": (lambda c: c.all_reduce(ones(c, LARGE, "f4")), lambda c: c.all_reduce(ones(c, LARGE, "i4"))),
    "operations": (lambda c: c.all_reduce(ones(c, SMALL)), lambda c: c.all_reduce(ones(c, SMALL), "mean")),
    "barrier_and_sum": (lambda c: c.barrier(), lambda c: c.all_reduce(ones(c, SMALL))),
    "gather_and_large_sum": (lambda c: c.all_gather(ones(c, SMALL)), lambda c: c.all_reduce(ones(c, LARGE))),
    "gather_and_broadcast": (lambda c: c.all_gather(ones(c, SMALL)), lambda c: c.broadcast(np.ones(SMALL))),
    "roots": (lambda c: c.broadcast(np.ones(3), root=0), lambda c: c.broadcast(np.ones(3), root=1)),
    "exchange_and_barrier": (lambda c: exchange_once(c, [c.buffer(LARGE, "f4")]), lambda c: c.barrier()),
    "names": (
        lambda c: exchange_once(c, [c.buffer(LARGE, "f4")], "step 1"),
        lambda c: exchange_once(c, [c.buffer(LARGE, "f4")], "step 2"),
    ),
}


def call_unequally(collective, kind: str) -> str:
    call = UNEQUAL_CALLS[kind][collective.worker == 1]
    return error_of(lambda: call(collective))


@pytest.mark.parametrize("kind", UNEQUAL_CALLS)
def test_unequal_calls_are_told_to_all_workers(kind):
    told = run(3, 3, call_unequally, kind)
    assert set(told) == {told[0]}, "all say the same"
    assert told[0].startswith("MismatchError"), told[0]
    calls = [line.split(": ", 1)[1] for line in told[0].splitlines() if "(cpu:0/v" in line]
    assert len(calls) == 3 and calls[0] == calls[2] != calls[1]


def one_more_on_the_main_worker(collective, size):
    if collective.worker == 0:
        collective.buffer(size, "f4")
    return [collective.buffer(size, "f4")]


def made_in_another_order(collective, size):
    first, second = collective.buffer(size, "f4"), collective.buffer(size, "f4")
    weights, biases = (first, second) if collective.worker == 0 else (second, first)
    return [weights, biases]


def of_other_sizes(collective, size):
    return [collective.buffer(size + collective.worker, "f4")]


def of_other_types(collective, size):
    return [collective.buffer(size, "f4" if collective.worker == 0 else "i4")]


def not_all_given(collective, size):
    buffers = [collective.buffer(size, "f4"), collective.buffer(size, "f4")]
    return buffers[: 1 + collective.worker]


BUFFERS = [one_more_on_the_main_worker, made_in_another_order, of_other_sizes, of_other_types, not_all_given]


@pytest.mark.parametrize("size", [SMALL, LARGE])
@pytest.mark.parametrize("make", BUFFERS)
def test_buffers_that_differ_between_workers_are_told_to_all(make, size):
    def body(collective):
        return kind_of(lambda: exchange_once(collective, make(collective, size)))

    assert run(2, 2, body) == ["MismatchError", "MismatchError"]


@pytest.mark.parametrize("size", [SMALL, LARGE])
def test_buffers_made_alike_on_all_workers_are_exchanged(size):
    """Else the errors above would prove nothing."""

    def body(collective):
        buffers = [collective.buffer(size, "f4"), collective.buffer(size, "i4")]
        exchange = exchange_once(collective, buffers, "x" * 600)
        return [float(exchange.result(buffer).sum()) for buffer in buffers]

    assert run(2, 2, body) == [[2.0 * size] * 2] * 2


def many_buffers_of_which_the_last_differs(collective):
    buffers = [collective.buffer(SMALL, "f4") for _ in range(40)]
    exchange_once(collective, [*buffers, collective.buffer(LARGE, "f4" if collective.worker == 0 else "i4")])


def long_names_that_end_differently(collective):
    exchange_once(collective, [collective.buffer(SMALL, "f4")], "x" * 600 + str(collective.worker))


@pytest.mark.parametrize("body", [many_buffers_of_which_the_last_differs, long_names_that_end_differently])
def test_long_calls_that_differ_only_at_their_end_are_told_to_all(body):
    assert run(2, 2, lambda collective: kind_of(lambda: body(collective))) == ["MismatchError", "MismatchError"]


# After a failed call.

LATER_CALLS = [
    lambda c: c.barrier(),
    lambda c: c.all_reduce(ones(c, SMALL)),
    lambda c: c.all_reduce(ones(c, LARGE)),
    lambda c: c.all_gather(ones(c, SMALL)),
    lambda c: c.broadcast(np.ones(3)),
    lambda c: c.exchange([c.buffer(LARGE, "f4")]),
    lambda c: strategy_of(c).sum_over_replicas(lambda replica: np.ones(LARGE)),
]


def go_on_after(collective, failing: Callable[[], Any]) -> tuple[str, list[str]]:
    """What the failing call said, and what all others said after it."""
    first = error_of(failing)
    return first, [error_of(lambda call=call: call(collective)) for call in LATER_CALLS]


@pytest.mark.parametrize("kind", ["shapes", "large_sizes", "exchange_and_barrier"])
def test_after_a_mismatch_every_later_call_fails_with_it_at_once(kind):
    def body(collective):
        call = UNEQUAL_CALLS[kind][collective.worker == 1]
        return go_on_after(collective, lambda: call(collective))

    for first, later in run(2, 2, body):
        assert first.startswith("MismatchError")
        assert later == [first] * len(LATER_CALLS)


@pytest.fixture
def baton() -> Iterator[tuple[int, int]]:
    """A pipe between workers: one comes late, when the other has written into it."""
    ends = os.pipe()
    yield ends
    for end in ends:
        os.close(end)


def give_up_after(seconds: float, call: Callable[[], Any]) -> Any:
    """What a script can do that has no more patience: an alarm of its own, which leaves the call by an error."""

    def give_up(number, frame) -> None:
        raise DeadlineExceeded("the script has waited long enough")

    signal.signal(signal.SIGALRM, give_up)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    return call()


def wait_for_one_that_is_late(collective, baton):
    if collective.worker == 1:
        os.read(baton[0], 1)
        total = float(collective.all_reduce(ones(collective, SMALL))[0])
        return total, error_of(lambda: collective.all_reduce(ones(collective, SMALL)))
    told = go_on_after(collective, lambda: give_up_after(0.1, lambda: collective.all_reduce(ones(collective, SMALL))))
    os.write(baton[1], b".")
    return told


def test_after_a_wait_was_left_every_later_call_fails_with_it_at_once_and_no_sum_is_mixed(baton):
    (first, later), (total, next_error) = run(2, 2, wait_for_one_that_is_late, baton)
    assert first == "DeadlineExceeded: the script has waited long enough"
    assert later == [first] * len(LATER_CALLS)
    # What worker 0 had handed in still counts; what it wanted to try again does not come into the next sum.
    assert total == 2.0
    assert next_error.startswith("WorkerLeft: worker 0 (cpu:0/v0)")


@pytest.mark.parametrize("size", [SMALL, LARGE])
def test_a_commit_that_failed_cannot_be_tried_again(size, baton):
    def body(collective):
        buffer = collective.buffer(size, "f4")
        if collective.worker == 1:
            os.read(baton[0], 1)
            return kind_of(lambda: exchange_once(collective, [buffer]))
        exchange = collective.exchange([buffer])
        exchange.slot(buffer, 0)[:] = 1
        exchange.deposit(0)
        errors = [error_of(lambda: give_up_after(0.1, exchange.commit)), error_of(exchange.commit)]
        os.write(baton[1], b".")
        return errors[0] == errors[1], errors[0].partition(":")[0]

    assert run(2, 2, body)[0] == [True, "DeadlineExceeded"]


# Values and arguments that cannot be meant.

NAN_WEIGHT, INFINITE_WEIGHT = float("nan"), float("inf")


def weights_of(collective, weight: float) -> list[float]:
    return [weight for _ in collective.replicas]


def read_only(array: np.ndarray) -> np.ndarray:
    array.flags.writeable = False
    return array


def exchange_twice_the_same_buffer(collective):
    buffer = collective.buffer(SMALL, "f4")
    exchange_once(collective, [buffer, buffer])


REFUSED_CALLS = {
    "integers_with_weights": lambda c: c.all_reduce(ones(c, 3, "i8"), weights=weights_of(c, 0.5)),
    "large_integers_with_weights": lambda c: c.all_reduce(ones(c, LARGE, "i8"), weights=weights_of(c, 0.5)),
    "a_mean_of_integers": lambda c: c.all_reduce(ones(c, 3, "u1"), "mean"),
    "a_sum_of_truth_values": lambda c: c.all_reduce(ones(c, 3, "?")),
    "a_maximum": lambda c: c.all_reduce(ones(c, 3), "max"),
    "a_negative_weight": lambda c: c.all_reduce(ones(c, 3), "mean", weights=weights_of(c, -1.0)),
    "a_weight_of_nan": lambda c: c.all_reduce(ones(c, 3), "mean", weights=weights_of(c, NAN_WEIGHT)),
    "an_infinite_weight": lambda c: c.all_reduce(ones(c, 3), weights=weights_of(c, INFINITE_WEIGHT)),
    "a_weight_too_many": lambda c: c.all_reduce(ones(c, 3), "mean", weights=[*weights_of(c, 1.0), 1.0]),
    "a_value_too_few": lambda c: c.all_reduce(ones(c, 3)[1:]),
    "a_value_too_few_to_gather": lambda c: c.all_gather(ones(c, 3)[1:]),
    "values_of_other_shapes": lambda c: c.all_reduce([np.ones(1 + r) for r in c.replicas]),
    "out_of_another_type": lambda c: c.all_reduce(ones(c, 3, "f8"), out=np.zeros(3, "i4")),
    "out_of_a_narrower_type": lambda c: c.all_reduce(ones(c, LARGE, "f8"), out=np.zeros(LARGE, "f4")),
    "out_of_another_shape": lambda c: c.all_reduce(ones(c, 3), out=np.zeros((2, 3), "f4")),
    "a_list_as_out": lambda c: c.all_reduce(ones(c, 3, "f8"), out=[0.0, 0.0, 0.0]),
    "a_read_only_out": lambda c: c.all_reduce(ones(c, 3), out=read_only(np.zeros(3, "f4"))),
    "records_to_gather": lambda c: c.all_gather(ones(c, 2, [("a", "f4"), ("b", "i4")])),
    "objects_to_gather": lambda c: c.all_gather([np.array([None, "x"], object) for _ in c.replicas]),
    "bytes_as_floats_to_gather": lambda c: c.all_gather(ones(c, 2, ml_dtypes.float8_e4m3fn)),
    "other_bytes_as_floats_to_gather": lambda c: c.all_gather(ones(c, 2, ml_dtypes.float8_e5m2)),
    "root_minus_one": lambda c: c.broadcast(np.ones(3), root=-1),
    "a_root_past_the_last_replica": lambda c: c.broadcast(np.ones(3), root=c.num_replicas),
    "a_buffer_twice_in_one_exchange": exchange_twice_the_same_buffer,
    "a_buffer_of_negative_size": lambda c: c.buffer(-1, "f4"),
}


def try_a_refused_call(collective, name: str):
    completed = collective.meeting.completed
    error = kind_of(lambda: REFUSED_CALLS[name](collective))
    total = collective.all_reduce(ones(collective, 1))
    return error, float(total[0]), collective.meeting.completed - completed


@pytest.mark.parametrize("num_workers", [1, 2])
@pytest.mark.parametrize("name", REFUSED_CALLS)
def test_what_cannot_be_meant_is_refused_before_anything_is_exchanged(name, num_workers):
    assert run(num_workers, 4, try_a_refused_call, name) == [["MismatchError", 4.0, 1]] * num_workers


@pytest.mark.parametrize("size", [SMALL, LARGE])
@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_mean_of_which_all_weights_are_zero_is_an_error_on_all_workers(num_workers, size):
    def body(collective):
        values, nothing = ones(collective, size), weights_of(collective, 0.0)
        error = error_of(lambda: collective.all_reduce(values, "mean", weights=nothing))
        return error.partition(".")[0], float(collective.all_reduce(values, "mean")[0])

    told = "MismatchError: The mean of nothing: all weights are zero"
    assert run(num_workers, 2, body) == [[told, 1.0]] * num_workers


def deposit_long_notes(collective, size):
    buffer = collective.buffer(size, "f4")
    exchange = collective.exchange([buffer])
    longest = NOTE_BYTES - 4
    errors = []
    for replica in exchange.missing:
        exchange.slot(buffer, replica)[:] = 1
        errors.append(kind_of(lambda replica=replica: exchange.deposit(replica, b"x" * (longest + 1))))
        exchange.deposit(replica, bytes([replica]) * longest)
    assert exchange.commit()
    whole = [note == bytes([replica]) * longest for replica, note in enumerate(exchange.notes)]
    return errors, whole, float(exchange.result(buffer)[0])


@pytest.mark.parametrize("size", [SMALL, LARGE])
def test_a_note_that_is_too_long_is_refused_at_its_deposit_and_one_byte_less_arrives(size):
    assert run(2, 4, deposit_long_notes, size) == [[["MismatchError"] * 2, [True] * 4, 4.0]] * 2


# Memory and descriptors.


@pytest.mark.parametrize("num_workers", [1, 2, 3])
def test_the_result_of_a_large_exchange_can_only_be_read(num_workers):
    def body(collective):
        buffer = collective.buffer(LARGE, "f4")
        result = exchange_once(collective, [buffer]).result(buffer)
        with pytest.raises(ValueError, match="read-only"):
            result *= 0
        collective.barrier()
        return float(result.min())

    assert run(num_workers, 3, body) == [3.0] * num_workers


CALLS_OF_CHILDREN = {  # with what they have inherited: a collective, a buffer of it, a strategy
    "barrier": lambda c, buffer, strategy: c.barrier(),
    "small_sum": lambda c, buffer, strategy: c.all_reduce(ones(c, SMALL)),
    "large_sum": lambda c, buffer, strategy: c.all_reduce(ones(c, LARGE)),
    "gather": lambda c, buffer, strategy: c.all_gather(ones(c, SMALL)),
    "broadcast": lambda c, buffer, strategy: c.broadcast(np.ones(3)),
    "exchange": lambda c, buffer, strategy: exchange_once(c, [buffer], value=77),
    "buffer": lambda c, buffer, strategy: c.buffer(LARGE, "f4"),
    "step": lambda c, buffer, strategy: strategy.sum_over_replicas(lambda replica: np.full(LARGE, 77.0)),
}


def let_a_child_call(collective, name: str, directory: str):
    strategy, buffer = strategy_of(collective), collective.buffer(LARGE, "f4")
    result = exchange_once(collective, [buffer]).result(buffer)  # the next call would tell the others that it is taken
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            # Our descriptors are closed in a child: its files get their numbers.
            paths = [f"{directory}/{collective.worker}-{number}" for number in range(40)]
            files = [os.open(path, os.O_RDWR | os.O_CREAT) for path in paths]
            error = kind_of(lambda: CALLS_OF_CHILDREN[name](collective, buffer, strategy))
            os.write(writing, f"{error}, {sum(os.fstat(fd).st_size for fd in files)} bytes written".encode())
        finally:
            os._exit(0)
    os.close(writing)
    os.waitpid(child, 0)
    told = os.read(reading, 1000).decode()
    is_untouched = bool((result == collective.num_replicas).all())
    return told, is_untouched, float(exchange_once(collective, [buffer], value=2).result(buffer).max())


@pytest.mark.parametrize("name", CALLS_OF_CHILDREN)
def test_a_forked_child_that_calls_gets_a_launch_error_and_writes_nothing(name, tmp_path):
    told = run(2, 2, let_a_child_call, name, str(tmp_path), deadline_s=2.0)
    assert told == [["LaunchError, 0 bytes written", True, 4.0]] * 2


@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_hundred_buffers_and_their_results_cost_no_descriptor(num_workers):
    def body(collective):
        exchange_once(collective, [collective.buffer(33_000, "f4")])  # what is opened once, for all time
        before = len(os.listdir("/proc/self/fd"))
        buffers = [collective.buffer(33_000, "f4") for _ in range(100)]
        exchange = exchange_once(collective, buffers)
        total = sum(float(exchange.result(buffer)[-1]) for buffer in buffers)
        return total, len(os.listdir("/proc/self/fd")) - before

    assert run(num_workers, 2, body) == [[200.0, 0]] * num_workers


def test_thirty_sizes_take_the_memory_of_one():
    sizes = [100_000 + 1000 * i for i in range(30)]  # all below 2**17
    most = 2 * 2**17 * 4  # a slot of so many floats for each replica

    def body(collective):
        def measure() -> int:
            collective.barrier()  # all have what they need, and nobody needs more yet
            arena_bytes = os.fstat(attachment().identity.arena).st_size
            collective.barrier()
            return arena_bytes

        strategy, measured = strategy_of(collective), [measure()]
        totals = [float(collective.all_reduce(ones(collective, size)).sum()) for size in sizes]
        measured.append(measure())
        totals += [float(strategy.sum_over_replicas(lambda r, n=size: np.ones(n, "f4")).sum()) for size in sizes]
        measured.append(measure())
        return totals, measured[1] - measured[0], measured[2] - measured[1]

    for totals, for_sums, for_steps in run(2, 2, body):
        assert totals == [2.0 * size for size in sizes] * 2
        assert 0 < for_sums <= most
        assert for_steps <= most


# The same bits and shapes, whatever is asked for.


@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_single_number_has_no_dimension_after_every_call(num_workers):
    def body(collective):
        mine = [np.float64(r) for r in collective.replicas]
        total = collective.all_reduce(mine)
        return [list(array.shape) for array in (total, *collective.all_gather(mine), collective.broadcast(mine[0]))]

    assert run(num_workers, 2, body) == [[[], [], [], []]] * num_workers


def one_nan(collective, dtype: str, companion: int) -> list[str]:
    """The bits of sums of one NaN per replica, with unequal signs; the last beside a buffer of another size."""
    signs = [1 if r % 3 else -1 for r in range(collective.num_replicas)]
    signed = [np.copysign(np.full(1, np.nan), sign).astype(dtype) for sign in signs]
    total = collective.all_reduce([signed[r] for r in collective.replicas])
    buffers = [collective.buffer(companion, "f4"), collective.buffer(1, dtype)]
    exchange = collective.exchange(buffers)
    for replica in exchange.missing:
        exchange.slot(buffers[1], replica)[:] = signed[replica]
        exchange.deposit(replica)
    assert exchange.commit()
    return [total.tobytes().hex(), exchange.result(buffers[1]).tobytes().hex()]


@pytest.mark.parametrize("dtype", ["f4", "f8", "c8"])
@pytest.mark.parametrize("companion", [SMALL, LARGE])
@pytest.mark.parametrize("num_replicas", [2, 8])
def test_a_single_nan_has_the_same_sign_on_any_number_of_workers(num_replicas, companion, dtype):
    alone = run(1, num_replicas, one_nan, dtype, companion)[0]
    for num_workers in (2, num_replicas):
        for bits in run(num_workers, num_replicas, one_nan, dtype, companion):
            assert bits == alone, f"{num_workers} workers"


@pytest.mark.torch
def test_bfloat16_tensors_are_added_up_in_float32_and_rounded_once():
    def body(collective):
        import torch

        told = []
        for size in (SMALL, 2 * LARGE):
            mine = [torch.full((size,), 256.0 if r == 0 else 1.0, dtype=torch.bfloat16) for r in collective.replicas]
            mine[0].requires_grad_()
            total = collective.all_reduce(mine)
            told.append([str(total.dtype), total.shape[0], np.unique(total.astype("f4")).tolist()])
        return told

    # 256 + 1 is 256 in bfloat16; 256 + 1 + 1 is not.
    assert run(2, 3, body) == [[["bfloat16", SMALL, [258.0]], ["bfloat16", 2 * LARGE, [258.0]]]] * 2


# Steps of a strategy.

UNEQUAL_REPLICAS = {  # what replica 0 gives, and what the others give
    "shapes": (lambda: np.ones((2, 3)), lambda: np.ones((3, 2))),
    "sizes_that_would_broadcast": (lambda: np.ones(4), lambda: np.ones(1)),
    "large_sizes": (lambda: np.ones(LARGE), lambda: np.ones(LARGE + 1)),
    "types": (lambda: np.ones(4, "f4"), lambda: np.ones(4, "f8")),
    "types_added_up_alike": (lambda: np.ones(4, "f4"), lambda: np.ones(4, "f2")),
    "numbers_of_arrays": (lambda: [np.ones(4)], lambda: [np.ones(2), np.ones(2)]),
}


def step_with_unequal_replicas(collective, kind):
    first, others = UNEQUAL_REPLICAS[kind]
    strategy = strategy_of(collective)
    return kind_of(lambda: strategy.sum_over_replicas(lambda replica: first() if replica == 0 else others()))


@pytest.mark.parametrize("num_workers", [1, 2])
@pytest.mark.parametrize("kind", UNEQUAL_REPLICAS)
def test_replicas_that_give_unequal_arrays_are_told_to_all_workers(kind, num_workers):
    assert run(num_workers, 2, step_with_unequal_replicas, kind) == ["MismatchError"] * num_workers


def test_an_unequal_replica_beside_others_on_its_worker_ends_the_run():
    def body(collective):
        strategy_of(collective).sum_over_replicas(lambda replica: np.ones(4 if replica < 3 else 1))

    outcome = run_workers(2, 4, body).outcome
    assert (outcome.exit_code, outcome.failed_worker, outcome.failure["error"]) == (1, 1, "MismatchError")
    assert "Replica 3 gave float64[1], another one float64[4]." in outcome.failure["traceback"]


def skip_a_step(collective, skipping: tuple[int, ...], size: int) -> list:
    """Four steps; in the third, these replicas' workers catch an error and go on."""
    strategy, told = strategy_of(collective), []
    for step in range(4):

        def compute(replica: int, step: int = step):
            if step == 2 and replica in skipping:
                raise FloatingPointError("a step that one of us cannot do")
            return np.full(size, 10.0**step)

        try:
            told.append(float(strategy.sum_over_replicas(compute)[0]))
        except FloatingPointError:
            told.append("skipped")
        except DuokaError as error:
            return [*told, type(error).__name__]
    return told


@pytest.mark.parametrize("size", [SMALL, LARGE])
@pytest.mark.parametrize("replica", [0, 1])
def test_a_step_that_one_worker_skips_is_told_to_all(replica, size):
    """Replica 1 fails once the step has begun with replica 0; replica 0 before that."""
    expected = [[4.0, 40.0, "skipped", "MismatchError"], [4.0, 40.0, "MismatchError"]]
    assert run(2, 4, skip_a_step, (replica,), size) == expected


@pytest.mark.parametrize("size", [SMALL, LARGE])
@pytest.mark.parametrize("replicas", [(0, 2), (1, 3), (0, 3)])
def test_a_step_that_all_workers_skip_is_as_if_it_had_not_been(replicas, size):
    assert run(2, 4, skip_a_step, replicas, size) == [[4.0, 40.0, "skipped", 4000.0]] * 2


def test_a_large_sum_within_a_step_leaves_the_numbers_of_the_step_alone():
    def body(collective):
        def compute(replica: int):
            collective.all_reduce([np.full(LARGE, 5000.0) for _ in collective.replicas])
            return np.full(LARGE, 10.0**replica)

        return np.unique(strategy_of(collective).sum_over_replicas(compute)).tolist()

    for num_workers in (1, 2):
        assert run(num_workers, 4, body) == [[1111.0]] * num_workers


# Workers that do not come.


def be_late(collective, how: Callable[[], None]) -> None:
    collective.barrier()
    if collective.worker == 1:
        how()
    collective.all_reduce(ones(collective, SMALL))


@pytest.mark.parametrize(
    "how, told",
    [
        pytest.param(lambda: time.sleep(30), "was stuck (no CPU time used, same stack for ", id="sleeping"),
        pytest.param(lambda: os.kill(os.getpid(), signal.SIGSTOP), "was stopped (SIGSTOP) for ", id="stopped"),
    ],
)
def test_one_that_does_not_come_is_named_and_killed_and_its_values_are_missing(how, told):
    launched = run_workers(3, 3, be_late, how, deadline_s=0.5)
    warning, loss = launched.said
    assert warning.startswith("worker 1 (cpu:0/v1) has not arrived at step 0 for ")
    assert ("in be_late" in warning) == (how.__code__.co_names[0] == "time")  # one that is stopped cannot show it
    assert loss.startswith(f"worker 1 (cpu:0/v1) {told}")
    outcome = launched.outcome
    assert outcome.exit_code == 128 + signal.SIGKILL and outcome.lost == [(1, signal.SIGKILL)]
    assert outcome.failed_worker in (0, 2) and outcome.failure["error"] == "WorkerLost"


def test_a_warning_names_the_phase_in_which_the_missing_worker_hangs_and_others_do_its_part():
    def body(collective):
        if collective.worker == 1:
            collective.moment = lambda name: time.sleep(30 if name == "arrived" else 0)
        buffer = collective.buffer(LARGE, "f4")
        exchange = collective.exchange([buffer], "gradients")
        while exchange.missing:
            for replica in exchange.missing:
                exchange.slot(buffer, replica)[:] = replica + 1
                exchange.deposit(replica)
            exchange.commit()
        return float(exchange.result(buffer).sum())

    launched = run_workers(2, 2, body, deadline_s=0.5)
    assert launched.outcome.exit_code == 0 and launched.results == {0: 3.0 * LARGE}
    assert launched.said[0].startswith("worker 1 (cpu:0/v1) has not added its part at step 0 for ")


def test_workers_that_wait_for_one_another_end_with_a_deadline():
    """It cannot come to this by calls in order; a message that got lost would do it."""

    def body(collective):
        collective.meeting._mailbox.send = lambda receivers, message: None
        collective.barrier()

    launched = run_workers(2, 2, body, deadline_s=0.5)
    outcome = launched.outcome
    assert (outcome.exit_code, outcome.failure["error"], outcome.lost) == (75, "DeadlineExceeded", [])
    assert re.search(r"has not arrived at step 0 for 0\.5 s \(barrier at \S+:\d+\)", outcome.failure["traceback"])


def test_a_worker_that_leaves_early_is_named_to_those_who_wait_for_it():
    def body(collective):
        for _ in range(2 if collective.worker == 1 else 3):
            collective.barrier()

    outcome = run_workers(3, 3, body).outcome
    assert (outcome.exit_code, outcome.failure["error"]) == (1, "WorkerLeft")
    assert outcome.failed_worker in (0, 2)
    told = outcome.failure["traceback"]
    assert "worker 1 (cpu:0/v1) has finished its script" in told
    assert "it took part in 2 calls, and this is call 3" in told


def leave_after_the_last_barrier(collective) -> int:
    """Worker 2 is heard by worker 0 first, which then leaves. Worker 1 reads of both departures at the same time."""
    meeting = collective.meeting
    collective.barrier()
    if collective.worker == 2:
        send = meeting._mailbox.send

        def send_late_to_worker_1(receivers, message) -> None:
            send([0], message)
            wait_until_gone(meeting, 0)
            send([1], message)

        meeting._mailbox.send = send_late_to_worker_1
    if collective.worker == 1:
        receive = meeting._link.receive

        def receive_late(timeout_s: float):
            wait_until_gone(meeting, 2)
            return receive(timeout_s)

        meeting._link.receive = receive_late
    collective.barrier()
    return meeting.completed


def wait_until_gone(meeting, worker: int) -> None:
    """And until the supervisor has told of it."""
    end = time.monotonic() + 5
    while os.path.exists(f"/proc/{meeting._board.read(worker).pid}") and time.monotonic() < end:
        time.sleep(0.001)
    time.sleep(0.1)


def test_a_worker_that_has_come_to_the_last_call_and_left_is_not_missed():
    assert run(3, 3, leave_after_the_last_barrier) == [2, 2, 2]
