"""PyTorch trainings on real workers: the numbers of the plain script, and bits that do not depend on the workers."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from functools import lru_cache
from pathlib import Path

import pytest

from tests.process.results import read_result

pytestmark = [pytest.mark.torch]
HERE = Path(__file__).parent
USUAL, UNUSUAL = HERE / "torch_scenarios.py", HERE / "torch_unusual.py"
# How near to one device: with one more rounding per replica nothing is equal in bits.
NUMBERS = {
    "sgd": 1e-5,
    "adam": 1e-3,  # in float32 it blows up rounding where gradients are near zero
    "adam_float64": 1e-12,
    "last_batch_of_one": 1e-5,
    "two_backwards": 1e-5,
    "reentrant_checkpoint": 1e-5,
    "frozen_then_unfrozen": 1e-5,
    "frozen_statistics": 1e-5,
    "tied_and_unused": 1e-5,
    "stream": 1e-5,
    "padded_tokens": 1e-5,
    "sum_loss": 1e-5,
}
# Trainings that exchange in the middle of a step: a worker's rows are one batch, so bits hold for that many workers.
WHOLE_SHARES = {
    "gan": 1e-5,
    "synced_sgd": 1e-4,
    "synced_adam_float64": 1e-11,
    "synced_weighed": 1e-11,
}
MORE_NUMBERS = WHOLE_SHARES | {
    "accumulated": 1e-5,
    "accumulated_by_hand": 1e-5,
    "sparse_table": 1e-5,
    "complex_and_mixed": 1e-5,
    "two_loaders": 1e-5,
    "a_layer_added_later": 1e-5,
    "weighed_twice": 1e-12,
}
# Equal bits, but not one device's numbers: 16-bit rounding and overflow depend on the size of a share, buffers that
# are not statistics are replica 0's, and an order that is drawn is drawn from Duoka's seed.
BITS_ONLY = (
    "bfloat16_autocast",
    "scaled_float16",
    "buffers_of_all_kinds",
    "kept_loader_workers",
    "drawn_while_loading",
    "accumulated_with_a_queue",
)


@lru_cache
def run(num_workers: int, num_replicas: int, *names: str, script: Path = USUAL) -> dict:
    words = [str(script), *names]
    if num_replicas:
        words = ["-m", "duoka", "run", "--devices", str(num_workers), "--replicas", str(num_replicas), *words]
    else:
        words.append("--plain")
    with tempfile.TemporaryDirectory() as directory:
        environment = os.environ | {"PYTHONPATH": str(HERE.parent.parent)}
        done = subprocess.run(
            [sys.executable, *words], capture_output=True, text=True, timeout=170, cwd=directory, env=environment
        )
    assert done.returncode == 0, done.stderr[-3000:]
    return read_result(done.stdout)


@pytest.mark.parametrize("num_workers", [*(pytest.param(number, marks=pytest.mark.slow) for number in (2, 4)), 3])
def test_four_replicas_end_with_the_same_bits_on_any_number_of_workers(num_workers):
    alone, together = run(1, 4), run(num_workers, 4)
    assert {name: r["sha256"] for name, r in together.items()} == {name: r["sha256"] for name, r in alone.items()}


@pytest.mark.parametrize("num_replicas", [3, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2, 4, 8))])
def test_replicas_train_to_the_numbers_of_the_plain_script(num_replicas):
    _compare(run(0, 0, *NUMBERS), run(1, num_replicas, *NUMBERS), NUMBERS)


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [2, 3])
def test_unusual_loops_end_with_the_same_bits_on_any_number_of_workers(num_workers):
    names = [name for name in (*MORE_NUMBERS, *BITS_ONLY) if name not in WHOLE_SHARES]
    alone = run(1, 4, *names, script=UNUSUAL)
    together = run(num_workers, 4, *MORE_NUMBERS, *BITS_ONLY, script=UNUSUAL)
    assert {name: together[name]["sha256"] for name in names} == {name: alone[name]["sha256"] for name in names}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_workers", "num_replicas"),
    [
        (1, 3),
        *(pytest.param(*numbers, marks=pytest.mark.slow) for numbers in ((3, 4), (2, 4), (2, 3), (1, 8))),
    ],
)
def test_unusual_loops_train_to_the_numbers_of_the_plain_script(num_workers, num_replicas):
    names = MORE_NUMBERS if num_replicas != 4 else (*MORE_NUMBERS, *BITS_ONLY)
    plain = run(0, 0, *MORE_NUMBERS, script=UNUSUAL)
    _compare(plain, run(num_workers, num_replicas, *names, script=UNUSUAL), MORE_NUMBERS)


@pytest.mark.slow
def test_a_compiled_model_with_uneven_shares_ends_with_the_same_bits():
    alone, *others = (run(workers, 4, "compiled", script=UNUSUAL)["compiled"]["sha256"] for workers in (1, 2, 3))
    assert set(others) == {alone}


def _compare(plain: dict, ours: dict, bounds: dict[str, float]) -> None:
    for name, bound in bounds.items():
        for tensor, expected in plain[name]["weights"].items():
            difference = _largest(ours[name]["weights"][tensor], expected)
            assert difference <= bound, f"{name}: {tensor} differs by {difference:.1e}"


@pytest.mark.slow
def test_the_number_of_replicas_itself_changes_bits():
    """Else the tests above would compare nothing."""
    assert run(1, 2, *NUMBERS)["sgd"]["sha256"] != run(1, 4)["sgd"]["sha256"]


def _largest(ours, expected) -> float:
    """max|a - b| / max|b| of a tensor as nested lists."""
    import numpy as np

    a, b = np.array(ours), np.array(expected)
    return float(np.abs(a - b).max() / max(np.abs(b).max(), 1e-12))
