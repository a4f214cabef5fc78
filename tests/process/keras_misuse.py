"""What does not fit, for keras_habits.py: an error on all workers, which can go on."""

from __future__ import annotations

import keras
import numpy as np
from keras import layers
from keras_habitual import Hook, compiled, digest, make, numbers

import duoka


def misuse(strategy):
    x, y = numbers()
    errors = {}

    def expect(name, function, kind=duoka.errors.MismatchError):
        try:
            function()
            errors[name] = "nothing"
        except kind as error:
            errors[name] = str(error)

    options = {"batch_size": 10, "verbose": 0}

    def shuffle_differently():
        order = np.random.default_rng().permutation(33)
        strategy.prepare(make()).fit(x[order], y[order], **options)

    def shuffle_a_stream_differently():
        def batches():
            order = np.random.default_rng().permutation(33)
            yield x[order], y[order]

        strategy.prepare(make()).fit(batches(), verbose=0)

    def differ_in_the_last_row():
        wide = np.zeros((33, 2000), "float32")
        wide[-1] = strategy.worker
        strategy.prepare(compiled(keras.Sequential([layers.Dense(3)]))).fit(wide, y, batch_size=33, verbose=0)

    def set_the_rate_on_one_worker():
        model = strategy.prepare(make())

        def set_rate(callback, *args):
            callback.model.optimizer.learning_rate = 0.1 + strategy.worker

        model.fit(x, y, callbacks=[Hook("on_train_batch_end", set_rate)], **options)

    def rows_that_do_not_fit():
        def batches():
            yield x[:10], y[:10]
            yield x[:10], y[:9]

        strategy.prepare(make()).fit(batches(), verbose=0)

    def a_batch_without_rows():
        def batches():
            yield x[:10], y[:10]
            yield x[:0], y[:0]

        strategy.prepare(make()).fit(batches(), verbose=0)

    def scope_in_a_scope():
        with strategy.scope(), duoka.Mirrored(devices=2).scope():
            pass

    def prepare_in_the_middle():
        make().fit(x, y, callbacks=[Hook("on_train_begin", lambda c, *_: strategy.prepare(c.model))], **options)

    def state_of_rows():
        rnn = layers.SimpleRNN(4, stateful=True)
        model = keras.Sequential([keras.Input((3, 2), batch_size=10), layers.Bidirectional(rnn), layers.Dense(3)])
        strategy.prepare(compiled(model)).fit(x[:30].reshape(30, 3, 2), y[:30], **options)

    def function_of_its_own():
        class Mine(keras.Sequential):
            def make_train_function(self, force=False):
                return super().make_train_function(force)

        with strategy.scope():
            Mine([layers.Dense(3)])

    def fit_of_its_own():
        class Mine(keras.Sequential):
            def fit(self, rows):
                return super().fit(*rows)

        with strategy.scope():
            Mine([layers.Dense(3)])

    def models_that_differ():
        layer = layers.Dense(4 + strategy.worker)
        strategy.prepare(make(layer)).fit(x, y, **options)

    def write_to_variable_of_tensorflow(write):
        import tensorflow as tf

        class Counting(keras.Sequential):
            def train_step(self, data):
                write(tf, num_steps)
                return super().train_step(data)

        num_steps = tf.Variable(0)
        strategy.prepare(compiled(Counting([layers.Dense(3)]))).fit(x, y, **options)

    def variable_of_tensorflow():
        write_to_variable_of_tensorflow(lambda tf, variable: variable.assign_add(1))

    def variable_in_a_branch():
        def write(tf, variable):
            tf.cond(variable < 9, lambda: variable.assign_add(1), lambda: variable + 0)

        write_to_variable_of_tensorflow(write)

    def variable_in_a_function():
        def write(tf, variable):
            tf.function(lambda: variable.assign_add(1))()

        write_to_variable_of_tensorflow(write)

    def made_in_a_scope_of_tensorflow():
        import tensorflow as tf

        with tf.distribute.OneDeviceStrategy("cpu:0").scope():
            model = make()
        strategy.prepare(model)

    def made_in_two_scopes():
        import tensorflow as tf

        with strategy.scope(), tf.distribute.OneDeviceStrategy("cpu:0").scope():
            make()

    def distribution_of_keras():
        mesh = keras.distribution.DeviceMesh((1,), ["batch"], ["cpu:0"])
        keras.distribution.set_distribution(keras.distribution.DataParallel(device_mesh=mesh))
        try:
            with strategy.scope():
                keras.Sequential([layers.Dense(3)])
        finally:
            keras.distribution.set_distribution(None)

    of_tensorflow = [
        variable_of_tensorflow,
        variable_in_a_branch,
        variable_in_a_function,
        made_in_a_scope_of_tensorflow,
        made_in_two_scopes,
    ]
    for function in (
        *(of_tensorflow if keras.backend.backend() == "tensorflow" else ()),
        shuffle_differently,
        shuffle_a_stream_differently,
        differ_in_the_last_row,
        set_the_rate_on_one_worker,
        rows_that_do_not_fit,
        a_batch_without_rows,
        scope_in_a_scope,
        prepare_in_the_middle,
        state_of_rows,
        function_of_its_own,
        fit_of_its_own,
        models_that_differ,
        distribution_of_keras,
    ):
        expect(function.__name__, function)
    model = strategy.prepare(make())
    model.fit(x, y, **options)
    return {"errors": errors, "after": digest(model)}
