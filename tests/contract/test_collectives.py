"""What every collective promises: one worker alone, real workers that share memory, and those that use a library."""

from __future__ import annotations

import hashlib
from functools import partial

import ml_dtypes
import numpy as np
import pytest
import torch

from duoka.collectives.solo import solo
from duoka.collectives.torch_distributed import TorchDistributed
from tests.conftest import run_workers

SMALL, LARGE, ODD = 7, 300_000, 70_001
DTYPES = ["float32", "float64", "float16", "bfloat16", "int32", "int64", "uint8", "complex64"]


def run_alone(num_workers, num_replicas, body, *args):
    assert num_workers == 1
    return {0: body(solo(num_replicas, available_bytes=lambda: 2**40), *args)}


def run_shared(num_workers, num_replicas, body, *args):
    launched = run_workers(num_workers, num_replicas, body, *args)
    assert launched.outcome.exit_code == 0, launched.outcome.failure
    assert len(launched.results) == num_workers
    return launched.results


def run_by_torch(num_workers, num_replicas, body, *args):
    def body_on_tensors(control):
        return body(TorchDistributed(control, "gloo", torch.device("cpu"), exact=True), *args)

    return run_shared(num_workers, num_replicas, body_on_tensors)


IMPLEMENTATIONS = [
    pytest.param(partial(run_alone, 1), id="solo"),
    pytest.param(partial(run_shared, 1), id="shm-1"),
    pytest.param(partial(run_shared, 2), id="shm-2"),
    pytest.param(partial(run_shared, 3), id="shm-3"),
    pytest.param(partial(run_by_torch, 1), id="torch-1", marks=pytest.mark.torch),
    pytest.param(partial(run_by_torch, 2), id="torch-2", marks=pytest.mark.torch),
    pytest.param(partial(run_by_torch, 3), id="torch-3", marks=pytest.mark.torch),
]
everywhere = pytest.mark.parametrize("run", IMPLEMENTATIONS)


def digest(*arrays: np.ndarray) -> str:
    return hashlib.sha256(b"".join(np.ascontiguousarray(a).tobytes() for a in arrays)).hexdigest()


