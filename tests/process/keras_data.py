"""Data of all kinds, for keras_habits.py: each is trained on as one device does."""

from __future__ import annotations

import gc
import warnings

import keras
from keras_habitual import digest, distance, make, numbers


def arrays(rows=33):
    x, y = numbers(rows)
    return {"x": x, "y": y, "batch_size": 10}


def arrays_split():
    return arrays(40) | {"validation_split": 0.2, "class_weight": {0: 1.0, 1: 2.0, 2: 0.5}}


def arrays_from_the_third_epoch():
    return arrays() | {"initial_epoch": 2, "epochs": 4, "validation_data": arrays_as_tf_dataset(shuffle=False)["x"]}


def arrays_as_tf_dataset(shuffle=True):
    import tensorflow as tf

    dataset = tf.data.Dataset.from_tensor_slices(numbers())
    return {"x": (dataset.shuffle(100) if shuffle else dataset).batch(10)}


class Batches(keras.utils.PyDataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        x, y = numbers()
        return x[index * 10 : index * 10 + 10], y[index * 10 : index * 10 + 10]


def py_dataset():
    return {"x": Batches()}


def torch_loader():
    import torch

    torch.manual_seed(11)  # Keras does so only where it runs on PyTorch
    x, y = numbers()
    dataset = torch.utils.data.TensorDataset(torch.tensor(x), torch.tensor(y))
    return {"x": torch.utils.data.DataLoader(dataset, batch_size=10, shuffle=True)}


def generator_that_ends_early():
    def batches():
        x, y = numbers()
        for start in range(0, 33, 10):
            yield x[start : start + 10], y[start : start + 10]

    return {"x": batches(), "steps_per_epoch": 3}


def fewer_rows_than_replicas():
    return arrays(1)


def last_batch_of_one():
    return arrays(31) | {"shuffle": False}


def some_steps():
    return arrays() | {"steps_per_epoch": 2, "epochs": 4}


SOURCES = (
    arrays,
    arrays_split,
    arrays_from_the_third_epoch,
    arrays_as_tf_dataset,
    py_dataset,
    torch_loader,
    generator_that_ends_early,
    fewer_rows_than_replicas,
    last_batch_of_one,
    some_steps,
)


def data(strategy):
    """Each is trained on as one device does, in its order, and ends with the same bits on all workers."""
    facts = {}
    for source in SOURCES:
        ends = []
        for prepare in (strategy.prepare, lambda model: model):
            model = prepare(make())
            keras.utils.set_random_seed(11)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                model.fit(**({"epochs": 2, "verbose": 0} | source()))
            ends.append(model)
            gc.collect()  # Keras leaves iterators in cycles; the older one is, the longer TensorFlow waits for its end
        facts[source.__name__] = [distance(*ends), digest(ends[0]), len(ends[0].history.epoch)]
    return facts
