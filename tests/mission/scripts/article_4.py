"""Article 4, `fit` on two virtual devices with 1024 MB each: its calls in its order."""

from __future__ import annotations

import duoka
from duoka.runtime.worker import attachment


def make_strategy() -> duoka.Mirrored:
    strategy = duoka.Mirrored(duoka.virtual_devices("cpu:0", count=2, memory_mb=1024))
    return strategy


if __name__ == "__main__" and attachment() is None:
    make_strategy()  # becomes the supervisor, which needs no TensorFlow

import made_up_datasets  # noqa: E402
import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402
from facts import difference, print_facts, scenario  # noqa: E402
from tensorflow.keras import *  # noqa: E402, F403
from tensorflow.keras import backend, layers, losses, metrics, models, optimizers, preprocessing, utils  # noqa: E402

MAX_LEN = 300
BATCH_SIZE = 32
datasets = made_up_datasets  # in place of the one with downloads
strategy = make_strategy()


@scenario
def virtual_gpus() -> dict:
    gpus = tf.config.experimental.list_physical_devices("GPU")
    if gpus:
        try:
            tf.config.experimental.set_virtual_device_configuration(
                gpus[0],
                [
                    tf.config.experimental.VirtualDeviceConfiguration(memory_limit=1024),
                    tf.config.experimental.VirtualDeviceConfiguration(memory_limit=1024),
                ],
            )
        except RuntimeError as e:
            print(e)
    logical_gpus = tf.config.experimental.list_logical_devices("GPU")
    strategy.print(len(gpus), "Physical GPU,", len(logical_gpus), "Logical GPUs")
    fits = np.empty((600, 2**20), "uint8").nbytes
    try:
        np.empty((1100, 2**20), "uint8")
        is_held = False
    except MemoryError:
        is_held = True
    return {
        "version": tf.__version__.split(".")[0],
        "fits": fits,
        "is_held": is_held,
        "device": str(strategy.device),
        "replicas": strategy.replicas,
    }


@scenario
def reuters() -> dict:
    with strategy.main_first():
        (x_train, y_train), (x_test, y_test) = datasets.reuters.load_data()
    x_train = preprocessing.sequence.pad_sequences(x_train, maxlen=MAX_LEN)
    x_test = preprocessing.sequence.pad_sequences(x_test, maxlen=MAX_LEN)

    MAX_WORDS = int(x_train.max() + 1)
    CAT_NUM = int(y_train.max() + 1)

    def make_dataset(x, y):
        dataset = tf.data.Dataset.from_tensor_slices((x, y)).cache()
        return dataset.shuffle(buffer_size=1000).batch(BATCH_SIZE).prefetch(tf.data.experimental.AUTOTUNE)

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

    backend.clear_session()
    utils.set_random_seed(0)
    ds_train, ds_test = make_dataset(x_train, y_train), make_dataset(x_test, y_test)
    with strategy.scope():
        model = create_model()
        model.summary()
        model = compile_model(model)
    history = model.fit(ds_train, validation_data=ds_test, epochs=2, verbose=0)

    utils.set_random_seed(0)
    plain_train, plain_test = make_dataset(x_train, y_train), make_dataset(x_test, y_test)
    alone = compile_model(create_model())
    alone.run_eagerly = True
    plain = alone.fit(plain_train, validation_data=plain_test, epochs=2, verbose=0)
    return {
        "losses": [history.history[name] for name in ("loss", "val_loss")],
        "difference": difference(*([each.history[n] for n in ("loss", "val_loss")] for each in (history, plain))),
        "names": [sorted(each.history) for each in (history, plain)],
    }


if __name__ == "__main__":
    print_facts(strategy.worker)
