"""Article 1, TensorFlow's devices, sessions and towers, in one process: its calls in its order, and Duoka's."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import cifar10
import keras
import numpy as np
import tensorflow as tf
from facts import difference, print_facts, scenario

import duoka
from duoka.tensorflow import average_gradients, tower_devices

tf1 = tf.compat.v1
NUM_GPUS, MAX_STEPS = 4, 12
DEVICES = tower_devices(NUM_GPUS)  # first: TensorFlow makes logical CPUs only before it starts


def place(tensor) -> str:
    return tensor.device.rpartition("/device:")[2]


@scenario
def session_with_a_log() -> dict:
    with tf.Graph().as_default():
        a = tf.constant([1.0, 2.0, 3.0], shape=[3], name="a")
        b = tf.constant([1.0, 2.0, 3.0], shape=[3], name="b")
        c = a + b
        gpu_options = tf1.GPUOptions(per_process_gpu_memory_fraction=0.8)
        sess = tf1.Session(config=tf1.ConfigProto(log_device_placement=True, gpu_options=gpu_options))
        value = sess.run(c)
        print(value)
        sess.close()
    return {"sum": value.tolist(), "fraction": gpu_options.per_process_gpu_memory_fraction}


@scenario
def session_on_two_cpus() -> dict:
    with tf.Graph().as_default():
        with tf.device("/cpu:0"):
            a = tf.constant([1.0, 2.0, 3.0], shape=[3], name="first")
            b = tf.constant([1.0, 2.0, 3.0], shape=[3], name="second")
        with tf.device("/cpu:1"):
            c = tf.add(a, b, name="on_the_second_cpu")
        sess = tf1.Session(config=tf1.ConfigProto(log_device_placement=True, device_count={"CPU": 2}))
        value = sess.run(c)
        sess.close()
    return {"sum": value.tolist()}


@scenario
def eager_on_two_cpus() -> dict:
    with duoka.device("/cpu:0"):
        a = tf.constant([1.0, 2.0, 3.0], shape=[3], name="a")
        b = tf.constant([1.0, 2.0, 3.0], shape=[3], name="b")
    with duoka.device("/cpu:1"):
        c = a + b
    return {"sum": c.numpy().tolist(), "places": [place(a), place(c)]}


@scenario
def soft_placement_in_a_session() -> dict:
    with tf.Graph().as_default():
        a_cpu = tf1.Variable(0, name="a_cpu")
        with tf.device("/gpu:0"):
            a_gpu = tf1.Variable(0, name="a_gpu")
        sess = tf1.Session(config=tf1.ConfigProto(allow_soft_placement=True, log_device_placement=True))
        sess.run(tf1.global_variables_initializer())
        values = sess.run([a_cpu, a_gpu])
        sess.close()
    return {"values": [int(value) for value in values]}


@scenario
def soft_placement() -> dict:
    a_cpu = tf.Variable(0, name="a_cpu")
    with duoka.device("/gpu:0"):
        a_gpu = tf.Variable(0, name="a_gpu")
    return {"places": [place(a_cpu), place(a_gpu)]}


@scenario
def names_of_a_cpu() -> dict:
    """Not in an article, and not to be cut: every framework's way to write the same name."""
    found = {}
    for name in ("/cpu:2", "cpu:2", "cpu(2)", "/device:CPU:2", "/job:localhost/replica:0/task:0/device:CPU:2"):
        with duoka.device(name):
            found[name] = place(tf.constant(1.0))
    return found


def tower_loss(scope: str, tower: int) -> tf.Tensor:
    images, labels = cifar10.distorted_inputs(tower, NUM_GPUS)
    logits = cifar10.inference(images)
    _ = cifar10.loss(logits, labels)
    losses = tf1.get_collection("losses", scope)
    return tf.add_n(losses, name="total_loss")


