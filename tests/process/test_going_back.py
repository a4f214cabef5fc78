"""A worker lost in a step that cannot be done again, or two that differ: all start anew, from a checkpoint."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path

import pytest

from tests.limits import START_S
from tests.process.scripts import DUOKA_RUN, PYTHON, Ended, start

pytestmark = [pytest.mark.torch, pytest.mark.slow]
LEAVES = ("torchinductor",)  # an empty folder of PyTorch's
PROGRAM = (*DUOKA_RUN, "--devices", "2")  # which need not import PyTorch once more, to know

SCRIPT = """
    import hashlib, json, os, signal, sys
    from pathlib import Path
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset
    import duoka

    given = json.loads(sys.argv[1])
    kind, strikes = given["kind"], given.get("strikes", [])
    is_synced = kind in ("both", "batchnorm")
    strategy = duoka.Mirrored(devices=2, sync_batchnorm=is_synced, check_every=given.get("check", 100))
    print("life", flush=True)
    torch.manual_seed(0)
    loader = DataLoader(TensorDataset(torch.randn(48, 6)), batch_size=8, shuffle=True)
    net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 6))
    judge = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizers = [torch.optim.Adam(model.parameters(), 0.01) for model in (net, judge)]
    net, judge, *optimizers, loader = strategy.prepare(net, judge, *optimizers, loader)
    if "every" in given:
        strategy.checkpoint(given.get("saved", "../saved"), every_steps=given["every"], keep=2)

    def strike(place):
        \"\"\"Die here, each time once.\"\"\"
        for number, (worker, step, where) in enumerate(strikes):
            mark = Path(f"../struck-{number}")
            if (strategy.worker, strategy.step, place) == (worker, step, where) and not mark.exists():
                mark.touch()
                os.kill(os.getpid(), signal.SIGKILL)

    def flip():
        # A bit in this worker's memory, each time once.
        mark = Path(f"../flipped-{len(list(Path('..').glob('flipped-*')))}")
        if [strategy.worker, strategy.step] == given.get("flip") and int(mark.name[-1]) < given.get("flips", 1):
            mark.touch()
            net[0].weight.detach().view(-1).view(torch.int32)[-1] ^= 1 << 22

    def train(x):
        noise = torch.randn_like(x)
        if kind in ("both", "gan"):
            optimizers[1].zero_grad()
            (judge(net(noise).detach()).mean() - judge(x).mean()).backward()
            optimizers[1].step()
            strike("middle")
            optimizers[0].zero_grad()
            (-judge(net(noise)).mean()).backward()
            optimizers[0].step()
        else:
            optimizers[0].zero_grad()
            loss = ((net(x) - noise) ** 2).mean()
            strike("middle")
            loss.backward()
            optimizers[0].step()

    def measure():
        # An evaluation loop of the user's own.
        total = count = 0.0
        net.eval()
        with torch.no_grad():
            for (x,) in loader:
                total, count = total + float((net(x) ** 2).sum()), count + x.numel()
                strike("evaluation")
        net.train()
        return float(strategy.mean(total / count, count))

    for epoch in strategy.epochs(3):
        for (x,) in loader:
            train(x)
            flip()
            strategy.print("did", strategy.step, flush=True)
        if kind == "counted":
            optimizers[0].param_groups[0]["lr"] = 0.01 / (1 + measure())
    digest = hashlib.sha256()
    for model, optimizer in zip((net, judge), optimizers):
        for tensor in (*model.state_dict().values(), *(v for s in optimizer.state.values() for v in s.values())):
            digest.update(tensor.detach().numpy().tobytes())
    print(json.dumps({"sha256": digest.hexdigest(), "step": strategy.step}), flush=True)
    """


def train(directory: Path, kind: str, **given) -> Ended:
    return start(directory, SCRIPT, json.dumps({"kind": kind} | given), program=PROGRAM).finish(START_S, LEAVES)


def strikes_of(directory: Path) -> int:
    return len(list(directory.glob("struck-*")))


WHO = "worker {0} (cpu:0/v{0}) was lost at step {1}, which cannot be done again; all workers start anew, "


@pytest.fixture(scope="module")
def calm(tmp_path_factory) -> dict:
    """What both workers of a calm run of a GAN with sync_batchnorm end with."""
    ended = train(tmp_path_factory.mktemp("calm"), "both")
    assert ended.code == 0 and len(ended.facts()) == 2, ended.err
    return ended.facts()


def test_a_gan_with_sync_batchnorm_that_loses_its_main_worker_goes_back_to_the_bits_of_a_calm_run(calm, tmp_path):
    ended = train(tmp_path, "both", every=4, strikes=[(0, 6, "middle")])
    assert ended.code == 0, ended.err
    assert strikes_of(tmp_path) == 1
    assert ended.facts() == calm
    assert WHO.format(0, 6) + "and go back to the checkpoint of step 4 (1 of at most 3 times)." in ended.said()


@pytest.mark.parametrize("kind", ["batchnorm", "gan"])
def test_a_loss_in_a_step_that_cannot_be_done_again_ends_with_the_bits_of_a_calm_run(kind, tmp_path):
    calm = train(tmp_path / "calm", kind)
    assert calm.code == 0, calm.err
    # Before anything is saved; then worker 0, which saves; then the other one, in a later epoch.
    strikes = [(1, 2, "middle"), (0, 6, "middle"), (1, 13, "middle")]
    ended = train(tmp_path / "struck", kind, every=4, strikes=strikes)
    assert ended.code == 0, ended.err
    assert strikes_of(tmp_path / "struck") == 3
    assert ended.facts() == calm.facts() and len(calm.facts()) == 2
    gone_back = [line for line in ended.said() if "start anew" in line]
    assert gone_back == [
        WHO.format(1, 2) + "from the beginning, because there is no checkpoint yet (1 of at most 3 times).",
        WHO.format(0, 6) + "and go back to the checkpoint of step 4 (2 of at most 3 times).",
        WHO.format(1, 13) + "and go back to the checkpoint of step 12 (3 of at most 3 times).",
    ]
    assert re.findall(r"resumed from .*?: step (\d+), after (\d+) epochs? and (\d+) batch", ended.err) == [
        ("4", "0", "4"),
        ("12", "2", "0"),
    ]
    assert ended.log(0).count("life") == ended.log(1).count("life") == 4  # and one directory of the run
    assert "Traceback" not in ended.err


def test_two_that_differ_go_back_to_where_they_were_equal_and_to_the_bits_of_a_calm_run(calm, tmp_path):
    ended = train(tmp_path, "both", every=1, check=4, flip=[1, 5])
    assert ended.code == 0, ended.err
    assert len(list(tmp_path.glob("flipped-*"))) == 1
    assert ended.facts() == calm
    differ = "Before step 8 the replicas are no longer equal: 0.weight is not the same on workers 0 and 1"
    assert f"{differ}; all workers start anew, and go back to the checkpoint of step 4 (1 of at most 3 times)." in (
        ended.said()
    )
    # Two are kept, and the newest of those that were compared; that of step 8 was not saved before it was.
    aside = tmp_path / "saved" / "set-aside-1"
    assert sorted(path.name for path in aside.iterdir()) == ["step-00000006", "step-00000007"]
    assert "replicas were last equal at step 4; what was saved after it may hold wrong values" in ended.err


def test_two_that_differ_again_at_once_end_the_run_and_one_started_by_hand_goes_on_from_where_they_agreed(
    calm, tmp_path
):
    ended = train(tmp_path, "both", every=3, check=4, flip=[1, 5], flips=2)
    assert ended.code == 76 and len(list(tmp_path.glob("flipped-*"))) == 2, ended.err
    assert "they have not been equal at a later step since this happened before, and the run ends." in ended.err
    assert ended.err.count("go back to the checkpoint of step 3") == 1 and "ReplicasDiffer" in ended.err
    assert sorted(path.name for path in (tmp_path / "saved").glob("*/step-*")) == ["step-00000006"] * 2
    ended = train(tmp_path / "again", "both", every=3, saved=str(tmp_path / "saved"))
    assert ended.code == 0 and "step-00000003: step 3, after 0 epochs and 3 batches" in ended.err, ended.err
    assert ended.facts() == calm


TENSORFLOW = """
    import hashlib, json, os, signal
    from pathlib import Path
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    import keras
    import numpy as np
    import tensorflow as tf
    import duoka

    strategy = duoka.Mirrored(devices=2)
    strategy.checkpoint("../saved", every_steps=4)
    keras.utils.set_random_seed(3)
    x = np.random.default_rng(5).standard_normal((48, 6)).astype("float32")
    with strategy.scope():
        net, judge = (keras.Sequential([keras.Input((6,)), keras.layers.Dense(n)]) for n in (6, 1))
        optimizers = keras.optimizers.Adam(0.01), keras.optimizers.Adam(0.01)

    def strike():
        mark = Path("../struck-0")
        if strategy.worker == 1 and strategy.step == 6 and Path("../strike").exists() and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    def step(rows):
        with tf.GradientTape() as tape:
            caught = tf.reduce_mean(judge(net(rows))) - tf.reduce_mean(judge(rows) ** 2)
        optimizers[1].apply(tape.gradient(caught, judge.trainable_variables), judge.trainable_variables)
        strike()
        with tf.GradientTape() as tape:
            fooled = -tf.reduce_mean(judge(net(rows)))
        optimizers[0].apply(tape.gradient(fooled, net.trainable_variables), net.trainable_variables)

    data = strategy.distribute_dataset(tf.data.Dataset.from_tensor_slices(x).shuffle(48, seed=1).batch(8))
    for epoch in strategy.epochs(3):
        for rows in data:
            strategy.run(step, args=(rows,))
    digest = hashlib.sha256()
    for variable in (*net.variables, *judge.variables, *optimizers[0].variables, *optimizers[1].variables):
        digest.update(variable.numpy().tobytes())
    print(json.dumps({"sha256": digest.hexdigest(), "step": strategy.step}), flush=True)
    """


@pytest.mark.tensorflow
def test_a_gan_of_tensorflow_goes_back_to_the_bits_of_a_calm_run(tmp_path):
    ends = []
    for name in ("calm", "struck"):
        (tmp_path / name).mkdir()
        if name == "struck":
            (tmp_path / name / "strike").touch()
        run = start(tmp_path / name, TENSORFLOW, program=PROGRAM, env={"KERAS_BACKEND": "tensorflow"})
        ends.append(run.finish(START_S, ["__autograph_generated_file"]))
    calm, struck = ends
    assert (calm.code, struck.code) == (0, 0), struck.err
    assert strikes_of(tmp_path / "struck") == 1
    assert WHO.format(1, 6) + "and go back to the checkpoint of step 4 (1 of at most 3 times)." in struck.said()
    assert struck.facts() == calm.facts() and calm.facts()[0]["step"] == 18


# Without a framework: what the runtime does. A worker dies where its value cannot be computed again.
PLAIN = """
    import json, os, signal, sys, time
    from pathlib import Path
    import numpy as np
    import duoka

    given = json.loads(sys.argv[1])
    strategy = duoka.Mirrored(devices=2)
    session = strategy._session
    lives = Path(f"../lives-{strategy.worker}")
    with lives.open("a") as file:
        file.write("x")
    life = lives.stat().st_size
    print("life", life, flush=True)
    time.sleep(given.get("seconds", 0) if life > 1 else 0)
    if "resume" in given:
        session.keep_checkpoints(os.path.realpath("../saved"), resumes=given["resume"])
    for step in range(4):
        session.collective.work_on(step, [strategy.worker])
        if strategy.worker == 1 and step == 2 and life <= given["deaths"]:
            if given.get("raises"):
                raise ValueError("a mistake of the user")
            os.kill(os.getpid(), given.get("signal", signal.SIGKILL))
        session.collective.all_reduce([np.ones(3)])
    print("finished", flush=True)
    """


def run_plain(directory: Path, program=PYTHON, **given) -> Ended:
    return start(directory, PLAIN, json.dumps(given), program=program).finish(START_S)


def lives_of(directory: Path) -> list[int]:
    return [path.stat().st_size for path in sorted(directory.glob("lives-*"))]


def test_a_run_goes_back_three_times_and_then_ends_with_the_loss(tmp_path):
    ended = run_plain(tmp_path / "three", resume=True, deaths=3)
    assert ended.code == 0 and lives_of(tmp_path / "three") == [4, 4], ended.err
    assert ended.out.count("finished") == 1
    ended = run_plain(tmp_path / "four", resume=True, deaths=9)
    assert ended.code == 137 and lives_of(tmp_path / "four") == [4, 4], ended.err
    assert "it has gone back 3 times before, and the run ends." in ended.err
    assert ended.err.count("Traceback") == 1 and "WorkerLost: worker 1 (cpu:0/v1) was lost in call" in ended.err


def test_without_checkpoints_to_resume_from_a_loss_ends_the_run_as_ever(tmp_path):
    for name, given in (("none", {}), ("not resumed", {"resume": False})):
        ended = run_plain(tmp_path / name, deaths=1, **given)
        assert ended.code == 137 and lives_of(tmp_path / name) == [1, 1], ended.err
        assert "WorkerLost" in ended.err and "anew" not in ended.err
    ended = run_plain(tmp_path / "no respawn", (*DUOKA_RUN, "--devices", "2", "--no-respawn"), resume=True, deaths=1)
    assert ended.code == 137 and lives_of(tmp_path / "no respawn") == [1, 1], ended.err


def test_errors_of_the_user_and_steps_that_crash_twice_do_not_go_back(tmp_path):
    ended = run_plain(tmp_path / "mistake", resume=True, deaths=1, raises=True)
    assert ended.code == 1 and lives_of(tmp_path / "mistake") == [1, 1], ended.err
    assert "ValueError: a mistake of the user" in ended.err and "anew" not in ended.err
    ended = run_plain(tmp_path / "crash", resume=True, deaths=9, signal=signal.SIGABRT)
    assert ended.code == 128 + signal.SIGABRT and lives_of(tmp_path / "crash") == [2, 2], ended.err
    assert "Replica 1 at step 2 has ended two workers in turn" in ended.err


@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGTERM])
def test_a_signal_while_a_run_goes_back_ends_it(number, tmp_path):
    run = start(tmp_path, PLAIN, json.dumps({"resume": True, "deaths": 1, "seconds": 20}))
    run.wait_for("start anew")
    run.signal(number)
    ended = run.finish(START_S)
    assert ended.code == 128 + number and "finished" not in ended.out, ended.err


@pytest.mark.parametrize("worker", [0, 1])
def test_what_a_lost_worker_had_counted_in_a_loop_of_the_users_own_is_counted_once_more(worker, tmp_path):
    calm = train(tmp_path / "calm", "counted")
    assert calm.code == 0 and len(calm.facts()) == 2, calm.err
    ended = train(tmp_path / "struck", "counted", every=4, strikes=[(worker, 12, "evaluation")])
    assert ended.code == 0 and strikes_of(tmp_path / "struck") == 1, ended.err
    assert ended.facts() == calm.facts()
    assert WHO.format(worker, 12) + "and go back to the checkpoint of step 8 (1 of at most 3 times)." in ended.said()
    without = train(tmp_path / "without", "counted", strikes=[(worker, 12, "evaluation")])
    assert without.code == 0 and "strategy.mean goes without replica" in without.err, without.err
