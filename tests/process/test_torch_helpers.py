"""Helpers for PyTorch scripts on real workers: save and load, main_first, progress, device; the page about them."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import subprocess
import time
from pathlib import Path

import pytest

from tests.limits import START_S
from tests.process.docs_blocks import read_page
from tests.process.scripts import DUOKA_RUN, PYTHON, Ended, start, write

pytestmark = [pytest.mark.torch]
PAGE = Path(__file__).parents[2] / "docs" / "pytorch.md"
PLAIN_LOOP = Path(__file__).parent / "torch_plain_loop.py"


def run(directory: Path, source: str, *words: str, timeout_s: float) -> Ended:
    # PyTorch makes this directory when an optimizer is made.
    return start(directory, source, *words).finish(timeout_s, leaves=["torchinductor_"])


TRAINING = """
import json, os, signal, sys, time
import duoka

strategy = duoka.Mirrored(devices={workers}, replicas={replicas}, deadline_s=20, respawn=False)
import torch
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 5])
x = torch.randn(76, 4)
loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=16, shuffle=True)
model, optimizer, scheduler, loader = strategy.prepare(model, optimizer, scheduler, loader)

def state():
    return {{"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch, "step": strategy.step}}

def equal(a, b):
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(equal, a, b))
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b

def loss_of(a, b):
    return ((model(a) - b) ** 2).mean()

def train(batch):
    optimizer.zero_grad()
    loss = strategy.backward(loss_of, batch)
    optimizer.step()
    scheduler.step()
    return loss
"""


def training(body: str, workers: int = 2, replicas: int = 2) -> str:
    return TRAINING.format(workers=workers, replicas=replicas) + body


@pytest.mark.parametrize(
    ("workers", "replicas"),
    [(2, 3), *(pytest.param(*sizes, marks=pytest.mark.slow) for sizes in ((1, 1), (1, 3), (2, 2)))],
)
def test_a_state_is_saved_once_per_batch_and_comes_back_on_every_worker(tmp_path, workers, replicas):
    script = training(
        """
num_batches = num_saved = num_written = 0
save_state = strategy._session.save_state
def counted(path, state):
    global num_written
    num_written += 1
    save_state(path, state)
strategy._session.save_state = counted
path = sys.argv[1] + "/state.pt"
for epoch in strategy.epochs(2):
    for batch in strategy.batches(loader):
        train(batch)
        num_batches += 1
        num_saved += strategy.save(path, state())
loaded = strategy.load(path, device=strategy.device)
print(json.dumps({"batches": num_batches, "saved": num_saved, "written": num_written, "step": loaded["step"],
                  "equal": equal([loaded["model"], loaded["optimizer"]],
                                 [model.state_dict(), optimizer.state_dict()])}), flush=True)
""",
        workers,
        replicas,
    )
    ended = run(tmp_path, script, str(tmp_path), timeout_s=START_S)
    assert ended.code == 0, ended.err
    facts = ended.facts() if replicas > 1 else {0: json.loads(ended.out)}
    assert len(facts) == workers
    for worker, told in facts.items():
        assert told["saved"] == told["batches"] == 10 and told["equal"], told
        assert told["written"] == (10 if worker == 0 else 0)
        assert told["step"] == 10
    assert [p.name for p in tmp_path.glob("state*")] == ["state.pt"]


@pytest.mark.slow
def test_schedulers_and_scalers_that_were_prepared_save_what_plain_ones_save_and_go_on_from_there(tmp_path):
    script = training(
        """
scaler = strategy.prepare(torch.amp.GradScaler("cpu", init_scale=8.0))
plain = torch.optim.lr_scheduler.MultiStepLR(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.01), [3, 5])
for batch in strategy.batches(loader):
    train(batch)
path = sys.argv[1] + "/state.pt"
strategy.save(path, {"scheduler": scheduler.state_dict(), "scaler": scaler.state_dict()})
loaded = strategy.load(path)
scheduler.load_state_dict(loaded["scheduler"])
scaler.load_state_dict(loaded["scaler"])
before = scheduler.last_epoch
for batch in strategy.batches(loader):
    train(batch)
