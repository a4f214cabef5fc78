"""Article 2, a training loop of its own under MirroredStrategy: its calls in its order, on three workers."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf
from facts import difference, print_facts, scenario
from keras import applications, layers
from made_up_datasets import pictures
from tqdm import tqdm

import duoka
import duoka.tensorflow

strategy = duoka.tensorflow.MirroredStrategy(devices=["/gpu:0", "/gpu:2", "/gpu:3"])
FOLDER = Path(tempfile.gettempdir()) / "mnist"


def small_network() -> keras.Model:
    keras.utils.set_random_seed(1)
    hidden, outputs = layers.Dense(16, activation="relu"), layers.Dense(10, activation="softmax")
    return keras.Sequential([keras.Input((8, 8, 3)), layers.Flatten(), hidden, outputs])


@scenario
def device_list() -> dict:
    return {"replicas": strategy.num_replicas_in_sync, "device": str(strategy.device)}


@scenario
def folders_of_pictures() -> dict:
    if strategy.is_main:
        shutil.rmtree(FOLDER, ignore_errors=True)
        for number in range(10):
            (FOLDER / f"train/{number}").mkdir(parents=True)
            picture = tf.io.encode_png(tf.fill([28, 28, 3], tf.constant(number, tf.uint8)))
            for copy in range(2):
                tf.io.write_file(str(FOLDER / f"train/{number}/{copy}.png"), picture)
    strategy.barrier()
    IMG_SIZE, BATCH_SIZE = 32, 8
    train_set = keras.utils.image_dataset_from_directory(
        FOLDER / "train",
        label_mode="categorical",
        image_size=(IMG_SIZE, IMG_SIZE),
        batch_size=BATCH_SIZE,
        verbose=False,
    )
    sizes, right = [], []
    for batch in strategy.distribute_dataset(train_set):
        # A picture of the digit n has the colour n here.
        seen = strategy.run(lambda x, y: tf.stack([x[:, 0, 0, 0], tf.cast(tf.argmax(y, 1), tf.float32)], 1), args=batch)
        colours, digits = strategy.gather(seen, axis=0).numpy().T
        sizes.append(len(colours))
        right.append(bool((colours == digits).all()))
    return {"sizes": sizes, "right": right}


@scenario
def loop_of_the_article() -> dict:
    IMG_SIZE, BATCH_SIZE, EPOCHS = 32, 6, 2
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = applications.mobilenet_v2.MobileNetV2(
            include_top=False, weights=None, input_shape=(IMG_SIZE, IMG_SIZE, 3)
        )
        # Only its first blocks, and frozen: TensorFlow takes half a minute to compile a step of all of it.
        model = tf.keras.models.Model(model.input, model.get_layer("block_1_project_BN").output)
        model.trainable = False
        x = tf.keras.layers.Input(shape=(IMG_SIZE, IMG_SIZE, 3))
        y = model(x)
        y = tf.keras.layers.AveragePooling2D(2)(y)
        y = tf.keras.layers.Flatten()(y)
        y = tf.keras.layers.Dense(512, activation=None)(y)
        y = tf.keras.layers.Dense(10, activation="softmax")(y)
        model = tf.keras.models.Model(inputs=x, outputs=y)
        optimizer = tf.keras.optimizers.Adam(0.001)

    with strategy.scope():
        loss_object = tf.keras.losses.CategoricalCrossentropy(reduction=tf.keras.losses.Reduction.NONE)

        def compute_loss(labels, predictions):
            per_example_loss = loss_object(labels, predictions)
            return tf.nn.compute_average_loss(per_example_loss, global_batch_size=BATCH_SIZE)

        train_accuracy = tf.keras.metrics.CategoricalAccuracy(name="train_accuracy")

    def train_step(inputs):  # the article does not print its own
        images, labels = inputs
        with tf.GradientTape() as tape:
            predictions = model(images, training=True)
            loss = compute_loss(labels, predictions)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        train_accuracy.update_state(labels, predictions)
        return loss

    rng = np.random.default_rng(0)
    images = rng.random((12, IMG_SIZE, IMG_SIZE, 3)).astype("float32")
    labels = keras.utils.to_categorical(np.arange(12) % 10, 10)
    train_generator = [(images[at : at + BATCH_SIZE], labels[at : at + BATCH_SIZE]) for at in range(0, 12, BATCH_SIZE)]
    seen, start = [], model.get_weights()
    with strategy.scope():

        @tf.function
        def distributed_train_step(dataset_inputs):
            per_replica_losses = strategy.experimental_run_v2(train_step, args=(dataset_inputs,))
            return strategy.reduce(tf.distribute.ReduceOp.SUM, per_replica_losses, axis=None)

        for epoch in range(EPOCHS):
            batchs_per_epoch = len(train_generator)
            train_dataset = iter(train_generator)
            desc = "Epoch %2d/%2d" % (epoch + 1, EPOCHS)  # noqa: UP031
            with tqdm(total=batchs_per_epoch, desc=desc) as pbar:
                for _ in range(batchs_per_epoch):
                    batch_loss = distributed_train_step(next(train_dataset))
                    batch_acc = train_accuracy.result()
                    pbar.set_postfix({"loss": "%.4f" % batch_loss, "accuracy": "%.6f" % batch_acc})  # noqa: UP031
                    train_accuracy.reset_state()
                    pbar.update(1)
                    seen += [float(batch_loss), float(batch_acc)]
                shown = pbar.n

    plain = keras.models.clone_model(model)
    plain.set_weights(start)
    own, expected = keras.optimizers.Adam(0.001), []
    head, variables = plain.layers[-4:], plain.trainable_variables
    features = {at: plain.layers[1](images[at : at + BATCH_SIZE], training=False) for at in (0, BATCH_SIZE)}
    for at in [0, BATCH_SIZE] * EPOCHS:
        targets = labels[at : at + BATCH_SIZE]
        with tf.GradientTape() as tape:
            predictions = features[at]
            for layer in head:
                predictions = layer(predictions)
            loss = tf.reduce_sum(loss_object(targets, predictions)) / BATCH_SIZE
        own.apply(tape.gradient(loss, variables), variables)
        expected += [float(loss), float(np.mean(np.argmax(predictions, 1) == np.argmax(targets, 1)))]
    return {
        "steps": len(seen) // 2,
        "shown": shown,
        "numbers": difference([seen], [expected]),
        "weights": difference(model.get_weights()[-4:], plain.get_weights()[-4:]),
        "moved": difference(model.get_weights()[-4:-3], start[-4:-3]),
    }


@scenario
def loop_with_one_bar() -> dict:
    BATCH_SIZE, EPOCHS = 32, 2
    x, labels = pictures(num_samples=75, num_classes=10)
    y = keras.utils.to_categorical(labels, 10)
    train_generator = [(x[at : at + BATCH_SIZE], y[at : at + BATCH_SIZE]) for at in range(0, 75, BATCH_SIZE)]
    found = []

    def create_model():
        return small_network()

    strategy = duoka.Mirrored(devices=["/gpu:0", "/gpu:2", "/gpu:3"])
    with strategy.scope():
        model = create_model()
        optimizer = keras.optimizers.Adam(0.001)

    with strategy.scope():
        loss_object = keras.losses.CategoricalCrossentropy(reduction=None)

        def compute_loss(labels, predictions):
            per_example_loss = loss_object(labels, predictions)
            return tf.nn.compute_average_loss(per_example_loss, global_batch_size=BATCH_SIZE)

        train_accuracy = keras.metrics.CategoricalAccuracy(name="train_accuracy")

    def train_step(inputs):  # the article does not print its own
        images, labels = inputs
        with tf.GradientTape() as tape:
            predictions = model(images, training=True)
            loss = compute_loss(labels, predictions)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        train_accuracy.update_state(labels, predictions)
        return loss

    with strategy.scope():

        @tf.function
        def distributed_train_step(dataset_inputs):
            per_replica_losses = strategy.experimental_run_v2(train_step, args=(dataset_inputs,))
            return strategy.reduce(tf.distribute.ReduceOp.SUM, per_replica_losses, axis=None)

        for epoch in range(EPOCHS):
            bar = strategy.progress(train_generator, desc=f"Epoch {epoch + 1}/{EPOCHS}")
            for batch in bar:
                batch_loss = distributed_train_step(batch)
                batch_acc = train_accuracy.result()
                bar.set_postfix(loss=float(batch_loss), accuracy=float(batch_acc))
                train_accuracy.reset_state()
                found += [float(batch_loss), float(batch_acc)]

    plain, own, expected = create_model(), keras.optimizers.Adam(0.001), []
    for images, targets in train_generator * EPOCHS:
        with tf.GradientTape() as tape:
            predictions = plain(images, training=True)
            loss = tf.reduce_sum(loss_object(targets, predictions)) / BATCH_SIZE
        own.apply(tape.gradient(loss, plain.trainable_variables), plain.trainable_variables)
        expected += [float(loss), float(np.mean(np.argmax(predictions, 1) == np.argmax(targets, 1)))]
    return {
        "numbers": difference([found], [expected]),
        "weights": difference(model.get_weights(), plain.get_weights()),
        "batches": len(found) // 2,
    }


@scenario
def replica_context() -> dict:
    """Not in an article, and not to be cut: what a step can ask for while it runs."""
    numbers = []

    def step(x):
        context = duoka.tensorflow.get_replica_context()
        numbers.append(context.num_replicas_in_sync)
        own = tf.cast(context.replica_id_in_sync_group, tf.float32)
        return tf.reshape(context.all_reduce(tf.distribute.ReduceOp.SUM, tf.reduce_sum(x)) + own, [1])

    results = strategy.gather(strategy.run(step, args=(tf.ones((6, 1)),)), axis=0)
    return {"replicas": sorted(set(numbers)), "results": results.numpy().tolist()}


@scenario
def in_place_of_horovod() -> dict:
    """Article 3's Horovod script in Duoka's words, here because this launch has TensorFlow on several workers."""
    x, labels = pictures(num_samples=50, num_classes=2)
    x, y = x.reshape(50, -1), labels.astype("float32")
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(16)
    weights = tf.Variable(tf.zeros(192))

    def loss_of(x, y):
        return tf.reduce_mean((tf.linalg.matvec(x, weights) - y) ** 2)

    strategy = duoka.Mirrored(devices=["/gpu:0", "/gpu:2", "/gpu:3"])
    opt = tf.compat.v1.train.AdagradOptimizer(0.01)

    def train_step(x, y):
        with tf.GradientTape() as tape:
            loss = loss_of(x, y)
        opt.apply_gradients([(tape.gradient(loss, weights), weights)])
        return loss

    for batch in strategy.distribute_dataset(dataset):
        strategy.run(train_step, args=batch)

    plain, total = np.zeros(192), np.full(192, 0.1)  # Adagrad by hand
    for at in range(0, 50, 16):
        own_x, own_y = x[at : at + 16].astype("float64"), y[at : at + 16]
        gradient = 2 * own_x.T @ (own_x @ plain - own_y) / len(own_x)
        total += gradient**2
        plain -= 0.01 * gradient / np.sqrt(total)
    return {"weights": difference([weights.numpy()], [plain])}


if __name__ == "__main__":
    print_facts(strategy.worker)
