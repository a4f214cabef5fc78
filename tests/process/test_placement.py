"""Where things are placed, on real workers: `duoka.device`, log_placement, memory limits and logical devices."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from functools import lru_cache
from pathlib import Path

import pytest

from tests.limits import START_S

HERE = Path(__file__).parent
QUIET = {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "", "KERAS_BACKEND": "tensorflow"}


def run(directory: Path, *words: str, **environ: str) -> subprocess.CompletedProcess:
    everything = os.environ | QUIET | environ
    return subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, timeout=START_S, cwd=directory, env=everything
    )


ONCE = """
import duoka

strategy = duoka.Mirrored(devices={num_devices}, log_placement=True)

import keras
import tensorflow as tf

weight, optimizer = tf.Variable(tf.ones((3, 1)), name="weight"), keras.optimizers.SGD(0.1)

def train_step(x):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.matmul(x, weight))
    optimizer.apply([tape.gradient(loss, weight)], [weight])

tf.function(strategy.run)(train_step, args=(tf.ones((4, 3)),))
strategy.print("steps", strategy.step)
"""


@pytest.fixture(scope="module")
def on_two_workers(tmp_path_factory):
    """What the workers of a script print, by worker, and what else is said."""

    @lru_cache
    def look(script: str) -> tuple[list[dict], str]:
        done = run(tmp_path_factory.mktemp("run"), str(HERE / script))
        assert done.returncode == 0, done.stderr[-3000:]
        lines = [line.partition("FACTS ")[2] for line in done.stdout.splitlines() if "FACTS " in line]
        facts = sorted(map(json.loads, lines), key=lambda each: each["worker"])
        assert [each["worker"] for each in facts] == [0, 1]
        return facts, done.stderr

    return look


def tables(said: str) -> list[dict[tuple[str, str], tuple[str, str]]]:
    """The tables of placement: (what, name) -> (of, device)."""
    found: list[dict] = []
    for line in said.splitlines():
        text = line.removeprefix("duoka: ")
        if text.startswith("placement of the first step"):
            found.append({})
        elif found and text.startswith(("variable ", "operations ", "program ", "parameter ", "buffer ")):
            what, name, of, device = (cell for cell in text.split("  ") if cell.strip())
            found[-1][what.strip(), name.strip()] = of.strip(), device.strip()
    return found


@pytest.fixture
def tensorflow(on_two_workers):
    return on_two_workers("tensorflow_placement.py")


@pytest.fixture
def torch(on_two_workers):
    return on_two_workers("torch_placement.py")


@pytest.mark.slow
@pytest.mark.tensorflow
def test_device_count_makes_logical_cpus_and_their_names_lead_there(tensorflow):
    for facts in tensorflow[0]:
        assert facts["cpus"] == 3
        assert facts["own"] == "CPU:0"
        assert facts["third"] == "CPU:2"
    assert 'duoka: device_count={"GPU": 1}: 0 GPUs here' in tensorflow[1]


@pytest.mark.slow
@pytest.mark.tensorflow
def test_what_is_not_here_or_another_worker_s_is_said_once_or_an_error(tensorflow):
    facts, said = tensorflow
    for each in facts:
        worker = each["worker"]
        assert each["missing"] == ["CPU:0", "CPU:0"]
        assert each["other"] == "CPU:0"
        assert said.count(f"gpu:7 is not here: what is placed there runs on cpu:0/v{worker}") == 1
        assert said.count(f"cpu:0/v{1 - worker} is not this worker's device: what is placed there runs on") == 1
        missing, other = each["errors"]
        assert missing.startswith("gpu:7 is not here.")
        assert other.startswith(f"cpu:0/v{1 - worker} is not this worker's device.")
        assert f"Here are: cpu:0/v{worker}." in other


@pytest.mark.slow
@pytest.mark.tensorflow
def test_fit_logs_one_table_of_variables_and_operations(tensorflow):
    facts, said = tensorflow
    assert facts[0]["loss"] == facts[1]["loss"]
    fit, *_ = tables(said)
    assert fit["variable", "sequential/dense/kernel"] == ("float32 (4, 8)", "cpu:0/v0")
    layers = [of for (what, name), (of, _) in fit.items() if what == "operations" and "/dense" in name]
    assert any("MatMul" in of for of in layers)
    assert fit["program", "optimizer.apply"] == ("compiled as one", "cpu:0/v0")
    assert {device for _, device in fit.values()} == {"cpu:0/v0"}


@pytest.mark.tensorflow
@pytest.mark.slow
@pytest.mark.parametrize("num_devices", [1, 2])
def test_a_loop_that_runs_once_in_a_graph_is_shown_at_the_end_and_counted(tmp_path, num_devices):
    (tmp_path / "once.py").write_text(ONCE.format(num_devices=num_devices))
    done = run(tmp_path, "once.py")
    assert done.returncode == 0, done.stderr[-3000:]
    assert "steps 1" in done.stdout
    (table,) = tables(done.stderr)
    assert table["variable", "weight:0"][0] == "float32 (3, 1)"
    assert any("MatMul" in of for (what, _), (of, _) in table.items() if what == "operations")


@pytest.mark.slow
@pytest.mark.tensorflow
def test_a_loop_s_step_is_shown_where_it_ran_and_not_where_it_was_requested(tensorflow):
    facts, said = tensorflow
    assert facts[0]["value"] == 48.0
    *_, own = tables(said)
    assert own["variable", "far:0"][1] == "cpu:1"
    assert own["variable", "near:0"][1] == "cpu:0"
    assert own["operations", "tower"][1] == "cpu:2"
    assert own["operations", "loss"][1] == "cpu:0"
    assert "gpu" not in " ".join(device for _, device in own.values())


@pytest.mark.slow
@pytest.mark.tensorflow
def test_a_loop_with_variables_on_two_devices_trains_and_shows_them(tensorflow):
    facts, said = tensorflow
    assert [each["apart"] for each in facts] == [pytest.approx(0.25)] * 2  # 1 - 0.1 * 2 * 5, then with momentum
    _, run, _ = tables(said)
    assert run["variable", "apart:0"][1] == "cpu:1"
    assert run["variable", "near:0"][1] == "cpu:0/v0"


@pytest.mark.slow
@pytest.mark.tensorflow
def test_a_memory_limit_of_the_strategy_is_real_and_growth_has_no_meaning_on_a_cpu(tensorflow):
    facts, said = tensorflow
    assert [each["limit_is_held"] for each in facts] == [True, True]
    assert "2 workers (cpu:0/v0 with 3000 MB, cpu:0/v1 with 3000 MB)" in said
    assert said.count("allow_growth=True has no meaning on a CPU") == 1


@pytest.mark.slow
@pytest.mark.tensorflow
def test_it_is_too_late_once_tensorflow_has_started_and_the_same_again_is_not(tmp_path):
    code = """