print(json.dumps({"keys": loaded["scheduler"].keys() == plain.state_dict().keys(), "scale": loaded["scaler"]["scale"],
                  "milestones": type(loaded["scheduler"]["milestones"]).__name__,
                  "epochs": [before, scheduler.last_epoch],
                  "lr": scheduler.get_last_lr()}), flush=True)
""",
        replicas=4,
    )
    ended = run(tmp_path, script, str(tmp_path), timeout_s=START_S)
    assert ended.code == 0, ended.err
    expected = {"keys": True, "scale": 8.0, "milestones": "Counter", "epochs": [5, 10], "lr": [pytest.approx(1e-4)]}
    assert ended.facts() == {0: expected, 1: expected}


@pytest.mark.slow
def test_a_state_that_cannot_be_saved_is_the_same_error_on_every_worker_and_training_goes_on(tmp_path):
    script = training(
        """
epoch, told = 0, {}
path = sys.argv[1] + "/state.pt"
strategy.save(path, {"old": 1})
for name, where, what in [("place", sys.argv[1] + "/missing/x", {}), ("value", path, {"f": {"g": print}}),
                          ("sparse", path, {"s": torch.eye(2).to_sparse()})]:
    try:
        strategy.save(where, what)
    except duoka.DuokaError as error:
        told[name] = [type(error).__name__, str(error)]
for batch in strategy.batches(loader):
    train(batch)
told["old"] = strategy.load(path)
strategy.save(path, state())
told["step"] = strategy.load(path)["step"]
print(json.dumps(told), flush=True)
"""
    )
    ended = run(tmp_path, script, str(tmp_path), timeout_s=START_S)
    assert ended.code == 0, ended.err
    first, second = ended.facts().values()
    assert first == second
    assert [first[name][0] for name in ("place", "value", "sparse")] == ["CheckpointError"] * 3
    assert "make the directory" in first["place"][1]
    assert "state['f']['g'] is a builtin_function_or_method" in first["value"][1]
    assert first["old"] == {"old": 1} and first["step"] == 5


@pytest.mark.slow
def test_others_wait_for_a_long_save_beyond_the_usual_deadline(tmp_path):
    script = """
        import os, sys, time, torch, duoka
        strategy = duoka.Mirrored(devices=2, deadline_s=1)
        fsync = os.fsync
        os.fsync = lambda descriptor: (time.sleep(3), fsync(descriptor))
        begin = time.monotonic()
        strategy.save(sys.argv[1] + "/state", {"x": torch.ones(3)})
        print("together after three seconds:", time.monotonic() - begin > 2.9, flush=True)
        strategy.save(sys.argv[1] + "/state", {"x": torch.ones(3)}, deadline_s=0.5)
        print("saved by", strategy.worker, flush=True)
    """
    ended = run(tmp_path, script, str(tmp_path), timeout_s=START_S)
    assert ended.out.count("together after three seconds: True") == 1 and "[w1] together" not in ended.out
    # With a deadline given, one that only sleeps in it is lost, and another one saves in its place.
    assert ended.code == 0 and "saved by 1" in ended.out, ended.err
    assert "worker 0 (cpu:0/v0) was stuck" in ended.err


@pytest.mark.slow
def test_a_worker_killed_in_the_middle_of_a_save_is_followed_by_another_one(tmp_path):
    script = training(
        """
epoch, path = 0, sys.argv[1] + "/state.pt"
for batch in strategy.batches(loader):
    train(batch)
strategy.save(path, {"old": 1})
if strategy.worker == 0:
    os.fsync = lambda descriptor: os.kill(os.getpid(), signal.SIGKILL)
strategy.save(path, state())
print(json.dumps({"step": strategy.load(path)["step"], "main": strategy.is_main}), flush=True)
for batch in strategy.batches(loader):
    train(batch)
