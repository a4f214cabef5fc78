"""What docs/from-the-articles.md shows for TensorFlow in one process: devices and towers; prints the facts."""

from __future__ import annotations

import json

import keras
import numpy as np
import tensorflow as tf

import duoka
from duoka.errors import DuokaError
from duoka.keras import multi_gpu_model
from duoka.tensorflow import average_gradients, tower_devices

ROWS = []


def row(function):
    ROWS.append(function)
    return function


def place(tensor) -> str:
    return tensor.device.rpartition("/device:")[2]


@row
def towers() -> dict:
    """First: its logical CPUs have to be made before TensorFlow starts."""
    num_gpus, batch_size = 4, 32
    rng = np.random.default_rng(0)
    images, labels = (rng.standard_normal((batch_size, n)).astype("float32") for n in (6, 1))
    devices = tower_devices(num_gpus)
    weights = tf.Variable(tf.zeros((6, 1)))

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

    plain = np.zeros((6, 1))
    for step in range(12):
        plain -= 0.1 * 0.5 ** (step // 5) * 2 * images.T @ (images @ plain - labels) / batch_size
    with tf.device(devices[3]):
        last = tf.constant(1.0)
    error = np.abs(weights.numpy() - plain).max() / np.abs(plain).max()
    return {"devices": devices, "last": place(last), "difference": float(error), "rate": float(opt.learning_rate)}


@row
def on_the_cpu() -> dict:
    with duoka.device("/cpu:0"):
        v1 = tf.constant([1.0, 2.0, 3.0], shape=[3], name="v1")
        v2 = tf.constant([1.0, 2.0, 3.0], shape=[3], name="v2")
        sumV12 = v1 + v2
    print(sumV12.numpy(), sumV12.device)
    return {"sum": sumV12.numpy().tolist(), "place": place(sumV12)}


@row
def on_a_card() -> dict:
    with duoka.device("/gpu:3") as found:
        v1 = tf.constant([1.0, 2.0, 3.0], shape=[3], name="v1")
        v2 = tf.constant([1.0, 2.0, 3.0], shape=[3], name="v2")
        sumV12 = v1 + v2
    try:
        with duoka.device("/gpu:3", soft_placement=False):
            error = "nothing"
    except DuokaError as refused:
        error = str(refused)
    return {"sum": sumV12.numpy().tolist(), "place": place(sumV12), "found": found.name, "error": error}


@row
def in_a_session() -> dict:
    """For those who keep the session: the name is found before TensorFlow sees it."""
    tf1 = tf.compat.v1
    with tf.Graph().as_default():
        with duoka.device("/gpu:3"):
            v1 = tf.constant([1.0, 2.0, 3.0], shape=[3], name="v1")
            sumV12 = v1 + v1
        with tf1.Session(config=tf1.ConfigProto(allow_soft_placement=False)) as sess:
            return {"sum": sess.run(sumV12).tolist(), "asked": sumV12.op.device}


@row
def on_two_cpus() -> dict:
    with duoka.device("/cpu:0"):
        a = tf.constant([1.0, 2.0, 3.0], shape=[3], name="a")
        b = tf.constant([1.0, 2.0, 3.0], shape=[3], name="b")
    with duoka.device("/cpu:1"):
        c = a + b
    return {"sum": c.numpy().tolist(), "places": [place(a), place(c)]}


@row
def placed_softly() -> dict:
    a_cpu = tf.Variable(0, name="a_cpu")
    with duoka.device("/gpu:0"):
        a_gpu = tf.Variable(0, name="a_gpu")
    return {"places": [place(a_cpu), place(a_gpu)]}


@row
def added_from_two_cards() -> dict:
    c = []
    for d in ["/gpu:2", "/gpu:3"]:
        with duoka.device(d):
            a = tf.constant([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], shape=[2, 3])
            b = tf.constant([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], shape=[3, 2])
            c.append(tf.matmul(a, b))
    with duoka.device("/cpu:0"):
        total = tf.add_n(c)
    return {"sum": total.numpy().tolist()}


@row
def every_card_here() -> dict:
    """Without a number: as many replicas as cards; here one CPU, and Keras's own `fit`."""
    strategy = duoka.Mirrored()
    x, y = np.ones((8, 3), "float32"), np.ones((8, 1), "float32")
    weights = []
    for make in (lambda model: model, multi_gpu_model, lambda model: multi_gpu_model(model, gpus=None)):
        keras.utils.set_random_seed(0)
        model = make(keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)]))
        model.compile("sgd", "mse", run_eagerly=True)
        model.fit(x, y, batch_size=4, verbose=0)
        weights.append(model.get_weights()[0].tolist())
    gpus = [device for device in duoka.devices() if device.kind == "gpu"]
    return {"replicas": strategy.num_replicas_in_sync, "gpus": len(gpus), "weights": weights}


@row
def logged() -> dict:
    strategy = duoka.Mirrored(log_placement=True)
    model = strategy.prepare(keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, name="added")]))
    model.compile("sgd", "mse")
    model.fit(np.ones((4, 3)), np.ones((4, 1)), batch_size=4, verbose=0)
    return {}


if __name__ == "__main__":
    print("FACTS " + json.dumps({function.__name__: function() for function in ROWS}), flush=True)
