"""What docs/from-the-articles.md shows for TensorFlow and Keras, on two workers; prints what test_articles.py looks at.

Blocks of the page stand here word for word. What is compared with one device is trained without Duoka, too.
"""

from __future__ import annotations

import duoka
from duoka.runtime.worker import attachment

if __name__ == "__main__" and attachment() is None:
    duoka.Mirrored(devices=["/gpu:0", "/gpu:1"])  # becomes the supervisor, without a start of TensorFlow

import json
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf
from keras import layers, losses, metrics, models, optimizers

import duoka.keras
import duoka.tensorflow
from duoka.keras import multi_gpu_model

ROWS = []


def row(function):
    ROWS.append(function)
    return function


def pictures(num_rows: int, num_classes: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    labels = rng.integers(0, num_classes, num_rows)
    return (rng.random((num_rows, 8, 8, 3)) + labels[:, None, None, None]).astype("float32"), labels


def small_network(num_classes: int) -> keras.Model:
    keras.utils.set_random_seed(1)
    hidden = layers.Dense(16, activation="relu")
    outputs = layers.Dense(num_classes, activation="softmax")
    return keras.Sequential([keras.Input((8, 8, 3)), layers.Flatten(), hidden, outputs])


def difference(ours, plain) -> float:
    """The largest one, of the largest value: by tensor."""
    pairs = zip(map(np.asarray, ours), map(np.asarray, plain), strict=True)
    return max(float(np.abs(a - b).max() / max(np.abs(b).max(), 1e-12)) for a, b in pairs)


@row
def device_list() -> dict:
    strategy = duoka.tensorflow.MirroredStrategy(devices=["/gpu:0", "/gpu:1"])
    return {"replicas": strategy.num_replicas_in_sync, "worker": strategy.worker, "device": str(strategy.device)}


@row
def cats_and_dogs() -> dict:
    batch_size_per_replica, learning_rate, num_epochs = 16, 0.001, 2
    dataset = tf.data.Dataset.from_tensor_slices(pictures(num_rows=70, num_classes=2))

    def resize(image, label):
        return tf.image.resize(image, [8, 8]) / 255.0, label

    def create_model():
        return small_network(num_classes=2)

    strategy = duoka.tensorflow.MirroredStrategy(devices=["/gpu:0", "/gpu:1"])
    strategy.print(f"Number of devices: {strategy.num_replicas_in_sync}")
    batch_size = batch_size_per_replica * strategy.num_replicas_in_sync
    dataset = dataset.map(resize).shuffle(1024).batch(batch_size)
    with strategy.scope():
        model = create_model()
        model.compile(
            optimizer=keras.optimizers.Adam(learning_rate=learning_rate),
            loss=keras.losses.sparse_categorical_crossentropy,
            metrics=[keras.metrics.sparse_categorical_accuracy],
        )
    history = model.fit(dataset, epochs=num_epochs, verbose=0)
    return {
        "batch": batch_size,
        "batches": int(dataset.cardinality()),
        "updates": int(model.optimizer.iterations),
        "losses": history.history["loss"],
        "names": sorted(history.history),
    }


@row
def old_keras() -> dict:
    """`multi_gpu_model`, and one compile function for all backends, against one device."""
    x, labels = pictures(num_rows=90, num_classes=4)
    y = keras.utils.to_categorical(labels, 4)
    given = small_network(num_classes=4)
    parallel_model = multi_gpu_model(given, gpus=2)
    parallel_model.compile(loss="categorical_crossentropy", optimizer="rmsprop")
    parallel_model.fit(x, y, epochs=2, batch_size=32, verbose=0)

    model, num_gpus, loss, optimizer = small_network(num_classes=4), 2, "categorical_crossentropy", "rmsprop"
    gpu_list = [f"gpu({i})" for i in range(num_gpus)]
    model = duoka.keras.compile(model, loss, optimizer, metrics=["accuracy"], num_gpus=gpu_list)
    model.run_eagerly = True  # for so few batches it is faster
    model.fit(x, y, epochs=2, batch_size=32, verbose=0)

    plain = small_network(num_classes=4)
    plain.compile(loss="categorical_crossentropy", optimizer="rmsprop", run_eagerly=True)
    plain.fit(x, y, epochs=2, batch_size=32, verbose=0)
    return {
        "is_the_original": parallel_model is given,
        "multi_gpu_model": difference(parallel_model.get_weights(), plain.get_weights()),
        "compile": difference(model.get_weights(), plain.get_weights()),
    }


@row
def custom_loop() -> dict:
    BATCH_SIZE, EPOCHS = 32, 2
    x, labels = pictures(num_rows=75, num_classes=10)
    y = keras.utils.to_categorical(labels, 10)
    train_generator = [(x[at : at + BATCH_SIZE], y[at : at + BATCH_SIZE]) for at in range(0, 75, BATCH_SIZE)]
    found = []

    def create_model():
        return small_network(num_classes=10)

    strategy = duoka.Mirrored(devices=["/gpu:0", "/gpu:1"])
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


@row
def pictures_in_folders() -> dict:
    if duoka.Mirrored(devices=["/gpu:0", "/gpu:1"]).is_main:
        for number in range(10):
            Path(f"mnist/train/{number}").mkdir(parents=True)
            picture = tf.io.encode_png(tf.fill([28, 28, 3], tf.constant(number, tf.uint8)))
            for copy in range(2):
                tf.io.write_file(f"mnist/train/{number}/{copy}.png", picture)
    strategy = duoka.Mirrored(devices=["/gpu:0", "/gpu:1"])
    strategy.barrier()
    IMG_SIZE, BATCH_SIZE = 32, 8
    train_set = keras.utils.image_dataset_from_directory(
        "mnist/train", label_mode="categorical", image_size=(IMG_SIZE, IMG_SIZE), batch_size=BATCH_SIZE, verbose=False
    )
    sizes, right = [], []
    for batch in strategy.distribute_dataset(train_set):
        # A picture of the digit n is of the colour n here.
        seen = strategy.run(lambda x, y: tf.stack([x[:, 0, 0, 0], tf.cast(tf.argmax(y, 1), tf.float32)], 1), args=batch)
        colours, digits = strategy.gather(seen, axis=0).numpy().T
        sizes.append(len(colours))
        right.append(bool((colours == digits).all()))
    return {"sizes": sizes, "right": right}


@row
def in_place_of_horovod() -> dict:
    x, labels = pictures(num_rows=50, num_classes=2)
    x, y = x.reshape(50, -1), labels.astype("float32")
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(16)
    weights = tf.Variable(tf.zeros(192))

    def loss_of(x, y):
        return tf.reduce_mean((tf.linalg.matvec(x, weights) - y) ** 2)

    strategy = duoka.Mirrored(devices=["/gpu:0", "/gpu:1"])
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


@row
def reuters() -> dict:
    MAX_LEN, BATCH_SIZE, MAX_WORDS, CAT_NUM = 300, 32, 30982, 46
    strategy = duoka.Mirrored(devices=["/gpu:0", "/gpu:1"])

    def load_data():
        """In place of a download: notes that it was there, and reads."""
        if not (file := Path("reuters.txt")).exists():
            file.write_text("downloaded")
            print("DOWNLOADED", flush=True)
        rng = np.random.default_rng(0)
        texts = [rng.integers(1, MAX_WORDS, length).tolist() for length in rng.integers(20, 400, 96)]
        topics = rng.integers(0, CAT_NUM, 96)
        return (texts[:64], topics[:64]), (texts[64:], topics[64:])

    with strategy.main_first():
        (x_train, y_train), (x_test, y_test) = load_data()
    x_train = keras.utils.pad_sequences(x_train, maxlen=MAX_LEN)
    x_test = keras.utils.pad_sequences(x_test, maxlen=MAX_LEN)

    def make_dataset(x, y):
        dataset = tf.data.Dataset.from_tensor_slices((x, y)).cache()
        return dataset.shuffle(buffer_size=1000).batch(BATCH_SIZE).prefetch(tf.data.AUTOTUNE)

    def create_model():
        model = models.Sequential()
        model.add(layers.Input((MAX_LEN,)))
        model.add(layers.Embedding(MAX_WORDS, 7))
        model.add(layers.Conv1D(filters=64, kernel_size=5, activation="relu"))
        model.add(layers.MaxPool1D(2))
        model.add(layers.Conv1D(filters=32, kernel_size=3, activation="relu"))
        model.add(layers.MaxPool1D(2))
        model.add(layers.Flatten())
        model.add(layers.Dense(CAT_NUM, activation="softmax"))
        return model

    def compile_model(model):
        model.compile(
            optimizer=optimizers.Nadam(),
            loss=losses.SparseCategoricalCrossentropy(),
            metrics=[metrics.SparseCategoricalAccuracy(), metrics.SparseTopKCategoricalAccuracy(5)],
        )
        return model

    keras.utils.set_random_seed(0)
    ds_train, ds_test = make_dataset(x_train, y_train), make_dataset(x_test, y_test)
    with strategy.scope():
        model = create_model()
        model = compile_model(model)
    history = model.fit(ds_train, validation_data=ds_test, epochs=2, verbose=0)

    keras.utils.set_random_seed(0)
    plain_train, plain_test = make_dataset(x_train, y_train), make_dataset(x_test, y_test)
    alone = compile_model(create_model())
    alone.run_eagerly = True
    plain = alone.fit(plain_train, validation_data=plain_test, epochs=2, verbose=0)
    return {
        "parameters": model.count_params(),
        "losses": [history.history[name] for name in ("loss", "val_loss")],
        "difference": difference(*([each.history[n] for n in ("loss", "val_loss")] for each in (history, plain))),
        "names": [sorted(each.history) for each in (history, plain)],
    }


if __name__ == "__main__":
    print("FACTS " + json.dumps({function.__name__: function() for function in ROWS}), flush=True)