def train(devices: list[str], directory: Path) -> dict:
    with tf.Graph().as_default(), tf.device("/cpu:0"):
        global_step = tf1.get_variable(
            "global_step", [], initializer=tf1.constant_initializer(0), trainable=False, dtype=tf.int64
        )
        num_batches_per_epoch = 5
        decay_steps = int(num_batches_per_epoch * 1.0)
        lr = tf1.train.exponential_decay(0.1, global_step, decay_steps, 0.5, staircase=True)
        opt = tf1.train.GradientDescentOptimizer(lr)

        tower_grads = []
        for i in range(NUM_GPUS):
            with tf.device(devices[i]), tf1.name_scope("%s_%d" % ("tower", i)) as scope:  # noqa: UP031
                loss = tower_loss(scope, i)
                tf1.get_variable_scope().reuse_variables()
                grads = opt.compute_gradients(loss)
                tower_grads.append(grads)
        grads = average_gradients(tower_grads)
        apply_gradient_op = opt.apply_gradients(grads, global_step=global_step)

        saver = tf1.train.Saver(tf1.all_variables())
        init = tf1.global_variables_initializer()
        sess = tf1.Session(config=tf1.ConfigProto(allow_soft_placement=True, device_count={"CPU": NUM_GPUS}))
        sess.run(init)
        coordinator = tf.train.Coordinator()
        runners = tf1.train.start_queue_runners(sess=sess, coord=coordinator)
        shown = []
        for step in range(MAX_STEPS):
            start_time = time.time()
            _, loss_value = sess.run([apply_gradient_op, loss])
            duration = time.time() - start_time
            if step % 10 == 0:
                shown.append([step, float(loss_value), duration > 0])
            if step % 1000 == 0 or (step + 1) == MAX_STEPS:
                saver.save(sess, str(directory / "model.ckpt"), global_step=step)
        weights, steps, rate = sess.run([tf1.global_variables()[1], global_step, lr])
        coordinator.request_stop()
        coordinator.join(runners, stop_grace_period_secs=60)
        sess.close()
    return {
        "asked": [grads[0][0].op.inputs[0].device for grads in tower_grads],
        "weights": weights.tolist(),
        "steps": int(steps),
        "rate": float(rate),
        "shown": shown,
        "saved": sorted(path.name for path in directory.iterdir() if path.suffix == ".index"),
        "newest": Path(tf.train.latest_checkpoint(directory)).name,
    }


def weights_of_one_device() -> np.ndarray:
    images, labels = cifar10.samples()
    weights = np.zeros((cifar10.NUM_FEATURES, 1))
    for step in range(MAX_STEPS):
        weights -= 0.1 * 0.5 ** (step // 5) * 2 * images.T @ (images @ weights - labels) / len(images)
    return weights


@scenario
def towers_on_the_gpus_of_the_article() -> dict:
    found = train(["/gpu:%d" % i for i in range(NUM_GPUS)], Path(tempfile.mkdtemp()))  # noqa: UP031
    return found | {"difference": difference([found["weights"]], [weights_of_one_device()])}


@scenario
def towers_on_logical_cpus() -> dict:
    found = train(DEVICES, Path(tempfile.mkdtemp()))
    return found | {"difference": difference([found["weights"]], [weights_of_one_device()])}


@scenario
def eager_towers() -> dict:
    num_gpus = NUM_GPUS
    devices, (images, labels) = DEVICES, cifar10.samples()
    weights = tf.Variable(tf.zeros((cifar10.NUM_FEATURES, 1)))

    def tower_loss(own_images, own_labels):
        return tf.reduce_mean((own_images @ weights - own_labels) ** 2)

    lr = keras.optimizers.schedules.ExponentialDecay(0.1, decay_steps=5, decay_rate=0.5, staircase=True)
    opt = keras.optimizers.SGD(lr)
    for _ in range(12):
        tower_grads = []
        for i in range(num_gpus):
            with tf.device(devices[i]), tf.name_scope(f"tower_{i}"):
                with tf.GradientTape() as tape:
                    loss = tower_loss(tf.split(images, num_gpus)[i], tf.split(labels, num_gpus)[i])
                tower_grads.append([(tape.gradient(loss, weights), weights)])
        grads = average_gradients(tower_grads)
        opt.apply_gradients(grads)

    return {
        "devices": devices,
        "places": [place(pairs[0][0]) for pairs in tower_grads],
        "difference": difference([weights.numpy()], [weights_of_one_device()]),
        "rate": float(opt.learning_rate),
    }


@scenario
def logged() -> dict:
    strategy = duoka.Mirrored(log_placement=True)
    model = strategy.prepare(keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, name="added")]))
    model.compile("sgd", "mse")
    model.fit(np.ones((4, 3)), np.ones((4, 1)), batch_size=4, verbose=0)
    return {}


if __name__ == "__main__":
    print_facts()
