"""What a step on TensorFlow takes the gradient of, and what it does with that before it hands it to the optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import tensorflow as tf

from duoka.frameworks.replacing import for_this_thread, function_inside, replacing, replacing_inside


class Targets:
    """Of one run, or one tracing, of a step. The factor is n / n_r, which makes up for the weight of a replica.

    Losses for each row, differentiated as they are, give the gradient of their sum. What a step makes of such losses
    before is its own business: a mean of them needs nothing, and `tf.nn.compute_average_loss` divides their sum by the
    rows of the global batch, where it is given their number.
    """

    def __init__(self, factor: Any) -> None:
        self._factor = factor
        self._gradients: list[Any] = []

    @contextmanager
    def watching(self) -> Iterator[None]:
        own = tf.GradientTape.gradient

        def gradient(
            tape: Any, target: Any, sources: Any, output_gradients: Any = None, *more: Any, **options: Any
        ) -> Any:
            is_of_weights = _are_weights(sources)
            if output_gradients is None and is_of_weights and any(map(_has_rows, tf.nest.flatten(target))):
                output_gradients = tf.nest.map_structure(self._weigh, target)
            found = own(tape, target, sources, output_gradients, *more, **options)
            if is_of_weights:
                self._gradients += tf.nest.flatten(found)
            return found

        with (
            replacing([(tf.GradientTape, "gradient", for_this_thread(gradient, own))]),
            replacing_inside(tf.nn.compute_average_loss, self._make_average()),
        ):
            yield

    def _make_average(self) -> Callable[..., Any]:
        own = function_inside(tf.nn.compute_average_loss)

        def average(per_example_loss: Any, sample_weight: Any = None, global_batch_size: Any = None) -> Any:
            loss = own(per_example_loss, sample_weight, global_batch_size)
            return loss if global_batch_size is None else loss * tf.cast(self._factor, loss.dtype)

        return for_this_thread(average, own)

    def _weigh(self, target: Any) -> Any:
        weights = tf.ones_like(target)
        return weights * tf.cast(self._factor, weights.dtype) if _has_rows(target) else weights

    def name_changes(self, model: Any, applied: Sequence[Any], tell: Callable[[str], None]) -> None:
        """Say when what was applied is not what came out of a tape."""
        known = {id(gradient) for gradient in tf.nest.flatten(self._gradients)}
        parts = tf.nest.flatten([gradient for gradient in applied if gradient is not None])
        if known and any(id(part) not in known for part in parts):
            tell(
                f"the train_step of {type(model).__name__} changes gradients before it applies them: it has those of"
                " one replica, so that clipping belongs in the optimizer (clipnorm, global_clipnorm, clipvalue);"
                " multiples and sums are right"
            )


def _are_weights(sources: Any) -> bool:
    """Not so where a step asks how a value changes with its inputs, to punish it for that."""
    return all(isinstance(source, (tf.Variable, keras.Variable)) for source in tf.nest.flatten(sources))


def _has_rows(target: Any) -> bool:
    if not isinstance(target, tf.Tensor) or not target.shape.rank:
        return False
    return tf.executing_eagerly() or target.shape.num_elements() != 1  # a graph does not know the number of rows
