"""Plain loops that are ended in every way, and continue from their checkpoints with the bits of an undisturbed run."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from tests.limits import START_S
from tests.process.scripts import PYTHON, Ended, Run, write

pytestmark = [pytest.mark.torch]
LEAVES = ("torchinductor",)  # an empty folder of PyTorch's

SCRIPT = """
import hashlib, json, os, random, signal, sys, time
import duoka

given = json.loads(sys.argv[1])
asked = {"seed": given.get("seed", 0), "deadline_s": given.get("deadline_s", 60)}
strategy = duoka.Mirrored(devices=given["workers"], **asked)
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
random.seed(0)
model = nn.Sequential(nn.Linear(8, given.get("width", 16)), nn.Dropout(0.2), nn.Linear(given.get("width", 16), 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
data = TensorDataset(torch.randn(50, 8), torch.randn(50, 2))
loader = DataLoader(data, batch_size=8, shuffle=True, num_workers=given.get("loaders", 0))
model, optimizer, scheduler, loader = strategy.prepare(model, optimizer, scheduler, loader)
def handle(number, frame):
    print("heard", number, flush=True)
    given["raises"] and sys.exit(7)
if given.get("handler") == "before":
    signal.signal(signal.SIGTERM, handle)
if "directory" in given:
    strategy.checkpoint(given["directory"], every_steps=given.get("every_steps", 3))
if given.get("handler") == "after":
    signal.signal(signal.SIGTERM, handle)
for epoch in strategy.epochs(4):
    strength = 1 + random.random() + float(torch.rand(1))  # drawn between loops
    for number, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        (strength * ((model(x) - y) ** 2).mean()).backward()
        optimizer.step()
        strategy.print(f"did {strategy.step - 1} {number}", flush=True)
        time.sleep(given.get("seconds", 0))
    scheduler.step()
time.sleep(given.get("rest", 0))
digest = hashlib.sha256()
for tensor in (*model.parameters(), *(v for s in optimizer.state.values() for v in s.values())):
    digest.update(tensor.detach().numpy().tobytes())
strategy.print("hash", digest.hexdigest(), scheduler.get_last_lr(), strategy.step, flush=True)
"""


def start(place: Path, **given) -> Run:
    return Run(place, [*PYTHON, str(write(place, SCRIPT)), json.dumps(given)], env={"DUOKA_RESPAWN": "0"})


def hash_of(ended: Ended) -> str:
    assert ended.code == 0, ended.err
    return next(line for line in ended.out.splitlines() if line.startswith("hash"))


def newest(directory: Path) -> Path:
    return max((directory / "saved").glob("step-*"))


def test_runs_that_are_ended_in_every_way_go_on_to_the_bits_of_a_calm_one(tmp_path):
    calm_run = start(tmp_path / "calm", workers=2)
    given = {"directory": "../saved", "seconds": 0.1}

    run = start(tmp_path, workers=2, **given)  # all workers are killed
    run.wait_for("did 7 ", timeout_s=START_S)
    for pid in run.workers().values():
        os.kill(pid, signal.SIGKILL)
    ended = run.finish(START_S, LEAVES)
    assert ended.code == 137 and "no worker is left" in ended.err, ended.err

    run = start(tmp_path, workers=2, **given)  # preempted
    run.wait_for("did 10 ", timeout_s=START_S)
    run.signal(signal.SIGTERM)
    ended = run.finish(START_S, LEAVES)
    assert ended.code == 143, ended.err
    assert "resumed from" in ended.err and "is saved in" in ended.err and "training held up for" in ended.err
    saved = int(newest(tmp_path).name.removeprefix("step-"))
    assert saved > 10 and f"did {saved - 1} " in ended.out and f"did {saved} " not in ended.out

    run = start(tmp_path, workers=2, **given)  # the supervisor is killed, and the newest checkpoint damaged
    run.wait_for("did 17 ", timeout_s=START_S)
    run.signal(signal.SIGKILL)
    run.process.wait(START_S)
    run.wait_until_all_are_gone()
    assert f"did {saved - 1} " not in run.out and f"did {saved} " in run.out
    state = newest(tmp_path) / "state.safetensors"
    data = bytearray(state.read_bytes())
    data[-5] ^= 1
    state.write_bytes(data)

    ended = start(tmp_path, workers=2, directory="../saved").finish(START_S, LEAVES)
    calm = hash_of(calm_run.finish(START_S, LEAVES))
    assert hash_of(ended) == calm
    assert "This checkpoint is skipped" in ended.err and state.exists()
    again = start(tmp_path, workers=2, directory="../saved").finish(START_S, LEAVES)  # a finished run trains no more
    assert hash_of(again) == calm and "did" not in again.out


@pytest.mark.slow
def test_a_loop_with_one_replica_continues_with_the_bits_of_an_undisturbed_one(tmp_path):
    calm = hash_of(start(tmp_path, workers=1).finish(START_S, LEAVES))
    given = {"workers": 1, "directory": "../saved"}
    run = start(tmp_path, seconds=0.1, **given)
    run.wait_for("did 10 ", timeout_s=START_S)
    run.signal(signal.SIGTERM)
    ended = run.finish(START_S, LEAVES)
    assert ended.code == 143, ended.err
    ended = start(tmp_path, **given).finish(START_S, LEAVES)
    assert "resumed from" in ended.err and "did 9 " not in ended.out
    assert hash_of(ended) == calm


REST = [(1, "before"), (1, "after"), (2, "before")]


@pytest.mark.parametrize(
    ("workers", "handler"), [(2, "after"), *(pytest.param(*each, marks=pytest.mark.slow) for each in REST)]
)
def test_a_handler_of_the_scripts_own_is_called_and_the_step_is_saved_all_the_same(workers, handler, tmp_path):
    raises = (workers, handler) in ((1, "before"), (2, "after"))
    given = {"workers": workers, "handler": handler, "raises": raises, "deadline_s": 4}
    run = start(tmp_path, directory="../saved", every_steps=1000, seconds=0.1, **given)
    run.wait_for("did 3 ", timeout_s=START_S)
    run.signal(signal.SIGTERM)
    ended = run.finish(START_S, LEAVES)
    assert ended.code == 143 and ended.out.count("heard 15") == 1, ended.err
    assert f"SIGTERM: step {int(newest(tmp_path).name[5:])} is saved in" in ended.err, ended.err
    assert "without saving" not in ended.err


@pytest.mark.slow
def test_a_rest_of_the_script_that_is_cut_after_sigterm_is_not_said_to_be_unsaved(tmp_path):
    """The wish comes in the last batch: no border follows, and the end of the loop saves by itself."""
    run = start(tmp_path, workers=2, directory="../saved", every_steps=1000, deadline_s=3, rest=60, seconds=0.2)
    run.wait_for("did 27 ", timeout_s=START_S)
    run.signal(signal.SIGTERM)
    ended = run.finish(START_S, LEAVES)
    assert ended.code == 143 and newest(tmp_path).name.endswith("28"), ended.err
    assert "SIGTERM: training had ended, and saved its end; the script has not come to its own end" in ended.err
    assert "without saving" not in ended.err


@pytest.mark.slow
def test_two_workers_stop_at_the_same_step_and_a_second_sigterm_ends_at_once(tmp_path):
    run = start(tmp_path, workers=2, directory="../saved", seconds=0.1)
    run.wait_for("did 4 ", timeout_s=START_S)
    run.signal(signal.SIGTERM)
    ended = run.finish(START_S, LEAVES)
    assert ended.code == 143 and "did not end in time" not in ended.err, ended.err
    run = start(tmp_path, workers=2, directory="../saved", seconds=20)
    run.wait_for("did ", timeout_s=START_S)
    run.signal(signal.SIGTERM)
    run.wait_for("once more ends it at once")
    run.signal(signal.SIGTERM)
    ended = run.finish(START_S, LEAVES)
    assert ended.code == 143, ended.err


@pytest.mark.slow
def test_a_second_run_in_the_same_directory_is_refused_and_the_first_is_not_disturbed(tmp_path):
    calm = hash_of(start(tmp_path, workers=2).finish(START_S, LEAVES))
    first = start(tmp_path, workers=2, directory="../saved", seconds=3)
    first.wait_for("did 4 ", timeout_s=START_S)
    second = start(tmp_path, workers=2, directory="../saved").finish(START_S, LEAVES)
    assert second.code == 1 and "saved is in use: the run 2" in second.err, second.err
    first.signal(signal.SIGTERM)
    assert first.finish(START_S, LEAVES).code == 143
    ended = start(tmp_path, workers=2, directory="../saved").finish(START_S, LEAVES)
    assert hash_of(ended) == calm and ", of run 2" in ended.err


@pytest.mark.slow
def test_a_directory_that_can_never_be_written_is_an_error_before_anything_is_trained(tmp_path):
    ended = start(tmp_path, workers=2, directory="/proc/nowhere").finish(START_S, LEAVES)
    assert ended.code == 1 and "Checkpoints cannot be kept in /proc/nowhere." in ended.err and "did" not in ended.out


@pytest.mark.slow
def test_another_model_seed_or_number_of_replicas_is_refused_with_the_difference(tmp_path):
    assert start(tmp_path, workers=2, directory="../saved").finish(START_S, LEAVES).code == 0
    for other, words in (
        ({"width": 5}, "0.weight is (5, 8) float32 here, and (16, 8) float32 in the saved one"),
        ({"seed": 3}, "is of a run with seed=0; this one has seed=3"),
        ({"workers": 1}, "is of a run with replicas=2; this one has replicas=1"),
    ):
        ended = start(tmp_path, directory="../saved", **{"workers": 2, **other}).finish(START_S, LEAVES)
        assert ended.code == 1 and words in ended.err and "nothing was saved" not in ended.err, ended.err
    for path in (tmp_path / "saved").glob("step-*"):
        (path / "manifest.json").write_text("{}")
    ended = start(tmp_path, workers=2, directory="../saved").finish(START_S, LEAVES)
    assert ended.code == 65 and "None of the checkpoints" in ended.err, ended.err
