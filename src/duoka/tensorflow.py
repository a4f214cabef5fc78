"""For TensorFlow users: what belongs inside `strategy.run`, and towers in one process.

Importing this imports TensorFlow, and starts nothing: devices can still be configured.
"""

from __future__ import annotations

from duoka.frameworks.tensorflow.replica import get_replica_context
from duoka.frameworks.tensorflow.towers import average_gradients, tower_devices

__all__ = ["average_gradients", "get_replica_context", "tower_devices"]
