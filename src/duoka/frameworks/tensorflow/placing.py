from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import context

from duoka.frameworks.tensorflow.devices import count_logical_devices


def placing(kind: str, index: int) -> AbstractContextManager[Any] | None:
    """For eager code, and for graphs and functions that are traced inside; None for what TensorFlow does not see."""
    if index >= count_logical_devices(kind):
        return None
    name = f"/device:{kind.upper()}:{index}"
    if tf.executing_eagerly() and not context.context()._initialized:
        return _placing_before_the_start(name)
    return tf.device(name)


@contextmanager
def _placing_before_the_start(name: str) -> Iterator[None]:
    """As `tf.device`, which starts TensorFlow: it would take all cards, in a script that may only have imported it."""
    runtime = context.context()
    before = runtime.device_name, runtime.device_spec
    place = tf.DeviceSpec.from_string(f"/job:localhost/replica:0/task:0{name}")
    runtime._set_device(place.to_string(), place)
    try:
        yield
    finally:
        runtime._set_device(*before)
