"""What goes on behind Keras's back, or on one worker only, for keras_habits.py."""

from __future__ import annotations

from threading import Thread

import keras
import numpy as np
from keras import layers
from keras_habitual import Hook, compiled, digest, distance, make, numbers

import duoka

BACKEND = keras.backend.backend()
if BACKEND == "tensorflow":
    import tensorflow as tf
elif BACKEND == "torch":
    import torch
else:
    import jax


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


# Weights that differ between workers.


def raise_weights(model):
    model.set_weights([weight + 1 for weight in model.get_weights()])


class ByHand(keras.Sequential):
    """Has no use for the optimizer."""

    if BACKEND == "jax":

        def train_step(self, state, data):
            weights, other, slots, counted = state
            x, _ = data

            def loss_of(weights):
                return keras.ops.mean(keras.ops.square(self.stateless_call(weights, other, x)[0]))

            loss, gradients = jax.value_and_grad(loss_of)(weights)
            weights = [weight - 0.1 * gradient for weight, gradient in zip(weights, gradients, strict=True)]
            return {"loss": loss}, (weights, other, slots, counted)

    else:

        def train_step(self, data):
            x, y = data
            if BACKEND == "tensorflow":
                with tf.GradientTape() as tape:
                    loss = self.compute_loss(x, y, self(x))
                gradients = tape.gradient(loss, self.trainable_variables)
            else:
                self.zero_grad()
                loss = self.compute_loss(x, y, self(x))
                loss.backward()
                gradients = [variable.value.grad for variable in self.trainable_variables]
            for variable, gradient in zip(self.trainable_variables, gradients, strict=True):
                variable.assign(variable.value - 0.1 * gradient)
            return {"loss": loss}


class OtherOptimizer(keras.Sequential):
    """PyTorch's own."""

    other = None

    def train_step(self, data):
        x, y = data
        self.other = self.other or torch.optim.SGD(self.parameters(), 0.1)
        self.zero_grad()
        loss = self.compute_loss(x, y, self(x))
        loss.backward()
        self.other.step()
        return {"loss": loss}


class OtherOptimizerBeside(keras.Sequential):
    """PyTorch's own for one layer, after that of Keras."""

    other = None

    def train_step(self, data):
        logs = super().train_step(data)
        self.other = self.other or torch.optim.SGD(self.layers[0].parameters(), 0.1)
        self.other.step()
        return logs


def drifting(strategy):
    """An error on all workers, which can go on."""
    x, y = numbers()
    options = {"batch_size": 10, "epochs": 2, "verbose": 0}

    def set_in_a_callback():
        hook = Hook("on_epoch_end", lambda callback, *_: strategy.is_main and raise_weights(callback.model))
        strategy.prepare(make()).fit(x, y, callbacks=[hook], **options)

    def set_between_batches():
        model = strategy.prepare(make())
        for number in range(20):
            model.train_on_batch(x[:10], y[:10])
            if number == 8 and strategy.is_main:
                raise_weights(model)

    errors = {}

    def expect(name, function):
        try:
            function()
            errors[name] = "nothing"
        except duoka.errors.MismatchError as error:
            errors[name] = str(error)

    expect("set_in_a_callback", set_in_a_callback)
    expect("set_between_batches", set_between_batches)
    for kind in (ByHand, *((OtherOptimizer, OtherOptimizerBeside) if BACKEND == "torch" else ())):
        expect(kind.__name__, lambda kind=kind: strategy.prepare(small(kind)).fit(x, y, **options))
    model = strategy.prepare(make())
    model.fit(x, y, **options)
    return {"errors": errors, "after": digest(model)}


# Steps that use weights after they have applied gradients, without Keras seeing it.


class Averaging(keras.Sequential):
    """Keeps averages of its weights, which begin with their values."""

    decay = 0.9

    def __init__(self, parts):
        super().__init__(parts)
        self.averages = [
            self.add_weight(shape=v.shape, initializer="zeros", trainable=False, name=f"average_{n}")
            for n, v in enumerate(self.trainable_variables)
        ]
        for average, weight in zip(self.averages, self.trainable_variables, strict=True):
            average.assign(weight.value)

    def train_step(self, data):
        logs = super().train_step(data)
        for average, weight in zip(self.averages, self.trainable_variables, strict=True):
            self.average(average.value, weight.value)
        return logs


class RawAverages(Averaging):
    if BACKEND == "tensorflow":

        def average(self, average, weight):
            average.assign(average + (1 - self.decay) * (weight - average))

    else:

        def average(self, average, weight):
            average.data.lerp_(weight.data, 1 - self.decay)  # no difference until weights differ


class RawDecay(Averaging):
    """Writes to its weights."""

    if BACKEND == "tensorflow":

        def average(self, average, weight):
            weight.assign(weight * self.decay)

    else:

        def average(self, average, weight):
            weight.data.mul_(self.decay)


