"""For TensorFlow users: towers in one process.

Importing this imports TensorFlow, and starts nothing: devices can still be configured.
"""

from __future__ import annotations

from duoka.frameworks.tensorflow.towers import average_gradients, tower_devices

__all__ = ["average_gradients", "tower_devices"]
