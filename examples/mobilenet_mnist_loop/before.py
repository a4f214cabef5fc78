"""Train MobileNetV2 in a TensorFlow loop, on one device.

python examples/mobilenet_mnist_loop/before.py
python examples/mobilenet_mnist_loop/before.py --data images
"""

import argparse

import tensorflow as tf
from tqdm import tqdm

from data import SIZE, load_set

parser = argparse.ArgumentParser()
parser.add_argument("--data", help="a directory with train/<class>/*.png")
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--batch-size", type=int, default=64)
parser.add_argument("--width", type=float, default=1.0, help="of the layers; 1 is the published MobileNetV2")
options = parser.parse_args()
print(f"data: {options.data or 'synthetic images; pass --data for real files'}")

tf.keras.utils.set_random_seed(0)
train_set, num_classes = load_set(options.data, options.batch_size)

# Defining the model
model = tf.keras.applications.MobileNetV2(
    include_top=False, weights=None, input_shape=(SIZE, SIZE, 3), alpha=options.width
)
x = tf.keras.layers.Input(shape=(SIZE, SIZE, 3))
y = model(x)
y = tf.keras.layers.GlobalAveragePooling2D()(y)
y = tf.keras.layers.Dense(512)(y)
y = tf.keras.layers.Dense(num_classes, activation="softmax")(y)
model = tf.keras.models.Model(inputs=x, outputs=y)
optimizer = tf.keras.optimizers.Adam(0.001)
optimizer.build(model.trainable_variables)  # otherwise TensorFlow traces the step again

# Defining the loss and the metric
loss_object = tf.keras.losses.CategoricalCrossentropy(reduction="none")


def compute_loss(labels, predictions):
    per_example_loss = loss_object(labels, predictions)
    return tf.nn.compute_average_loss(per_example_loss, global_batch_size=options.batch_size)


train_accuracy = tf.keras.metrics.CategoricalAccuracy(name="train_accuracy")


# Defining the training loop
def train_step(batch):
    images, labels = batch
    with tf.GradientTape() as tape:
        predictions = model(images, training=True)
        loss = compute_loss(labels, predictions)
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    train_accuracy.update_state(labels, predictions)
    return loss


@tf.function
def distributed_train_step(batch):
    return train_step(batch)


for epoch in range(options.epochs):
    batches = iter(train_set)
    with tqdm(total=len(train_set), desc=f"Epoch {epoch + 1}/{options.epochs}") as bar:
        for _ in range(len(train_set)):
            batch_loss = distributed_train_step(next(batches))
            batch_accuracy = train_accuracy.result()
            bar.set_postfix({"loss": f"{batch_loss:.4f}", "accuracy": f"{batch_accuracy:.4f}"})
            train_accuracy.reset_state()
            bar.update(1)
    print(f"epoch {epoch}  loss {batch_loss:.6f}  accuracy {batch_accuracy:.2%}")
