"""Scenarios of keras_habits.py that are a matter of TensorFlow alone."""

from __future__ import annotations

import keras
import numpy as np
from keras import layers
from keras_habitual import compiled, distance, make, numbers
from keras_pieces import compiled as compile_with


def draws_of_tensorflow(strategy):
    """The test looks at what is said."""
    import tensorflow as tf

    class Noise(layers.Layer):
        def call(self, x):
            return x + tf.random.normal(tf.shape(x))

    x, y = numbers()
    for _ in range(2):
        strategy.prepare(make(Noise())).fit(x, y, batch_size=10, verbose=0)


def functions_of_the_old_kind(strategy):
    """`tf.nn.ctc_loss` has some, into which nobody can look. How far this is from one device."""
    generator = np.random.default_rng(1)
    x, y = generator.standard_normal((23, 12, 5)).astype("float32"), generator.integers(1, 6, (23, 4))
    ends = []
    for prepare in (strategy.prepare, lambda model: model):
        keras.utils.set_random_seed(7)
        model = keras.Sequential([keras.Input((12, 5)), layers.Dense(7)])
        prepare(compile_with(model, keras.optimizers.SGD(0.01), keras.losses.CTC()))
        model.fit(x, y, batch_size=10, verbose=0)
        ends.append(model)
    return {"distance": distance(*ends)}


def who_compiles_the_update(strategy):
    """What TensorFlow is told of the update: by default, refused, refused and loaded, and with many variables."""
    import tensorflow as tf

    x, y = numbers()
    told: list[bool] = []
    own = tf.function

    def function(body=None, **options):
        if getattr(body, "__name__", "") == "apply":
            told.append(bool(options["jit_compile"]))
        return own(body, **options)

    def layered(number):
        return keras.Sequential([layers.Dense(3) for _ in range(number)])

    with strategy.scope():
        by_default = compiled(layered(2))
        refused = compile_with(layered(2), jit_compile=False)
        loaded = layered(2)
        loaded.build((None, 6))
        loaded.compile_from_config(by_default.get_compile_config())
        large = compiled(layered(21))  # 42 variables, once it is built
    tf.function = function
    try:
        for model in (by_default, refused, loaded, large):
            model.fit(x, y, batch_size=33, verbose=0)
    finally:
        tf.function = own
    return {"told": told}
