"""What people do around `fit` in a script for one device, on two workers; each worker prints what it found, as JSON.

    KERAS_BACKEND=jax duoka run --devices 2 tests/process/keras_habits.py FOLDER [name ...]

Files go to FOLDER. Where something is to be as on one device, the script trains a second model that belongs to no
run, in the ordinary way, and compares.
"""

from __future__ import annotations

import http.server
import json
import os
import resource
import sys
import time
from pathlib import Path
from threading import Thread

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")

import keras
import numpy as np
from keras import layers
from keras_data import data
from keras_habitual import Hook, compiled, digest, make, numbers
from keras_misuse import misuse
from keras_on_tensorflow import draws_of_tensorflow, functions_of_the_old_kind, who_compiles_the_update
from keras_own_losses import own_losses
from keras_pieces import SCENARIOS, scenario
from keras_unseen import (
    drifting,
    optimizers_with_an_apply_of_ones_own,
    steps_behind_the_back,
    threads_beside_a_step,
)

import duoka

FOLDER = Path(sys.argv[1])
KINDS = keras.callbacks


# Callbacks.


class Events(KINDS.TensorBoard):
    """Without scalars, which need the package tensorboard; what is below them writes to the same files."""

    def _log_epoch_metrics(self, epoch, logs):
        for writer in (self._train_writer, self._val_writer):
            with writer.as_default():
                self.summary.write("loss", logs["loss"], step=epoch)

    def on_train_batch_end(self, batch, logs=None):
        pass


@scenario
def callbacks_that_write(strategy):
    """Every worker has a folder of its own here, so that it shows who has written."""
    folder = FOLDER / f"by-worker-{strategy.worker}"
    model, (x, y) = strategy.prepare(make()), numbers()
    checkpoint = KINDS.ModelCheckpoint(str(folder / "best.keras"), monitor="loss", save_best_only=True)
    callbacks = [
        checkpoint,
        KINDS.ModelCheckpoint(str(folder / "{epoch}.weights.h5"), save_weights_only=True),
        KINDS.BackupAndRestore(str(folder / "backup"), delete_checkpoint=False),
        Events(str(folder / "events")),
    ]
    if strategy.is_main:
        folder.mkdir()
    log = KINDS.CSVLogger(str(folder / "log.csv"))
    model.fit(x, y, batch_size=10, epochs=2, verbose=0, callbacks=[*callbacks, log])
    shadows = [
        name for c in [*callbacks, log] for name, it in vars(c).items() if callable(it) and hasattr(type(c), name)
    ]
    return {
        "files": sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()),
        "best": checkpoint.best,
        "left": shadows,
        "log": (folder / "log.csv").read_text().splitlines() if strategy.is_main else None,
    }


@scenario
def callbacks_of_other_kinds(strategy):
    """One that sends what it knows, to a server on each worker; and a list that was made by hand."""
    sent = []

    class Receiver(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            sent.append(json.loads(self.rfile.read(int(self.headers["Content-Length"])))["epoch"])
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args):
            pass

    x, y = numbers()
    with http.server.HTTPServer(("127.0.0.1", 0), Receiver) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        monitor = KINDS.RemoteMonitor(f"http://127.0.0.1:{server.server_port}", send_as_json=True)
        strategy.prepare(make()).fit(x, y, batch_size=10, epochs=2, verbose=0, callbacks=[monitor])
        server.shutdown()
    model = strategy.prepare(make())
    log = FOLDER / f"list-{strategy.worker}.csv"
    given = KINDS.CallbackList([KINDS.CSVLogger(str(log))], add_history=True, model=model, epochs=2, steps=4, verbose=0)
    history = model.fit(x, y, batch_size=10, epochs=2, verbose=0, callbacks=given)
    return {"sent": sent, "logged": log.exists(), "history": history.history, "left": len(given.callbacks)}


