"""Names that TensorFlow blocks may use without defining them."""

import tensorflow as tf

tf.keras.utils.set_random_seed(0)
x = tf.random.stateless_normal((96, 8), (1, 2))
y = tf.reduce_sum(x, 1, keepdims=True)
dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(32)
model = tf.keras.Sequential([tf.keras.Input((8,)), tf.keras.layers.Dense(1)])
optimizer = tf.keras.optimizers.SGD(0.05)


def train_step(batch):
    features, targets = batch
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((model(features, training=True) - targets) ** 2)
    optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
    return loss


def train(batch):
    return strategy.reduce("mean", strategy.run(train_step, args=(batch,)))  # noqa: F821