strategy.save(path, state())
"""
    )
    ended = run(tmp_path, script, str(tmp_path), timeout_s=START_S)
    assert ended.code == 0, ended.err
    assert any("worker 0" in line and "SIGKILL" in line for line in ended.said()), ended.err
    assert ended.facts() == {1: {"step": 5, "main": True}}


@pytest.mark.parametrize(("workers", "replicas"), [(2, 2), (3, 4)])
@pytest.mark.slow
def test_a_loss_within_a_save_in_the_loop_changes_no_weight_and_no_save(tmp_path, workers, replicas):
    script = training(
        """
import hashlib
fsync, epoch, num_saved, path = os.fsync, 0, 0, sys.argv[1] + "/state.pt"
def die_at_step_3(descriptor):
    if strategy.worker == 0 and strategy.step == 3 and sys.argv[2] == "struck":
        os.kill(os.getpid(), signal.SIGKILL)
    fsync(descriptor)
os.fsync = die_at_step_3
for batch in strategy.batches(loader):
    train(batch)
    num_saved += strategy.save(path, state())
numbers = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
print(json.dumps({"sha256": hashlib.sha256(numbers).hexdigest(), "saved": num_saved,
                  "step": strategy.load(path)["step"]}), flush=True)
""",
        workers,
        replicas,
    )
    calm = run(tmp_path / "calm", script, str(tmp_path), "calm", timeout_s=START_S)
    struck = run(tmp_path / "struck", script, str(tmp_path), "struck", timeout_s=START_S)
    assert calm.code == struck.code == 0, calm.err + struck.err
    assert any("worker 0" in line and "SIGKILL" in line for line in struck.said()), struck.err
    assert struck.facts() == {w: told for w, told in calm.facts().items() if w > 0}
    assert struck.facts()[1]["saved"] == 5 and struck.facts()[1]["step"] == 5


@pytest.mark.slow
def test_the_only_worker_killed_in_the_middle_of_a_save_leaves_the_old_file(tmp_path):
    script = training(
        """
epoch, path = 0, sys.argv[1] + "/state.pt"
if not os.path.exists(path):
    strategy.save(path, {"old": 1})
    os.fsync = lambda descriptor: os.kill(os.getpid(), signal.SIGKILL)
    strategy.save(path, state())
print("found", strategy.load(path), os.listdir(sys.argv[1]) == ["work"] or sorted(os.listdir(sys.argv[1])), flush=True)
""",
        workers=1,
        replicas=2,
    )
    assert run(tmp_path, script, str(tmp_path), timeout_s=START_S).code == 128 + 9
    left = {p.name for p in tmp_path.iterdir() if not p.name.startswith("screen-")}
    assert left == {"state.pt", "work"}
    assert "found {'old': 1}" in run(tmp_path, script, str(tmp_path), timeout_s=START_S).out


@pytest.mark.slow
def test_a_save_by_the_main_worker_alone_is_an_error_and_no_hang(tmp_path):
    script = training(
        """
epoch = 0
for batch in strategy.batches(loader):
    train(batch)
    if strategy.is_main:
        strategy.save(sys.argv[1] + "/state.pt", state())
