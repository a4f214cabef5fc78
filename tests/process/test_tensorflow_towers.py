"""Towers in one process: their devices, and the mean of their gradients."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.tensorflow
SCRIPT = Path(__file__).with_name("tensorflow_towers.py")


@pytest.fixture(scope="module")
def facts() -> dict:
    environ = os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, timeout=200, env=environ)
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("FACTS "))
    return json.loads(line.removeprefix("FACTS "))


def test_towers_get_logical_cpus_where_there_are_no_gpus(facts):
    assert facts["devices"] == ["/CPU:0", "/CPU:1"]
    assert facts["placed"].endswith("CPU:1")


def test_the_mean_is_as_exact_as_a_tree_can_be(facts):
    assert sorted(facts["worst"], key=int) == ["1", "2", "3", "5", "8", "13"]
    for num_towers, error in facts["worst"].items():
        assert error <= 1, num_towers


def test_the_same_order_gives_the_same_bits_eager_and_in_a_graph(facts):
    three, again, *others = facts["digests"]
    assert three == again
    assert len({three, *others}) == 4


def test_slices_stay_slices_and_what_is_missing_counts_as_zero(facts):
    third = pytest.approx(1 / 3)
    assert facts["sparse"]["indices"] == [0, 1, 1, 1, 5]
    assert facts["sparse"]["summed"] == [third, pytest.approx(1), 0, 0, 0, third]
    assert facts["sparse"]["dense"] == [pytest.approx(4 / 3)] * 3
    assert facts["sparse"]["none"]
    assert facts["sparse"]["mixed"] == [1, 0.5, 0.5, 0.5, 0.5, 0.5]
    assert facts["sparse"]["wide"] == [40000] * 4


def test_two_towers_train_as_one_device_does(facts):
    assert facts["one_device"] <= 1e-5


def test_old_graphs_with_plain_variables_can_use_it(facts):
    assert facts["old_graph"] == [2.5, 0.5]


def test_what_does_not_fit_is_an_error_that_says_what_to_do(facts):
    words = {
        "number": "0 towers cannot be made",
        "late": "5 logical CPUs cannot be made any more: there are 2",
        "empty": "no towers",
        "lengths": "different numbers of gradients: 1, 0",
        "pairs": "where a pair (gradient, variable) belongs",
        "shapes": "have different shapes: (2,), (3,)",
    }
    for name, text in words.items():
        assert text in facts["errors"][name], name
        assert "  do   " in facts["errors"][name], name
