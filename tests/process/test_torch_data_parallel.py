"""`duoka.torch.DataParallel`: the same call as PyTorch's, and the numbers of one device."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from duoka.errors import MismatchError
from duoka.frameworks.torch.splitting import Splitting
from tests.conftest import run_workers
from tests.limits import START_S
from tests.process.results import read_result

pytestmark = [pytest.mark.torch]
SCRIPT = Path(__file__).parent / "torch_data_parallel.py"


@lru_cache
def run(num_devices: int) -> dict:
    words = [str(num_devices)] if num_devices else ["1", "--plain"]
    with tempfile.TemporaryDirectory() as directory:
        done = subprocess.run(
            [sys.executable, str(SCRIPT), *words], capture_output=True, text=True, timeout=START_S, cwd=directory
        )
    assert done.returncode == 0, done.stderr[-3000:]
    return read_result(done.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("num_devices", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_a_script_for_data_parallel_trains_to_the_numbers_of_one_device(num_devices):
    plain, ours = run(0), run(num_devices)
    for name, weights in plain.items():
        assert list(ours[name]) == list(weights)
        for tensor, expected in weights.items():
            a, b = np.array(ours[name][tensor]), np.array(expected)
            assert np.abs(a - b).max() <= 1e-5 * np.abs(b).max(), (name, tensor)


def whole(collective) -> list:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
    split = Splitting(net, collective, 0, torch.device("cpu"), axis=0)
    out = split(torch.ones(8, 3))
    out.sum().backward()
    masks = (out.detach() == 0).numpy()
    return [masks, net[1].running_mean.numpy(), net[0].weight.grad.numpy(), len({m.tobytes() for m in masks})]


def test_workers_have_the_same_output_and_gradients_but_masks_of_their_own():
    launched = run_workers(2, 2, whole)
    assert launched.outcome.exit_code == 0, launched.outcome
    (masks, mean, grad, distinct), other = launched.results[0], launched.results[1]
    assert np.array_equal(masks, other[0]) and np.array_equal(mean, other[1]) and np.array_equal(grad, other[2])
    assert distinct > 1


def give_different_sizes(collective) -> None:
    net = nn.Bilinear(3, 3, 2)
    Splitting(net, collective, 0, torch.device("cpu"), axis=0)(torch.ones(8, 3), torch.ones(7, 3))


def test_inputs_of_different_sizes_are_refused():
    launched = run_workers(2, 2, give_different_sizes)
    assert launched.outcome.failure["error"] == MismatchError.__name__
    assert "sizes [7, 8] along dimension 0" in launched.outcome.failure["traceback"]
