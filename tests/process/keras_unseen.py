"""What goes on behind Keras's back, or on one worker only, for keras_habits.py."""

from __future__ import annotations

from threading import Thread

import keras
import numpy as np
from keras import layers
from keras_habitual import compiled, digest, make, numbers


def small(kind: type, **options) -> keras.Model:
    keras.utils.set_random_seed(7)
    return compiled(kind([keras.Input((6,)), layers.Dense(8, activation="relu"), layers.Dense(3)]), **options)


def threads_beside_a_step(strategy):
    """A thread that reads data may compute with Keras itself, while a step is run or traced."""
    found = []
    mean, total = keras.metrics.Mean(), keras.losses.MeanSquaredError(reduction="sum")
    variable, optimizer = keras.Variable(0.0), keras.optimizers.SGD(1.0)

    def compute():
        try:
            mean.reset_state()
            mean.update_state(4.0)
            mean.update_state(2.0, sample_weight=1)
            variable.assign(1.0)
            optimizer.apply([keras.ops.ones(())], [variable])
            loss = total(np.ones((2, 3), "float32"), np.zeros((2, 3), "float32"))
            found.append([float(number) for number in (mean.result(), loss, variable.value)])
        except BaseException as error:
            found.append(repr(error))

    class Beside(keras.Sequential):
        def train_step(self, *args):
            thread = Thread(target=compute)
            thread.start()
            thread.join()
            return super().train_step(*args)

    x, y = numbers()
    digests = []
    for model in (make(), small(Beside)):
        strategy.prepare(model).fit(x, y, batch_size=10, epochs=2, verbose=0, shuffle=False)
        digests.append(digest(model))
    return {"digests": digests, "found": found}
