"""Towers in one process: their devices, and the mean of their gradients."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.limits import START_S

pytestmark = pytest.mark.tensorflow
SCRIPT = Path(__file__).with_name("tensorflow_towers.py")
EXAMPLE = Path(__file__).parents[2] / "examples" / "cifar10_towers"


@pytest.fixture(scope="module")
def facts() -> dict:
    (line,) = (line for line in run(SCRIPT).splitlines() if line.startswith("FACTS "))
    return json.loads(line.removeprefix("FACTS "))


def run(script: Path, *options: str, directory: Path | None = None) -> str:
    environ = os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}
    words = [sys.executable, str(script), *options]
    done = subprocess.run(words, capture_output=True, text=True, timeout=START_S, env=environ, cwd=directory)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_towers_get_logical_cpus_where_there_are_too_few_gpus_and_this_is_said(facts):
    assert facts["devices"] == ["/CPU:0", "/CPU:1"]
    assert facts["placed"].endswith("CPU:1")
    assert facts["said"] == "duoka: 1 GPU here: tower_devices(2) uses 2 logical CPUs\n"


def test_towers_on_what_is_here_need_no_words(facts):
    assert facts["with two cards"] == [[["/GPU:0", "/GPU:1"], ""], [["/GPU:0", "/GPU:1"], ""], [["/CPU:0"], ""]]


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


@pytest.mark.slow
@pytest.mark.parametrize(("name", "rate"), [("today.py", "0.0500"), ("graph.py", "0.0100")])
def test_the_example_learns_on_two_towers_and_goes_on_from_its_newest_checkpoint(name, rate, tmp_path):
    first = run(EXAMPLE / name, "--steps", "20", "--batch-size", "64", directory=tmp_path)
    again = run(EXAMPLE / name, "--steps", "30", "--batch-size", "64", directory=tmp_path)
    line = rf"step (\d+)  loss ([\d.]+)  rate {rate}  \d+ images/s"
    assert [step for step, _ in re.findall(line, first)] == ["10", "20"]
    assert "goes on from" not in first
    assert "goes on from" in again
    ((step, loss),) = re.findall(line, again)
    assert step == "30"
    assert float(loss) < 1.5  # 2.3 at the start


@pytest.mark.slow
@pytest.mark.parametrize("name", ["today.py", "graph.py"])
def test_the_example_has_the_losses_of_one_tower(name, tmp_path):
    losses = []
    for towers in ("1", "2"):
        options = ("--steps", "20", "--batch-size", "64", "--towers", towers, "--checkpoints", towers)
        losses.append(
            [float(loss) for loss in re.findall(r"loss ([\d.]+)", run(EXAMPLE / name, *options, directory=tmp_path))]
        )
    assert losses[0] == pytest.approx(losses[1], rel=2e-3)
