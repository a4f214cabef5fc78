"""Runs what test_placement.py looks at on two workers, and prints it: TensorFlow is not started inside pytest."""

from __future__ import annotations

import duoka
from duoka.runtime.worker import attachment

LIMIT_MB = 3000


def make_strategy() -> duoka.Mirrored:
    return duoka.Mirrored(
        devices=2,
        device_count={"GPU": 1, "CPU": 3},
        memory_limit_mb=LIMIT_MB,
        allow_growth=True,
        log_placement=True,
        deadline_s=100,
    )


if __name__ == "__main__" and attachment() is None:
    make_strategy()  # becomes the supervisor, without a start of TensorFlow that nobody needs

import json  # noqa: E402
import resource  # noqa: E402

import keras  # noqa: E402
import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402

from duoka.devices.device import Device  # noqa: E402
from duoka.errors import DuokaError  # noqa: E402
from duoka.frameworks.placement_log import PlacementLog  # noqa: E402
from duoka.frameworks.tensorflow.step_placement import log_step_placement  # noqa: E402


def place_of(name: str) -> str:
    with duoka.device(name):
        return tf.constant([1.0]).device.rpartition("/device:")[2]


def error_of(name: str) -> str:
    try:
        with duoka.device(name, soft_placement=False):
            return "nothing"
    except DuokaError as error:
        return str(error)


def limit_is_held() -> bool:
    try:
        tf.fill([LIMIT_MB, 2**20 // 4 + 1], 1.0)
    except tf.errors.ResourceExhaustedError:
        return resource.getrlimit(resource.RLIMIT_DATA)[0] != resource.RLIM_INFINITY
    return False


def log_own_step(log: PlacementLog) -> float:
    with duoka.device("/cpu:1"):
        far = tf.Variable(tf.ones((4, 3)), name="far")
    near = tf.Variable(tf.ones((4, 3)), name="near")

    @tf.function
    def step(x):
        with tf.name_scope("tower"), duoka.device("/cpu:2"):
            y = tf.matmul(x, far)
        with tf.name_scope("loss"), tf.device("/gpu:3"):  # requested, and not here
            return tf.reduce_sum(y) + tf.reduce_sum(tf.matmul(x, near))

    step(tf.ones((2, 4)))  # its kernels are there already: the table has them all the same
    for _ in range(2):
        with log_step_placement(log, lambda: [far, near]):
            value = step(tf.ones((2, 4)))
    return float(value)


def train(strategy: duoka.Mirrored) -> float:
    with strategy.scope():
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8, activation="relu"), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    rows = np.ones((16, 4), "float32")
    return model.fit(rows, rows[:, :1], batch_size=8, epochs=2, verbose=0).history["loss"][-1]


def train_apart(strategy: duoka.Mirrored) -> float:
    """In a graph, with variables on two devices."""
    with duoka.device("/cpu:1"):
        far = tf.Variable(tf.zeros((4, 1)), name="apart")
    near, optimizer = tf.Variable(tf.zeros((1,)), name="near"), keras.optimizers.SGD(0.1, momentum=0.5)

    def train_step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((x @ far + near - 1) ** 2)
        optimizer.apply(tape.gradient(loss, [far, near]), [far, near])
        return loss

    run = tf.function(strategy.run)
    return [float(strategy.reduce("mean", run(train_step, args=(tf.ones((3, 4)),)))) for _ in range(3)][-1]


def main() -> None:
    strategy = make_strategy()
    other = f"cpu:0/v{1 - strategy.worker}"
    facts = {
        "worker": strategy.worker,
        "cpus": len(tf.config.list_logical_devices("CPU")),
        "own": place_of(f"cpu:0/v{strategy.worker}"),
        "third": place_of("/job:localhost/replica:0/task:0/device:CPU:2"),
        "missing": [place_of("/gpu:7"), place_of("cuda:7")],
        "other": place_of(other),
        "errors": [error_of("/gpu:7"), error_of(other)],
        "loss": train(strategy),
        "apart": train_apart(strategy),
        "limit_is_held": limit_is_held(),
    }
    if strategy.is_main:
        facts["value"] = log_own_step(PlacementLog(Device("cpu"), lambda: True, is_only_card=True))
    print("FACTS", json.dumps(facts))


if __name__ == "__main__":
    main()
