"""Train on several devices in one process: the mean of their gradients updates one model.

python examples/cifar10_towers/today.py
python examples/cifar10_towers/today.py --data cifar-10-batches-bin --towers 4 --steps 2000

The script saves to `checkpoints`, and resumes from the newest checkpoint there.
"""

import argparse
import time

import keras
import tensorflow as tf
from keras import layers

from data import load, rows_of_step
from duoka.tensorflow import average_gradients, tower_devices

parser = argparse.ArgumentParser()
parser.add_argument("--data", help="a directory with CIFAR-10's binary version")
parser.add_argument("--towers", type=int, default=2)
parser.add_argument("--batch-size", type=int, default=64, help="of all towers together")
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--checkpoints", default="checkpoints")
options = parser.parse_args()
print(f"data: {options.data or 'synthetic images; pass --data for real files'}")
if options.batch_size % options.towers:
    raise SystemExit("Towers average with equal weights: choose a batch size that is a multiple of their number.")

devices = tower_devices(options.towers)  # first of all: logical CPUs can be made only before TensorFlow starts
keras.utils.set_random_seed(1)
images, labels = load(options.data)

with tf.device("/CPU:0"):
    model = keras.Sequential(
        [
            keras.Input((32, 32, 3)),
            layers.Conv2D(32, 5, padding="same", activation="relu"),
            layers.MaxPool2D(3, 2),
            layers.Conv2D(32, 5, padding="same", activation="relu"),
            layers.MaxPool2D(3, 2),
            layers.Flatten(),
            layers.Dense(96, activation="relu"),
            layers.Dense(10),
        ]
    )
    rate = keras.optimizers.schedules.ExponentialDecay(0.05, decay_steps=1000, decay_rate=0.5, staircase=True)
    optimizer = keras.optimizers.SGD(rate, momentum=0.9)
    optimizer.build(model.trainable_variables)
compute_loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


@tf.function
def train(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    tower_grads, losses = [], []
    parts = zip(devices, tf.split(x, len(devices)), tf.split(y, len(devices)), strict=True)
    for device, own_x, own_y in parts:
        with tf.device(device):
            with tf.GradientTape() as tape:
                losses.append(compute_loss(own_y, model(own_x, training=True)))
            gradients = tape.gradient(losses[-1], model.trainable_variables)
        tower_grads.append(list(zip(gradients, model.trainable_variables, strict=True)))
    optimizer.apply_gradients(average_gradients(tower_grads))
    return tf.add_n(losses) / len(losses)


step = tf.Variable(0, dtype=tf.int64)
checkpoint = tf.train.Checkpoint(model=model, optimizer=optimizer, step=step)
manager = tf.train.CheckpointManager(checkpoint, options.checkpoints, max_to_keep=3)
if manager.latest_checkpoint:
    checkpoint.restore(manager.latest_checkpoint).assert_consumed()
    print(f"goes on from {manager.latest_checkpoint}")

while int(step) < options.steps:
    begin = time.perf_counter()
    rows = rows_of_step(int(step), options.batch_size, len(labels))
    loss = float(train(tf.constant(images[rows]), tf.constant(labels[rows])))
    seconds = time.perf_counter() - begin
    step.assign_add(1)
    if int(step) % 10 == 0:
        rate_now = float(optimizer.learning_rate)
        per_second = options.batch_size / seconds
        print(f"step {int(step)}  loss {loss:.4f}  rate {rate_now:.4f}  {per_second:.0f} images/s", flush=True)
    if int(step) % 1000 == 0 or int(step) == options.steps:
        manager.save(int(step))
