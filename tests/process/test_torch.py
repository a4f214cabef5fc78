"""PyTorch trainings on real workers: the numbers of the plain script, and bits that do not depend on the workers."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from functools import lru_cache
from pathlib import Path

import pytest

pytestmark = [pytest.mark.torch, pytest.mark.timeout(180)]
SCRIPT = Path(__file__).parent / "torch_scenarios.py"
# How near to one device: with one more rounding per replica nothing is equal in bits.
NUMBERS = {
    "sgd": 1e-5,
    "adam_float64": 1e-12,
    "last_batch_of_one": 1e-5,
    "two_backwards": 1e-5,
    "reentrant_checkpoint": 1e-5,
    "frozen_then_unfrozen": 1e-5,
    "tied_and_unused": 1e-5,
    "stream": 1e-5,
    "padded_tokens": 1e-5,
    "sum_loss": 1e-5,
}


@lru_cache
def run(num_workers: int, num_replicas: int, *names: str) -> dict:
    words = [str(SCRIPT), *names]
    if num_replicas:
        words = ["-m", "duoka", "run", "--devices", str(num_workers), "--replicas", str(num_replicas), *words]
    else:
        words.append("--plain")
    with tempfile.TemporaryDirectory() as directory:
        done = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=150, cwd=directory)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [line.partition("RESULT ")[2] for line in done.stdout.splitlines() if "RESULT " in line]
    assert len(lines) == 1, "all workers must end with the same line, which is shown once"
    return json.loads(lines[0])


@pytest.mark.parametrize("num_workers", [2, 3, 4])
def test_four_replicas_end_with_the_same_bits_on_any_number_of_workers(num_workers):
    alone, together = run(1, 4), run(num_workers, 4)
    assert {name: r["sha256"] for name, r in together.items()} == {name: r["sha256"] for name, r in alone.items()}


@pytest.mark.parametrize("num_replicas", [2, 3, 4, 8])
def test_replicas_train_to_the_numbers_of_the_plain_script(num_replicas):
    plain, ours = run(0, 0, *NUMBERS), run(1, num_replicas, *NUMBERS)
    for name, bound in NUMBERS.items():
        for tensor, expected in plain[name]["weights"].items():
            difference = _largest(ours[name]["weights"][tensor], expected)
            assert difference <= bound, f"{name}: {tensor} differs by {difference:.1e}"


def test_the_number_of_replicas_itself_changes_bits():
    """Else the tests above would compare nothing."""
    assert run(1, 2, *NUMBERS)["sgd"]["sha256"] != run(1, 4)["sgd"]["sha256"]


def _largest(ours, expected) -> float:
    """max|a - b| / max|b| of a tensor as nested lists."""
    import numpy as np

    a, b = np.array(ours), np.array(expected)
    return float(np.abs(a - b).max() / max(np.abs(b).max(), 1e-12))
