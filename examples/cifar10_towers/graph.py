"""Train on several devices in one process, as today.py does, in a TensorFlow 1 graph with a session.

python examples/cifar10_towers/graph.py
python examples/cifar10_towers/graph.py --data cifar-10-batches-bin --towers 4 --steps 2000

The script saves to `checkpoints-graph`, and resumes from the newest checkpoint there.
"""

import argparse
import time

import numpy as np
import tensorflow as tf

from data import load, rows_of_step
from duoka.tensorflow import average_gradients, tower_devices

tf1 = tf.compat.v1
parser = argparse.ArgumentParser()
parser.add_argument("--data", help="a directory with CIFAR-10's binary version")
parser.add_argument("--towers", type=int, default=2)
parser.add_argument("--batch-size", type=int, default=64, help="of all towers together")
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--checkpoints", default="checkpoints-graph")
options = parser.parse_args()
print(f"data: {options.data or 'synthetic images; pass --data for real files'}")
if options.batch_size % options.towers:
    raise SystemExit("Towers average with equal weights: choose a batch size that is a multiple of their number.")

devices = tower_devices(options.towers)
images, labels = load(options.data)


def variable(name: str, shape: list[int], fan_in: int) -> tf.Tensor:
    with tf.device("/CPU:0"):
        start = np.random.default_rng(shape).normal(0, (2 / fan_in) ** 0.5, shape) if fan_in else np.zeros(shape)
        return tf1.get_variable(name, initializer=start.astype("float32"), use_resource=False)


def convolve(x: tf.Tensor, name: str, before: int, after: int) -> tf.Tensor:
    with tf1.variable_scope(name):
        x = tf.nn.conv2d(x, variable("kernel", [5, 5, before, after], 25 * before), 1, "SAME")
        x = tf.nn.relu(x + variable("bias", [after], 0))
        return tf.nn.max_pool2d(x, 3, 2, "VALID")


def connect(x: tf.Tensor, name: str, before: int, after: int) -> tf.Tensor:
    with tf1.variable_scope(name):
        return x @ variable("kernel", [before, after], before) + variable("bias", [after], 0)


def tower_loss(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    x = convolve(convolve(x, "first", 3, 32), "second", 32, 32)
    x = tf.nn.relu(connect(tf.reshape(x, [-1, 7 * 7 * 32]), "hidden", 7 * 7 * 32, 96))
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=connect(x, "logits", 96, 10))
    return tf.reduce_mean(losses)


with tf.Graph().as_default(), tf.device("/CPU:0"):
    global_step = tf1.train.get_or_create_global_step()
    rate = tf1.train.exponential_decay(0.01, global_step, decay_steps=1000, decay_rate=0.5, staircase=True)
    optimizer = tf1.train.MomentumOptimizer(rate, 0.9)
    x = tf1.placeholder(tf.float32, [options.batch_size, 32, 32, 3])
    y = tf1.placeholder(tf.int32, [options.batch_size])
    tower_grads, losses = [], []
    for device, own_x, own_y in zip(devices, tf.split(x, len(devices)), tf.split(y, len(devices)), strict=True):
        # The first tower makes the variables, the others use them.
        with tf.device(device), tf1.variable_scope("model", reuse=bool(losses)):
            losses.append(tower_loss(own_x, own_y))
            tower_grads.append(optimizer.compute_gradients(losses[-1]))
    averaged = average_gradients(tower_grads)
    # All gradients first: an update writes to the memory of a variable, which others may still be computed from.
    with tf.control_dependencies([gradient for gradient, _ in averaged]):
        train = optimizer.apply_gradients(averaged, global_step=global_step)
    loss = tf.add_n(losses) / len(losses)
    saver = tf1.train.Saver(max_to_keep=3)

    with tf1.Session(config=tf1.ConfigProto(allow_soft_placement=True)) as session:
        session.run(tf1.global_variables_initializer())
        if newest := tf.train.latest_checkpoint(options.checkpoints):
            saver.restore(session, newest)
            print(f"goes on from {newest}")
        step = int(session.run(global_step))
        while step < options.steps:
            begin = time.perf_counter()
            rows = rows_of_step(step, options.batch_size, len(labels))
            _, value, rate_now = session.run([train, loss, rate], {x: images[rows], y: labels[rows]})
            seconds = time.perf_counter() - begin
            step += 1
            if step % 10 == 0:
                per_second = options.batch_size / seconds
                print(f"step {step}  loss {value:.4f}  rate {rate_now:.4f}  {per_second:.0f} images/s", flush=True)
            if step % 1000 == 0 or step == options.steps:
                saver.save(session, f"{options.checkpoints}/model", global_step=step)