def cancelling(num_replicas: int, size: int, seed: int = 0) -> np.ndarray:
    """Random float32 whose sum depends on the order: huge values that nearly cancel."""
    rng = np.random.default_rng(seed)
    values = rng.normal(size=(num_replicas, size)) * 10.0 ** rng.integers(-6, 7, size=(num_replicas, size))
    values[num_replicas // 2 :] -= values[: num_replicas - num_replicas // 2]
    return values.astype(np.float32)


def as_dtype(values: np.ndarray, name: str) -> np.ndarray:
    dtype = ml_dtypes.bfloat16 if name == "bfloat16" else np.dtype(name)
    return (values * 10).astype(dtype) if np.dtype(dtype).kind in "iu" else values.astype(dtype)


def sums_of_every_size(collective):
    hashes = []
    for size in (1, SMALL, ODD, LARGE):
        values = cancelling(collective.num_replicas, size)
        mine = [values[r] for r in collective.replicas]
        counts = [float(r % 3) for r in collective.replicas]
        hashes.append(digest(collective.all_reduce(mine)))
        if collective.num_replicas > 1:
            hashes.append(digest(collective.all_reduce(mine, "mean", weights=counts)))
        buffers = [collective.buffer(size, "f4"), collective.buffer(3, "f8")]
        for _ in range(3):
            exchange = collective.exchange(buffers)
            for replica in exchange.missing:
                np.asarray(exchange.slot(buffers[0], replica))[:] = values[replica]
                exchange.slot(buffers[1], replica)[:] = replica + 0.1
                exchange.deposit(replica, b"note %d" % replica)
            assert exchange.commit()
            assert exchange.notes == [b"note %d" % r for r in range(collective.num_replicas)]
            hashes.append(digest(exchange.result(buffers[0]), exchange.result(buffers[1])))
    return hashes


@pytest.mark.torch
@pytest.mark.parametrize("num_replicas", [1, 2, 3, 4, 5, 8])
def test_a_library_that_carries_exact_sums_gives_the_same_bits(num_replicas):
    expected = run_alone(1, num_replicas, sums_of_every_size)[0]
    for num_workers in range(1, min(3, num_replicas) + 1):
        for worker, hashes in run_by_torch(num_workers, num_replicas, sums_of_every_size).items():
            assert hashes == expected, f"{num_workers} workers, worker {worker}"


@pytest.mark.parametrize("num_replicas", [1, 2, 3, 5, 8, pytest.param(12, marks=pytest.mark.slow)])
def test_any_number_of_workers_gives_the_same_bits(num_replicas):
    expected = run_alone(1, num_replicas, sums_of_every_size)[0]
    for num_workers in range(1, num_replicas + 1):
        for worker, hashes in run_shared(num_workers, num_replicas, sums_of_every_size).items():
            assert hashes == expected, f"{num_workers} workers, worker {worker}"


def test_the_order_of_the_sum_matters_for_the_data_of_these_tests():
    """Else equal bits would prove nothing."""
    values = cancelling(12, LARGE)
    in_line = np.add.reduce(values, axis=0, dtype=np.float32)
    tree = run_alone(1, 12, lambda c: c.all_reduce(list(values)))[0]
    assert (in_line != tree).mean() > 0.2


def reduce_each_dtype(collective):
    results = {}
    for name in DTYPES:
        for size in (SMALL, LARGE):
            rng = np.random.default_rng(1)
            values = as_dtype(rng.uniform(-2, 2, size=(collective.num_replicas, size)), name)
            total = collective.all_reduce([values[r] for r in collective.replicas])
            assert total.dtype == values.dtype and total.shape == (size,)
            results[f"{name}{size}"] = total.astype("c16" if name == "complex64" else "f8")
    return results


@everywhere
def test_sums_are_right_in_every_type(run):
    for results in run(5, reduce_each_dtype).values():
        for name in DTYPES:
            for size in (SMALL, LARGE):
                rng = np.random.default_rng(1)
                values = as_dtype(rng.uniform(-2, 2, size=(5, size)), name)
                if name == "uint8":
                    expected = values.sum(axis=0, dtype=np.uint8).astype(float)
                else:
                    expected = values.astype("c16" if name == "complex64" else "f8").sum(axis=0)
                bound = {"bfloat16": 2**-7, "float16": 2**-10}.get(name, 1e-5)
                np.testing.assert_allclose(results[f"{name}{size}"], expected, rtol=bound, atol=bound)


def weighted_mean(collective):
    values = np.arange(collective.num_replicas, dtype=np.float32)
    weights = [0.0 if r == 1 else r + 1.0 for r in collective.replicas]
    mine = [np.full(SMALL, np.nan if r == 1 else values[r], np.float32) for r in collective.replicas]
    large = [np.full(LARGE, np.nan if r == 1 else values[r], np.float32) for r in collective.replicas]
    small_mean = collective.all_reduce(mine, "mean", weights=weights)
    return [small_mean, collective.all_reduce(large, "mean", weights=weights)]


@everywhere
def test_a_mean_divides_by_all_weights_and_leaves_weight_zero_out_even_if_it_is_nan(run):
    expected = (0 * 1 + 2 * 3 + 3 * 4) / (1 + 3 + 4)
    for small, large in run(4, weighted_mean).values():
        np.testing.assert_allclose(small, np.full(SMALL, expected, np.float32))
        np.testing.assert_allclose(large, np.full(LARGE, expected, np.float32))


def gather_unequal(collective):
    sizes = [0, 3, 200_000, 1, 50_000]
    values = [np.arange(sizes[r], dtype="f8" if r % 2 else "i4") for r in collective.replicas]
    gathered = collective.all_gather(values)
    matrices = collective.all_gather([np.full((2, r), r) for r in collective.replicas])
    return [[g.size for g in gathered], [float(g.sum()) for g in gathered], [list(m.shape) for m in matrices]]


@everywhere
def test_gather_keeps_the_order_of_replicas_and_their_unequal_sizes(run):
    sizes = [0, 3, 200_000, 1, 50_000]
    for counts, sums, shapes in run(5, gather_unequal).values():
        assert counts == sizes
        assert sums == [float(np.arange(n).sum()) for n in sizes]
        assert shapes == [[2, r] for r in range(5)]


def broadcast_all_kinds(collective):
    results = []
    for root in range(collective.num_replicas):
        for size in (0, 1, 1_000_000):
            value = np.arange(size) * (root + 1) if root in collective.replicas else None
            results.append(float(collective.broadcast(value, root=root).sum()))
    return results


@everywhere
def test_a_broadcast_reaches_everybody_from_every_replica(run):
    expected = [float((np.arange(n) * (root + 1)).sum()) for root in range(4) for n in (0, 1, 1_000_000)]
    for results in run(4, broadcast_all_kinds).values():
        assert results == expected


def hand_over_bytes(collective):
    """Written by one, read by all behind a barrier, in room that was reserved twice."""
    read = []
    for nbytes in (10, 100_000):
        place = collective.common(nbytes)
        for root in range(collective.num_replicas):
            if root in collective.replicas:
                place[:] = root + 1
            collective.barrier()
            read.append([place.nbytes, int(place.min()), int(place.max())])
            collective.barrier()
    return read


@everywhere
def test_bytes_in_common_are_seen_by_all(run):
    for read in run(4, hand_over_bytes).values():
        assert read == [[nbytes, root, root] for nbytes in (10, 100_000) for root in (1, 2, 3, 4)]


def many_barriers(collective):
    for _ in range(200):
        collective.barrier()
    return collective.meeting.completed


@everywhere
def test_barriers_can_follow_one_another_closely(run):
    assert set(run(4, many_barriers).values()) == {200}


def out_is_used(collective):
    out = np.zeros((2, 4))
    result = collective.all_reduce([np.ones((2, 4)) for _ in collective.replicas], out=out)
    return [bool(result is out), out]


@everywhere
def test_a_result_can_be_written_into_memory_of_the_caller(run):
    for is_same, out in run(3, out_is_used).values():
        assert is_same
        np.testing.assert_array_equal(out, np.full((2, 4), 3.0))


def result_is_private(collective):
    value = np.ones(LARGE, np.float32)
    first = collective.all_reduce([value for _ in collective.replicas])
    first *= 2
    second = collective.all_reduce([value for _ in collective.replicas])
    return [float(first[0]), float(second[0]), float(value[0])]


@everywhere
def test_changing_a_result_changes_nothing_for_anybody(run):
    for values in run(3, result_is_private).values():
        assert values == [6.0, 3.0, 1.0]
