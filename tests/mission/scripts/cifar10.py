"""The module `cifar10` that article 1 imports and does not print: input queues, a small network and its loss."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

tf1 = tf.compat.v1
NUM_FEATURES = 6
BATCH_SIZE = 32


def samples() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return tuple(rng.standard_normal((BATCH_SIZE, n)).astype("float32") for n in (NUM_FEATURES, 1))


def distorted_inputs(tower: int, num_towers: int) -> tuple[tf.Tensor, tf.Tensor]:
    """One tower's share of the batch, at every step, through a queue that needs `start_queue_runners`."""
    share = BATCH_SIZE // num_towers
    own = [array[tower * share : (tower + 1) * share] for array in samples()]
    one = tf1.train.slice_input_producer([tf.constant(array) for array in own], shuffle=False)
    images, labels = tf1.train.batch(one, batch_size=share)
    return images, labels


def inference(images: tf.Tensor) -> tf.Tensor:
    with tf.device("/cpu:0"):
        weights = tf1.get_variable("weights", [NUM_FEATURES, 1], initializer=tf1.constant_initializer(0.0))
    return tf.matmul(images, weights)


def loss(logits: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
    value = tf.reduce_mean((logits - labels) ** 2)
    tf1.add_to_collection("losses", value)
    return value