@scenario
def restores_run_on_all_workers(strategy):
    """Interrupted in the third epoch, and started again."""
    model, (x, y) = strategy.prepare(make()), numbers()
    backup = str(FOLDER / "backup")

    def interrupt(callback, epoch, logs=None):
        if epoch == 2:
            raise InterruptedError

    try:
        options = {"batch_size": 10, "epochs": 4, "verbose": 0}
        model.fit(x, y, callbacks=[KINDS.BackupAndRestore(backup), Hook("on_epoch_begin", interrupt)], **options)
    except InterruptedError:
        before = digest(model)
    other = strategy.prepare(make())
    history = other.fit(x, y, callbacks=[KINDS.BackupAndRestore(backup)], **options)
    # The backup is gone now, and a third training starts from nothing, on all workers.
    third = strategy.prepare(make())
    epochs = third.fit(x, y, callbacks=[KINDS.BackupAndRestore(backup)], **options).epoch
    best = strategy.prepare(make())
    stopping = KINDS.EarlyStopping(monitor="loss", mode="max", patience=1, restore_best_weights=True, baseline=9)
    stopped = best.fit(x, y, callbacks=[stopping], **options).epoch
    return {"before": before, "epochs": [history.epoch, epochs, stopped], "after": [digest(other), digest(best)]}


@scenario
def one_progress_bar(strategy):
    """The test looks at what is on the screen, between these words."""
    model, (x, y) = strategy.prepare(make()), numbers()
    print("BAR BEGINS", flush=True)
    model.fit(x, y, batch_size=10, epochs=2, validation_data=(x, y))
    model.evaluate(x, y)
    model.predict(x)
    time.sleep(0.5)  # what other workers print is held for a moment
    print("BAR ENDS", flush=True)


@scenario
def any_stop_stops_all(strategy):
    x, y = numbers()
    steps = []
    seen: list[int] = []

    def stop_by_clock(callback, batch, logs=None):
        seen.append(batch)
        if strategy.worker == 1 and len(seen) == 6:
            callback.model.stop_training = True

    def stop_at_once(callback, epoch, logs=None):
        callback.model.stop_training = strategy.worker == 1

    for name, function in (
        ("on_train_batch_end", stop_by_clock),
        ("on_epoch_begin", stop_at_once),
        ("on_epoch_end", stop_at_once),
    ):
        model, start = strategy.prepare(make()), strategy.step
        history = model.fit(x, y, batch_size=10, epochs=5, verbose=0, callbacks=[Hook(name, function)])
        steps.append([strategy.step - start, history.epoch, digest(model)])
    return {"steps": steps, "seen": seen}


@scenario
def callbacks_on_the_main_worker_only(strategy):
    """As scripts have them that know of workers."""
    model, (x, y) = strategy.prepare(make()), numbers()
    seen: list[int] = []

    def stop(callback, batch, logs=None):
        seen.append(batch)
        callback.model.stop_training = len(seen) == 6

    callbacks = [Hook("on_train_batch_end", stop)] if strategy.is_main else []
    history = model.fit(x, y, batch_size=10, epochs=5, verbose=0, callbacks=callbacks)
    return {"seen": seen, "epochs": history.epoch, "after": digest(model)}


@scenario
def nan_on_one_replica(strategy):
    """It trains on; whoever asks for it is stopped."""
    x, y = numbers(20)
    x[19] = np.nan
    histories = []
    for callbacks in ([], [KINDS.TerminateOnNaN()]):
        linear = compiled(keras.Sequential([keras.Input((6,)), layers.Dense(3)]))  # on TensorFlow, relu(nan) is 0
        model, start = strategy.prepare(linear), strategy.step
        history = model.fit(x, y, batch_size=10, epochs=2, verbose=0, shuffle=False, callbacks=callbacks)
        histories.append([[str(value) for value in history.history.get("loss", [])], strategy.step - start])
    return {"histories": histories}


# Saving, and looking at the model on one worker.


