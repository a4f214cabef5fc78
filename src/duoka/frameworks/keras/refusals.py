"""Models that would train to something else on several replicas than on one device, without anybody noticing."""

from __future__ import annotations

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


def refuse_own_optimizers(model: Any) -> None:
    """After a step, or its tracing, that has not called an optimizer of Keras."""
    if model.trainable_variables:
        raise MismatchError(
            f"The train_step of {type(model).__name__} did not call the optimizer.",
            why="the gradients that it hands to optimizer.apply are what replicas exchange; what torch.optim, optax or"
            " the step itself does to weights would be done by each worker with its own rows.",
            do="let it call self.optimizer.apply(gradients, variables), with an optimizer of Keras, on all branches.",
        )


def refuse_stateful_layers(model: Any) -> None:
    """For a model that is built: layers may be made on the way."""
    for layer in model._flatten_layers():
        if isinstance(layer, keras.layers.RNN) and layer.stateful:
            raise MismatchError(
                f"The layer {layer.name} of {model.name} has stateful=True.",
                why="it keeps a state for each row of a batch, and cannot be split between replicas.",
                do="train without stateful=True, or on one replica.",
            )