"""
    )
    ended = run(tmp_path, script, str(tmp_path), timeout_s=START_S)
    assert ended.code == 1
    assert "MismatchError" in ended.err and "strategy.save" in ended.err


# main_first


def test_the_main_worker_runs_a_block_first_and_the_others_after_it(tmp_path):
    script = """
        import json, os, sys, time, duoka
        strategy = duoka.Mirrored(devices=3, deadline_s=1)
        path = sys.argv[1] + "/download"
        with strategy.main_first():
            found = os.path.exists(path)
            if not found:
                time.sleep(2.5)  # longer than the deadline of other calls
                open(path, "x").write("data")
        strategy.barrier()
        print(json.dumps({"found": found, "content": open(path).read()}), flush=True)
    """
    ended = run(tmp_path, script, str(tmp_path), timeout_s=START_S)
    assert ended.code == 0, ended.err
    assert ended.facts() == {w: {"found": w > 0, "content": "data"} for w in range(3)}


@pytest.mark.slow
def test_a_block_that_fails_on_the_main_worker_fails_on_all(tmp_path):
    script = """
        import json, os, sys, time, duoka
        strategy = duoka.Mirrored(devices=2)
        try:
            with strategy.main_first():
                ran = True
                if strategy.is_main:
                    raise ConnectionError("the server is away")
        except Exception as error:
            print(json.dumps([type(error).__name__, str(error)]), flush=True)
        with strategy.main_first():
            pass
        total = strategy.sum(1.0)
        print(json.dumps({"total": float(total), "ran": "ran" in globals()}), flush=True)
        with strategy.main_first():
            if strategy.is_main:
                raise ConnectionError("away again")
    """
    ended = run(tmp_path, script, timeout_s=START_S)
    assert ended.facts() == {0: {"total": 2.0, "ran": True}, 1: {"total": 2.0, "ran": False}}
    assert '["ConnectionError", "the server is away"]' in ended.log(0)
    assert "WorkerFailed" in ended.log(1) and "ConnectionError: the server is away" in ended.log(1)
    assert ended.code == 1 and "away again" in ended.err


@pytest.mark.slow
def test_a_main_worker_lost_in_its_block_is_followed_by_another_one(tmp_path):
    script = """
        import json, os, signal, sys, time, duoka
        strategy = duoka.Mirrored(devices=3, deadline_s=20)
        ran = []
        with strategy.main_first():
            if strategy.worker == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            ran.append(time.time())
            time.sleep(0.5)
        print(json.dumps({"at": ran}), flush=True)
    """
    ended = run(tmp_path, script, timeout_s=START_S)
    assert ended.code == 0, ended.err
    times = sorted(told["at"][0] for told in ended.facts().values())
    assert len(times) == 2 and times[1] - times[0] >= 0.5


# progress


def test_progress_is_shown_once_in_global_batches_with_the_loss_of_all_replicas(tmp_path):
    script = training(
        """
for epoch in strategy.epochs(2):
    bar = strategy.progress(strategy.batches(loader), desc=f"epoch {epoch + 1}")
    for batch in bar:
        bar.loss = train(batch)
    strategy.print("last", f"{bar.loss:.4g}")
for _ in strategy.progress(range(3), desc="items"):
    pass
""",
        workers=2,
        replicas=4,
    )
    ended = run(tmp_path, script, timeout_s=START_S)
    assert ended.code == 0, ended.err
    last = re.findall(r"last (\S+)", ended.out)
    lines = [line for line in ended.err.splitlines() if not line.startswith("duoka:")]
    assert [re.sub(r"[\d.,]+ rows/s|[\d.]+ s$|[\d,.]+/s", "_", line) for line in lines] == [
        f"epoch 1: 5/5, _, loss {last[0]}, _",
        f"epoch 2: 5/5, _, loss {last[1]}, _",
        "items: 3/3, _, _",
    ]


@pytest.mark.slow
def test_on_a_terminal_a_run_of_several_workers_shows_a_bar(tmp_path):
    script = training(
        """
for epoch in strategy.epochs(1):
    bar = strategy.progress(strategy.batches(loader), desc="epoch 1")
    for batch in bar:
        bar.loss = train(batch)
        time.sleep(0.3)
        if strategy.step == 2:
            print("a line of the script", flush=True)