@scenario
def saving(strategy):
    model, (x, y) = strategy.prepare(make()), numbers()
    folder = FOLDER / f"saved-by-{strategy.worker}"
    if strategy.is_main:
        folder.mkdir()
    model.fit(
        x, y, batch_size=10, verbose=0, callbacks=[Hook("on_epoch_end", lambda c, *_: c.model.save(folder / "c.keras"))]
    )
    model.save(folder / "all.keras")
    model.save(str(folder / "all.keras"), overwrite=True)
    model.save_weights(folder / "all.weights.h5")
    if strategy.is_main:
        model.save(folder / "main.keras")
    is_torch = keras.backend.backend() == "torch"
    kind, exported = ("torch", "exported.pt2") if is_torch else ("tf_saved_model", "exported")
    for _ in range(2):
        model.export(folder / "new" / exported, format=kind, verbose=False)
    refused = []
    try:
        model.save(folder / "missing" / "m.keras")
    except duoka.errors.CheckpointError as error:
        refused.append(str(error))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4000, before[1]))
    try:
        model.save(folder / "all.keras")
    except duoka.errors.CheckpointError as error:
        refused.append(str(error))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    try:
        model.save(folder / "all.keras", overwrite=False)
    except duoka.errors.CheckpointError as error:
        refused.append(str(error))
    facts: dict = {"exists": folder.exists(), "refused": refused}
    if strategy.is_main:
        facts["names"] = sorted(path.name for path in folder.iterdir())
        facts["exported"] = [path.name for path in (folder / "new").iterdir()] == [exported]
        loaded = [keras.models.load_model(folder / name) for name in ("c.keras", "all.keras", "main.keras")]
        model_again = make()
        model_again.load_weights(folder / "all.weights.h5")
        loaded.append(model_again)
        expected = keras.ops.convert_to_numpy(model(x))
        facts["same"] = [bool(np.array_equal(keras.ops.convert_to_numpy(other(x)), expected)) for other in loaded]
        facts["ours"] = [name for name in vars(loaded[0]) if name in ("fit", "save", "make_train_function")]
    return facts


@scenario
def looking_on_the_main_worker_changes_nothing(strategy):
    """`evaluate`, `predict` and the like in a callback, on one worker: nobody waits, and nothing differs afterwards."""
    x, y = numbers()

    def look(callback, *args):
        if strategy.is_main:
            callback.model.evaluate(x[:7], y[:7], verbose=0)
            callback.model.predict(x[:7], verbose=0)
            callback.model.test_on_batch(9 * x[:7], y[:7])
            callback.model.predict_on_batch(x[:7])

    results = []
    for callbacks in ([], [Hook("on_train_batch_end", look), Hook("on_epoch_end", look)]):
        model = strategy.prepare(make())
        history = model.fit(x, y, batch_size=10, epochs=3, verbose=0, shuffle=False, callbacks=callbacks)
        results.append([digest(model), history.history])
    if strategy.is_main:
        model.evaluate(x, y, verbose=0)
        np.random.rand(3)
    look = Hook("on_epoch_end", look)
    model.fit(x, y, batch_size=10, epochs=3, verbose=0, callbacks=[look])  # shuffled, as before
    outputs = model.predict(x, batch_size=5, verbose=0)
    in_order = float(np.abs(outputs - keras.ops.convert_to_numpy(model(x))).max())
    plain = make()
    plain.set_weights(model.get_weights())
    alone = [float(value) for value in model.evaluate(x, y, verbose=0, batch_size=5)]
    same = np.allclose(alone, plain.evaluate(x, y, verbose=0, batch_size=5), rtol=1e-6)
    if strategy.is_main:
        same &= np.allclose(model.test_on_batch(x, y), plain.test_on_batch(x, y), rtol=1e-6)
        same &= np.allclose(model.predict_on_batch(x), plain.predict_on_batch(x), rtol=1e-6)
    return {"results": results, "after": digest(model), "in_order": in_order < 1e-6, "alone": alone, "same": bool(same)}