class DataReplaced(Averaging):
    def average(self, average, weight):
        weight.data = weight.data * self.decay


class RawDecayBefore(keras.Sequential):
    """Writes to its weights before it trains them."""

    def train_step(self, data):
        for weight in self.trainable_variables:
            if BACKEND == "tensorflow":
                weight.value.assign(weight.value * 0.9)
            else:
                weight.value.data.mul_(0.9)
        return super().train_step(data)


class InAFunction(keras.Sequential):
    """A step that is compiled twice, and keeps its trace."""

    if BACKEND == "tensorflow":

        @tf.function
        def train_step(self, data):
            return super().train_step(data)


class NowAndThen(keras.Sequential):
    """Adds gradients up by itself, and applies them after every second batch."""

    def __init__(self, parts):
        super().__init__(parts)
        self.number = self.add_weight(shape=(), initializer="zeros", trainable=False, name="number")
        self.sums = [
            self.add_weight(shape=v.shape, initializer="zeros", trainable=False, name=f"sum_{n}")
            for n, v in enumerate(self.trainable_variables)
        ]

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            outputs = self(x)
            loss = self.compute_loss(x, y, outputs)
        self.number.assign_add(1)
        for total, gradient in zip(self.sums, tape.gradient(loss, self.trainable_variables), strict=True):
            total.assign_add(gradient)
        tf.cond(self.number.value % 2 < 1, self.train, lambda: None)
        return self.compute_metrics(x, y, outputs)

    def train(self):
        self.optimizer.apply([total.value + 0 for total in self.sums], self.trainable_variables)
        for total in self.sums:
            total.assign(keras.ops.zeros_like(total))


class OfJax(keras.Sequential):
    def train_step(self, state, data):
        weights, other, slots, counted = state
        x, y = data

        def loss_of(weights):
            return self.compute_loss(x, y, self.stateless_call(weights, other, x)[0])

        loss, gradients = jax.value_and_grad(loss_of)(weights)
        weights, slots = self.apply(gradients, weights, slots)
        return {"loss": loss}, (weights, other, slots, counted)


class DecayBefore(OfJax):
    def apply(self, gradients, weights, slots):
        return self.optimizer.stateless_apply(slots, gradients, [0.9 * weight for weight in weights])


class DecayBeside(OfJax):
    """Leaves what the optimizer makes of the first layer."""

    def apply(self, gradients, weights, slots):
        trained, slots = self.optimizer.stateless_apply(slots, gradients, weights)
        return [0.9 * weight for weight in weights[:2]] + trained[2:], slots


def steps_behind_the_back(strategy):
    """How far each is from one device, averages included, and whether all workers have the same."""
    x, y = numbers()
    kinds = {
        "tensorflow": (RawAverages, RawDecay, RawDecayBefore, InAFunction, NowAndThen),
        "torch": (RawAverages, RawDecay, RawDecayBefore, DataReplaced),
        "jax": (DecayBefore, DecayBeside),
    }
    found = {}
    for kind in kinds[BACKEND]:
        # Run line by line, a step that applies nothing with its first batch is refused.
        for is_eager in (False, True) if BACKEND == "tensorflow" and kind is not NowAndThen else (False,):
            plain, model = (small(kind, run_eagerly=is_eager) for _ in range(2))
            strategy.prepare(model)
            for each in (plain, model):
                each.optimizer.build(each.trainable_variables)  # not in a branch
                each.fit(x, y, batch_size=10, epochs=2, verbose=0, shuffle=False)
            found[f"{kind.__name__} {is_eager}"] = [distance(model, plain, with_state=True), digest(model)]
    return found


# An optimizer whose `apply` is the user's own, on the object.


def press(optimizer):
    """Gradients, which has to be done with those of all rows."""
    own = optimizer.apply

    def apply(grads, trainable_variables=None):
        return own([keras.ops.tanh(3 * gradient) for gradient in grads], trainable_variables)

    optimizer.apply = apply
    return apply


def optimizers_with_an_apply_of_ones_own(strategy):
    """How far each is from one device, whether the function is still there, and the digest. In both modes."""
    x, y = numbers()
    found = {}
    for kind in (keras.Sequential, DecayBefore if BACKEND == "jax" else RawDecay):
        plain, model = (small(kind) for _ in range(2))
        strategy.prepare(model)
        for each in (plain, model):
            each.optimizer.build(each.trainable_variables)
            apply = press(each.optimizer)
            each.fit(x, y, batch_size=10, epochs=2, verbose=0, shuffle=False)
        is_kept = vars(model.optimizer).get("apply") is apply
        found[kind.__name__] = [distance(model, plain), is_kept, digest(model)]
    return found