"""
    )
    text = run_on_terminal(tmp_path, script)
    bars = re.findall(r"\r\x1b\[2K([^\r\n]*)", text)
    assert sum("━" in re.sub(r"\x1b\[[0-9;]*m", "", bar) for bar in bars) >= 3, text
    assert "\r\x1b[2Ka line of the script\r\n" in text, repr(text)
    assert text.count("a line of the script") == 1
    assert re.search(r"\r\x1b\[2Kepoch 1: 5/5, [\d.]+/s, loss [\d.]+, [\d.]+ s\r\n", text), text


def run_on_terminal(directory: Path, source: str, timeout_s: float = START_S) -> str:
    """Everything that a terminal of 80 columns is sent."""
    path = write(directory, source)
    ours, theirs = pty.openpty()
    environ = {n: t for n, t in os.environ.items() if not n.startswith("PYTEST")} | {"TERM": "xterm-256color"}
    process = subprocess.Popen(
        [*PYTHON, str(path)], stdin=theirs, stdout=theirs, stderr=theirs, cwd=path.parent, env=environ
    )
    os.close(theirs)
    received, end = b"", time.monotonic() + timeout_s
    try:
        while time.monotonic() < end:
            if select.select([ours], [], [], 0.5)[0]:
                try:
                    data = os.read(ours, 65536)
                except OSError:  # the last one who had it open has gone
                    break
                received += data
        assert process.wait(START_S) == 0, received.decode()
    finally:
        process.kill()
        process.wait()
        os.close(ours)
    return received.decode()


# device


@pytest.mark.slow
def test_the_device_is_torchs_own_once_torch_is_imported_and_can_be_used_before_prepare(tmp_path):
    script = """
        import duoka
        strategy = duoka.Mirrored(devices=2)
        before = type(strategy.device).__name__, strategy.device.name.split("/")[0]
        import torch
        x = torch.zeros(3, device=strategy.device)
        x = x.to(strategy.device)
        print(before, strategy.device == torch.device("cpu"), x.device, flush=True)
    """
    ended = run(tmp_path, script, timeout_s=START_S)
    assert ended.code == 0, ended.err
    assert ended.out == "('Device', 'cpu:0') True cpu\n"


# The page.


@pytest.mark.slow
def test_the_functions_of_the_page_print_the_same_on_one_and_two_workers(tmp_path):
    function_style, plain_loop = read_page(PAGE.name, PAGE.read_text())[0]
    assert len(function_style.blocks) >= 8 and len(plain_loop.blocks) == 1
    first, second = (
        run_page(tmp_path / str(num_workers), function_style.source, num_workers) for num_workers in (1, 2)
    )
    assert first.out == second.out
    assert re.search(r"^accuracy 0\.[89]\d from scores of shape \(40, 2\)$", first.out, re.MULTILINE)


def run_page(directory: Path, source: str, num_workers: int) -> Ended:
    directory.mkdir()
    script = f"import os, sys; os.chdir(sys.argv[1])\n{source}"
    program = [*DUOKA_RUN, "--devices", str(num_workers), "--replicas", "4"]
    ended = start(directory, script, str(directory), program=program).finish(START_S, leaves=["torchinductor_"])
    assert ended.code == 0, ended.err
    return ended


@pytest.mark.slow
def test_a_plain_loop_can_use_all_helpers_in_one_script(tmp_path):
    script = f"import os, sys; os.chdir(sys.argv[1])\n{PLAIN_LOOP.read_text()}"
    program = [*DUOKA_RUN, "--devices", "2"]
    ended = start(tmp_path, script, str(tmp_path), program=program).finish(START_S, leaves=["torchinductor_"])
    assert ended.code == 0, ended.err
    first, second = ended.facts().values()
    assert first == second
    assert first["step"] == 5 * (3 + 2)
    assert first["words"] == "downloaded once" and first["gathered"] == 40
    assert first["accuracy"] == pytest.approx(first["right"]) and first["accuracy"] > 0.8
    assert len(first["losses"]) == 15
    assert re.search(r"^epoch 2: 5/5 batches, [\d,.]+ rows/s, loss [\d.]+, lr [\d.e-]+, ", ended.err, re.MULTILINE)
    assert re.search(r"^test: 3/3 batches, [\d,.]+ rows/s, ", ended.err, re.MULTILINE), "no step is counted there"