@scenario
def weights_that_the_main_worker_loads_reach_all(strategy):
    model, (x, y) = strategy.prepare(make()), numbers()
    model.fit(x, y, batch_size=10, verbose=0)
    if strategy.is_main:
        model.set_weights([weight + 1 for weight in model.get_weights()])
    model.fit(x, y, batch_size=10, verbose=0)
    return {"digest": digest(model)}


@scenario
def weights_of_16_bits(strategy):
    x, y = numbers()
    ends = []
    for prepare in (strategy.prepare, lambda model: model):
        keras.utils.set_random_seed(7)
        parts = [keras.Input((6,)), layers.Dense(8, dtype="bfloat16"), layers.BatchNormalization(dtype="bfloat16")]
        model = compiled(keras.Sequential([*parts, layers.Dense(3, dtype="bfloat16")]))
        prepare(model).fit(x, y, batch_size=10, verbose=0, shuffle=False)
        ends.append(model)
    return {"digest": digest(ends[0]), "losses": [model.history.history["loss"][0] for model in ends]}


@scenario
def once(strategy):
    path = FOLDER / "once"
    with strategy.main_first():
        existed = path.exists()
        path.mkdir(exist_ok=True)
    strategy.print("PRINTED ONCE", strategy.is_main)
    return {"existed": existed, "is_main": strategy.is_main}


# Where models come from.


@scenario
def outsiders(strategy):
    """Keras is as it was, after `main` has trained a model that belongs to no run."""
    x, y = numbers()
    make().fit(x, y, batch_size=10, verbose=0)
    return {"is_watched": hasattr(keras.Model.make_train_function, "__wrapped__")}


@scenario
def scopes(strategy):
    x, y = numbers()
    digests = []
    options = {"batch_size": 10, "epochs": 2, "verbose": 0}
    with strategy.scope():
        first = make()
        with strategy.scope():
            second = make()
            second.fit(x, y, **options)
        first.fit(x, y, **options)  # two models of one strategy, and training inside
    digests += [digest(first), digest(second)]
    outside = make()
    with strategy.scope():
        outside.fit(x, y, **options)
    digests.append(digest(outside))
    prepared = strategy.prepare(make())
    prepared.fit(x, y, **options)
    digests.append(digest(prepared))
    trained_before = make()
    trained_before.fit(x, y, **options)
    plain = digest(trained_before)
    trained_before = compiled(trained_before)
    trained_before.set_weights(make().get_weights())
    keras.utils.set_random_seed(7)
    make()
    strategy.prepare(trained_before).fit(x, y, **options)
    digests.append(digest(trained_before))
    unbuilt = compiled(keras.Sequential([layers.Dense(8, activation="relu"), layers.Dense(3)]))
    start = strategy.step
    strategy.prepare(unbuilt).fit(x, y, **options)
    return {"digests": digests, "plain": plain, "steps": strategy.step - start, "unbuilt": digest(unbuilt)}


for function in (
    data,
    misuse,
    threads_beside_a_step,
    drifting,
    steps_behind_the_back,
    optimizers_with_an_apply_of_ones_own,
    own_losses,
):
    scenario(function)
if keras.backend.backend() == "tensorflow":
    scenario(draws_of_tensorflow)
    scenario(who_compiles_the_update)
    scenario(functions_of_the_old_kind)


def main() -> None:
    version, keras.__version__ = keras.__version__, "3.99.0"
    strategy = duoka.Mirrored(devices=2)
    make().fit(*numbers(), batch_size=10, verbose=0)  # before there was a scope
    strategy.prepare(make())
    keras.__version__ = version
    facts = {}
    for name in sys.argv[2:] or SCENARIOS:
        print("BEGIN", name, flush=True)
        facts[name] = SCENARIOS[name](strategy)
    print(json.dumps(facts), flush=True)


if __name__ == "__main__":
    main()
