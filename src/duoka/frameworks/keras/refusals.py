"""Models that would train to something else on several replicas than on one device, without anybody noticing."""

from __future__ import annotations

import inspect
from typing import Any

import keras

from duoka.errors import MismatchError


def refuse_own_functions(model: Any) -> None:
    """The functions that run batches are ours, on a model that belongs to a run: its own would never be called."""
    for name in ("make_train_function", "make_test_function"):
        if getattr(type(model), name) is not getattr(keras.Model, name):
            raise MismatchError(
                f"{type(model).__name__} overrides {name}, which Duoka replaces.",
                why="it says how one device runs a batch, and would not be called on several replicas.",
                do="write a train_step or test_step instead.",
            )


def refuse_fit_without_callbacks(model: Any) -> None:
    """Workers agree on stops in a callback of ours, behind those of the user, also in a `fit` of the model."""
    parameters = inspect.signature(type(model).fit).parameters.values()
    if not any(each.name == "callbacks" or each.kind is each.VAR_KEYWORD for each in parameters):
        raise MismatchError(
            f"The fit of {type(model).__name__} takes no callbacks.",
            why="Duoka has callbacks of its own, by which all workers stop after the same batch.",
            do="let it take **options, and hand them on: super().fit(x, y, **options).",
        )


def refuse_own_optimizers(model: Any) -> None:
    """After a step, or its tracing, that has not called an optimizer of Keras."""
    if model.trainable_variables:
        raise MismatchError(
            f"The train_step of {type(model).__name__} did not call the optimizer.",
            why="the gradients that it hands to optimizer.apply are what replicas exchange; what torch.optim, optax or"
            " the step itself does to weights would be done by each worker with its own rows.",
            do="let it call self.optimizer.apply(gradients, variables), with an optimizer of Keras, on all branches.",
        )


def refuse_other_distributions(model: Any) -> None:
    """Two that spread one model over devices would each take their part of every batch.

    The model may be one that is being made, and has no name yet.
    """
    if keras.distribution.distribution() is not None:
        raise MismatchError(
            f"A {type(model).__name__} is to train on replicas, and keras.distribution.set_distribution is in force.",
            why="both would spread batches or weights over devices.",
            do="leave it out, or call keras.distribution.set_distribution(None) before the model is made.",
        )
    if keras.backend.backend() == "tensorflow" and _is_of_tf_distribute(model):
        raise MismatchError(
            f"A {type(model).__name__} belongs to a strategy of tf.distribute.",
            why="it would split each replica's part of a batch again, and keeps variables of another kind.",
            do="leave tf.distribute's strategy and its scope() out; `with strategy.scope():` of Duoka stands for it.",
        )


def _is_of_tf_distribute(model: Any) -> bool:
    import tensorflow as tf

    # A model that is being made does not know yet; one that was made inside a scope does.
    return tf.distribute.has_strategy() or getattr(model, "_distribute_strategy", None) is not None


def refuse_stateful_layers(model: Any) -> None:
    """For a model that is built: layers may be made on the way."""
    for layer in model._flatten_layers():
        if isinstance(layer, keras.layers.RNN) and layer.stateful:
            raise MismatchError(
                f"The layer {layer.name} of {model.name} has stateful=True.",
                why="it keeps a state for each row of a batch, and cannot be split between replicas.",
                do="train without stateful=True, or on one replica.",
            )
