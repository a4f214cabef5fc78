"""For TensorFlow users: what belongs inside `strategy.run`, towers in one process, and a familiar name.

Importing this imports TensorFlow, and starts nothing: devices can still be configured.
"""

from __future__ import annotations

from typing import Any

import duoka
from duoka.frameworks.tensorflow.replica import get_replica_context
from duoka.frameworks.tensorflow.towers import average_gradients, tower_devices

__all__ = ["MirroredStrategy", "average_gradients", "get_replica_context", "tower_devices"]


class MirroredStrategy(duoka.Mirrored):
    """`duoka.Mirrored` with the arguments of `tf.distribute.MirroredStrategy`, for scripts that change the import."""

    def __init__(self, devices: Any = None, cross_device_ops: Any = None) -> None:
        """`cross_device_ops` chooses between TensorFlow's ways to add up; here there is one, and it is ignored."""
        super().__init__(devices=devices)
