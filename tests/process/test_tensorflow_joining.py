"""A killed worker of a TensorFlow loop comes back: it runs the script from its top, and joins mid-epoch."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import pytest

from tests.process.scripts import PYTHON, Ended, Run, write

pytestmark = [pytest.mark.tensorflow, pytest.mark.slow]

BATCHES, EPOCHS, STRUCK, JOINED = 7, 5, (1, 2), (2, 3)  # (epoch, batch): when it dies, and when the others wait for it
LEAVES = ("__autograph_generated_file",)

SCRIPT = f"""
    import hashlib, json, os, signal, sys, time
    from pathlib import Path
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    import keras
    import numpy as np
    import tensorflow as tf
    import duoka

    victim, how, directory = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    BATCHES, EPOCHS, STRUCK, JOINED = {(BATCHES, EPOCHS, STRUCK, JOINED)}
    strategy = duoka.Mirrored(devices=2, replicas=4, check_every=2)
    lives = directory / f"lives-{{strategy.worker}}"
    with lives.open("a") as file:
        file.write("x")
    life = lives.stat().st_size
    print("life", life, "main" if strategy.is_main else "not main")
    keras.utils.set_random_seed(0)
    x = np.random.rand(8 * BATCHES - 3, 6).astype("float32")
    rows = tf.data.Dataset.from_tensor_slices((x, (x.sum(1) > 3).astype("int64")))
    layers = keras.layers
    with strategy.scope():
        model = keras.Sequential([keras.Input((6,)), layers.Dense(16), layers.BatchNormalization(), layers.ReLU(),
                                  layers.Dropout(0.2), layers.Dense(2)])
        optimizer, seen = keras.optimizers.Adam(1e-2), keras.metrics.SparseCategoricalAccuracy()
    total = strategy.sum(1.0)  # a call before the loop
    losses_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")

    anneal = {{"value": 1.0}}  # of the script's own: nobody hands it over

    def train_step(batch):
        with tf.GradientTape() as tape:
            losses = losses_of(batch[1], model(batch[0], training=True)) * anneal["value"]
            loss = strategy.average_loss(losses)
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        return loss

    def test_step(batch):
        seen.update_state(batch[1], model(batch[0], training=False))

    def run_twice(batch):
        strategy.run(test_step, args=(batch,))
        return strategy.reduce("sum", strategy.run(train_step, args=(batch,)))

    train = tf.function(run_twice, reduce_retracing=True) if how == "epochs" else run_twice
    training = strategy.distribute_dataset(rows.shuffle(100).batch(8))
    testing = strategy.distribute_dataset(rows.batch(20))

    def wait_for_newcomer():
        end = time.monotonic() + 120
        while victim >= 0 and not (directory / "ready").exists():
            assert time.monotonic() < end, "nobody came"
            time.sleep(0.02)

    metrics = []
    for epoch in range(EPOCHS) if how == "range" else strategy.epochs(EPOCHS):
        if life > 1:
            (directory / "ready").touch()
        for index, batch in strategy.enumerate(training):
            if strategy.worker == victim and life == 1 and (epoch, index) == STRUCK:
                os.kill(os.getpid(), signal.SIGKILL)
            if (epoch, index) == JOINED:
                wait_for_newcomer()
            if victim >= 0:
                time.sleep(0.15)
            loss = float(train(batch))
        seen.reset_state()
        for batch in testing:
            strategy.run(test_step, args=(batch,))
        mean = float(strategy.mean(float(seen.result())))  # a call between loops
        anneal["value"] *= 0.9 if how == "anneals" else 1
        metrics.append([epoch, float(seen.result()), mean, strategy.step])
        strategy.print(json.dumps(metrics[-1]))

    state = [*model.variables, *optimizer.variables, *seen.variables]
    digest = hashlib.sha256(b"".join(v.numpy().tobytes() for v in state if "seed" not in v.path)).hexdigest()
    facts = {{"sha256": digest, "metrics": metrics, "life": life, "step": strategy.step, "main": strategy.is_main}}
    print(json.dumps(facts | {{"draw": float(np.random.rand())}}))
    """


def train(directory: Path, victim: int, how: str) -> Ended:
    lives = directory / "lives"
    lives.mkdir(parents=True)
    one_thread = dict.fromkeys(("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS"), "1")
    path = write(directory, SCRIPT)
    words = [*PYTHON, str(path), str(victim), how, str(lives)]
    return Run(directory, words, env=one_thread | {"KERAS_BACKEND": "tensorflow"}).finish(300, LEAVES)


@pytest.fixture(scope="module")
def calm(tmp_path_factory):
    """By kind: graphs have other last bits than eager steps."""

    @lru_cache
    def train_calmly(how: str) -> Ended:
        ended = train(tmp_path_factory.mktemp("calm"), -1, how)
        assert ended.code == 0, ended.err
        return ended

    return train_calmly


@pytest.mark.parametrize("victim, how", [(0, "epochs"), (1, "range"), (0, "range")])
def test_a_worker_that_comes_back_joins_mid_epoch_and_the_bits_are_those_of_a_calm_run(victim, how, calm, tmp_path):
    ended = train(tmp_path, victim, how)
    assert ended.code == 0, ended.err
    who = f"worker {victim} (cpu:0/v{victim})"
    killed, started, joined = ended.said()
    assert killed == f"{who} was ended by SIGKILL; 1 worker goes on (generation 1)."
    assert started == f"{who} is started again, and joins when it is ready."
    assert joined.startswith(f"{who} has rejoined at step ") and joined.endswith(
        "; 2 workers go on (generation 2). Of the script's own variables it has those that are registered"
        " (strategy.register)."
    )
    expected, facts = calm(how).facts()[0], ended.facts()
    for worker in range(2):
        assert facts[worker]["life"] == 1 + (worker == victim)
        for name in ("sha256", "step", "draw"):
            assert facts[worker][name] == expected[name], (worker, name)
    newcomer = facts[victim]
    assert newcomer["metrics"][-2:] == expected["metrics"][-2:]
    if how == "epochs":
        assert newcomer["metrics"] == expected["metrics"][JOINED[0] :], "it has run no epoch that was over"
    assert not newcomer["main"], "what it has not run it cannot know"
    assert "life 2 not main" in ended.log(victim) and "life 2" not in ended.out


def test_gradients_that_depend_on_what_the_script_has_not_registered_remove_the_replacement(calm, tmp_path):
    ended = train(tmp_path, 0, "anneals")
    assert ended.code == 0, ended.err
    _, _, joined, removed, *_ = ended.said()
    assert joined.startswith("worker 0 (cpu:0/v0) has rejoined at step ")
    assert removed.startswith("worker 0 (cpu:0/v0) was removed: it computed other gradients than worker 1 from"), (
        removed
    )
    expected, found = calm("anneals").facts()[0], ended.facts()[1]
    assert (found["sha256"], found["metrics"]) == (expected["sha256"], expected["metrics"])