import duoka, keras, numpy as np, tensorflow as tf
from tensorflow.python.eager import context
from duoka.tensorflow import tower_devices
duoka.Mirrored(device_count={"CPU": 2})
with duoka.device("/cpu:1"):  # does not start it; tf.device would
    print(context.context()._initialized, tf.ones(()).device[-5:])
print(len(tf.config.list_logical_devices("CPU")), tower_devices(duoka.virtual_devices("cpu:0", count=2, memory_mb=64)))
strategy = duoka.Mirrored(device_count={"CPU": 2}, log_placement=True)
model = strategy.prepare(keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)]))
model.compile("sgd", "mse")
model.fit(np.ones((4, 2)), np.ones((4, 1)), batch_size=2, epochs=2, verbose=0)
duoka.Mirrored(device_count={"CPU": 3})
"""
    done = run(tmp_path, "-c", code)
    assert done.stdout.splitlines() == ["False CPU:1", "2 ['/CPU:0', '/CPU:1']"]
    assert 'It is too late for device_count={"CPU": 3}: TensorFlow has started.' in done.stderr
    assert "make the strategy at the top" in done.stderr
    (table,) = tables(done.stderr)
    assert table["variable", "sequential/dense/kernel"] == ("float32 (2, 1)", "cpu:0")
    assert any(what == "operations" and "/dense" in name for what, name in table)
    assert "TensorFlow has no memory limits for logical CPUs: cpu:0/v0, cpu:0/v1" in done.stderr


@pytest.mark.slow
@pytest.mark.torch
def test_a_torch_loop_logs_one_table_of_parameters_and_modules(torch):
    facts, said = torch
    (table,) = tables(said)
    assert table["parameter", "Sequential.2.1.weight"] == ("float32 (1, 8)", "cpu:0/v0")
    assert table["buffer", "Sequential.1.running_mean"] == ("float32 (8,)", "cpu:0/v0")
    assert table["operations", "Sequential.2.0"] == ("ReLU", "cpu:0/v0")
    assert table["operations", "Sequential"] == ("Sequential", "cpu:0/v0")
    assert [each["hooks"] for each in facts] == [0, 0]


@pytest.mark.slow
@pytest.mark.torch
def test_torch_makes_what_is_made_inside_on_the_device_that_takes_the_place(torch):
    facts, said = torch
    for each in facts:
        worker = each["worker"]
        assert each["place"] == f"cpu:0/v{worker}"
        assert each["made"] == ["cpu", "cpu"]
        assert each["error"].startswith(f"cpu:0/v{1 - worker} is not this worker's device.")
    assert said.count("gpu:3 is not here") == 2, "each worker names its own device"


@pytest.mark.slow
@pytest.mark.torch
def test_a_fraction_of_the_memory_is_held_to_and_logical_cpus_have_no_meaning(torch):
    facts, said = torch
    assert [each["limit_is_held"] for each in facts] == [True, True]
    assert said.count('device_count={"CPU": 4} has no meaning for PyTorch') == 1


def test_under_another_launcher_it_is_too_late_and_that_is_said(tmp_path):
    code = "import duoka; duoka.Mirrored(memory_fraction=0.8, device_count={'CPU': 2})"
    done = run(tmp_path, "-c", code, RANK="0", WORLD_SIZE="2")
    assert done.returncode == 1
    assert "torchrun has already started several copies of this script." in done.stderr
    assert "It is too late for memory_fraction=0.8 and device_count={'CPU': 2}, too." in done.stderr


def test_after_duoka_run_has_decided_on_devices_it_is_too_late(tmp_path):
    (tmp_path / "script.py").write_text("import duoka; duoka.Mirrored(memory_limit_mb=100)")
    done = run(tmp_path, "-m", "duoka", "run", "--devices", "1", "--replicas", "2", "script.py")
    assert done.returncode == 1
    assert "It is too late for memory_limit_mb=100." in done.stderr
    assert "leave --devices out" in done.stderr


def test_devices_can_be_placed_without_any_framework_and_none_is_imported(tmp_path):
    code = """
import sys, duoka
with duoka.device("/gpu:2") as first, duoka.device("cuda:2") as again:
    print(first, again, {"torch", "tensorflow", "keras", "jax"} & set(sys.modules))
duoka.device("gpu:2", soft_placement=False).__enter__()
"""
    done = run(tmp_path, "-c", code)
    assert done.stdout == "cpu:0 cpu:0 set()\n"
    assert done.stderr.count("gpu:2 is not here: what is placed there runs on cpu:0") == 1
    assert "Here are: cpu:0." in done.stderr


@pytest.mark.slow
@pytest.mark.torch
def test_the_first_block_of_the_documentation_runs_as_printed(tmp_path):
    page = (HERE.parents[1] / "docs" / "placement.md").read_text()
    block = re.search(r"```python\n(.*?)```", page, re.DOTALL)
    done = run(tmp_path, "-c", block[1])
    assert done.stdout == "cpu:0 cpu\n"
    assert "gpu:2 is not here" in done.stderr
