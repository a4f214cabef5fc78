"""Scenarios of keras_scenarios.py: loss terms whose denominators are not the number of rows."""

from __future__ import annotations

import keras
import numpy as np
from keras import layers
from keras_pieces import Plain, classifier, compiled, crossentropy, numbers, tokens


def masked_beside_unmasked(strategy):
    """Two outputs, one hidden by a mask where rows are padded; weighted means; class weights are below."""
    x, y, weight = tokens(41)
    x[np.arange(9)[None] >= np.random.default_rng(2).integers(2, 9, (41, 1))] = 0
    with strategy.scope():
        inputs = keras.Input((9,), dtype="int32")
        embedded = layers.Embedding(30, 8, mask_zero=True)(inputs)
        steps = layers.Dense(30, name="steps")(embedded)
        whole = layers.Dense(4, name="whole")(layers.GlobalAveragePooling1D()(embedded))
        model = keras.Model(inputs, {"steps": steps, "whole": whole})
        losses = {"steps": crossentropy(), "whole": crossentropy(reduction="mean_with_sample_weight")}
        compiled(model, loss=losses, loss_weights={"steps": 0.7, "whole": 1.0})
    weights = {"steps": np.repeat(weight[:, None], 9, 1), "whole": weight}
    return model, model.fit(x, {"steps": x, "whole": y}, sample_weight=weights, batch_size=10, epochs=4, verbose=0)


def sum_reduction(strategy):
    x, y = numbers(33)
    with strategy.scope():
        model = compiled(classifier(), keras.optimizers.SGD(0.01), crossentropy(reduction="sum"), metrics=["accuracy"])
    weights = {0: 1.0, 1: 0.5, 2: 2.0, 3: 1.5}
    return model, model.fit(x, y, batch_size=10, epochs=4, verbose=0, class_weight=weights, validation_split=0.2)


def weights_now_and_then(strategy):
    """The denominator of the loss is a number of rows at first, then a sum of weights, and so on."""
    x, y = numbers(33)
    weight = np.random.default_rng(3).random(33).astype("float32") + 0.1
    with strategy.scope():
        model = compiled(classifier(), loss=crossentropy(reduction="mean_with_sample_weight"))
    losses = []
    for given in (None, weight, None, weight):
        history = model.fit(x, y, sample_weight=given, batch_size=10, epochs=1, verbose=0)
        losses += history.history["loss"]
    history.history["loss"] = losses
    return model, history


class Additions(layers.Layer):
    """A mean and a sum of its own among the losses."""

    def __init__(self, is_plain):
        super().__init__()
        self.is_plain = is_plain

    def call(self, x):
        self.add_loss(1e-2 * keras.ops.mean(keras.ops.square(x)))
        if self.is_plain:
            self.add_loss(1e-3 * keras.ops.sum(keras.ops.abs(x)))
        else:
            import duoka.keras

            self.add_loss(1e-3 * duoka.keras.sum_loss(keras.ops.sum(keras.ops.abs(x))))
        return x


def added_losses(strategy):
    """Regularisers and add_loss are means; a sum is said to be one."""
    x, y = numbers(33)
    with strategy.scope():
        model = compiled(classifier(Additions(is_plain=isinstance(strategy, Plain))))
    return model, model.fit(x, y, batch_size=10, epochs=4, verbose=0)


def no_reduction(strategy):
    """A loss for each row: only TensorFlow takes its gradient, as that of the sum."""
    x, y = numbers(33)
    reduction = "none" if keras.backend.backend() == "tensorflow" else "sum"
    with strategy.scope():
        model = compiled(classifier(), keras.optimizers.SGD(0.01), crossentropy(reduction=reduction))
    return model, model.fit(x, y, batch_size=10, epochs=4, verbose=0)


class MeanOfAll(keras.losses.Loss):
    """One number for all rows, as people write it; there is nothing left to reduce."""

    def call(self, y_true, y_pred):
        return keras.ops.mean(keras.losses.sparse_categorical_crossentropy(y_true, y_pred, from_logits=True))


def one_number_for_a_batch(strategy):
    """Whatever the reduction; where each row has a weight, Keras adds up the products."""
    x, y = numbers(33)
    with strategy.scope():
        model = compiled(classifier(), keras.optimizers.SGD(0.01), MeanOfAll(reduction="sum", name="mean_of_all"))
    losses = model.fit(x, y, batch_size=10, epochs=2, verbose=0).history["loss"]
    history = model.fit(x, y, sample_weight=np.full(33, 0.5, "float32"), batch_size=10, epochs=2, verbose=0)
    history.history["before"] = losses
    return model, history
