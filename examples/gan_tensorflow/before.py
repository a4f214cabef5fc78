"""Train a GAN with two optimizers in a TensorFlow loop, on one device.

python examples/gan_tensorflow/before.py
python examples/gan_tensorflow/before.py --data mnist
"""

import argparse

import tensorflow as tf
from tqdm import tqdm

from data import NOISE, load_set

parser = argparse.ArgumentParser()
parser.add_argument("--data", help="a directory with train-images-idx3-ubyte.gz")
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--batch-size", type=int, default=64)
parser.add_argument("--rows", type=int, help="of the training set (default: all)")
options = parser.parse_args()
print(f"data: {options.data or 'synthetic images; pass --data for real files'}")

tf.keras.utils.set_random_seed(0)
layers = tf.keras.layers
train_set = load_set(options.data, options.batch_size, options.rows)

generator = tf.keras.Sequential(
    [
        layers.Input((NOISE,)),
        layers.Dense(7 * 7 * 32, activation="leaky_relu"),
        layers.Reshape((7, 7, 32)),
        layers.Conv2DTranspose(16, 5, strides=2, padding="same", activation="leaky_relu"),
        layers.Conv2DTranspose(1, 5, strides=2, padding="same", activation="tanh"),
    ]
)
discriminator = tf.keras.Sequential(
    [
        layers.Input((28, 28, 1)),
        layers.Conv2D(16, 5, strides=2, padding="same", activation="leaky_relu"),
        layers.Conv2D(32, 5, strides=2, padding="same", activation="leaky_relu"),
        layers.Flatten(),
        layers.Dense(1),
    ]
)
generator_optimizer = tf.keras.optimizers.Adam(1e-3, beta_1=0.5)
discriminator_optimizer = tf.keras.optimizers.Adam(1e-3, beta_1=0.5)
cross_entropy = tf.keras.losses.BinaryCrossentropy(from_logits=True)


def train_step(batch):
    images, noise = batch
    with tf.GradientTape() as generator_tape, tf.GradientTape() as discriminator_tape:
        generated = generator(noise, training=True)
        real_output = discriminator(images, training=True)
        fake_output = discriminator(generated, training=True)
        generator_loss = cross_entropy(tf.ones_like(fake_output), fake_output)
        real_loss = cross_entropy(tf.ones_like(real_output), real_output)
        fake_loss = cross_entropy(tf.zeros_like(fake_output), fake_output)
        discriminator_loss = real_loss + fake_loss
    generator_grads = generator_tape.gradient(generator_loss, generator.trainable_variables)
    discriminator_grads = discriminator_tape.gradient(discriminator_loss, discriminator.trainable_variables)
    generator_optimizer.apply_gradients(zip(generator_grads, generator.trainable_variables, strict=True))
    discriminator_optimizer.apply_gradients(zip(discriminator_grads, discriminator.trainable_variables, strict=True))
    return generator_loss, discriminator_loss


@tf.function(reduce_retracing=True)
def distributed_train_step(batch):
    return train_step(batch)


for epoch in range(options.epochs):
    bar = tqdm(train_set, desc=f"epoch {epoch}")
    for batch in bar:
        generator_loss, discriminator_loss = distributed_train_step(batch)
        bar.set_postfix(generator=f"{generator_loss:.4f}", discriminator=f"{discriminator_loss:.4f}")
    print(f"epoch {epoch}  generator {generator_loss:.6f}  discriminator {discriminator_loss:.6f}")
