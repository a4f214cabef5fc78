from __future__ import annotations

from tensorflow.python.eager import context


def why_not_fork() -> str | None:
    if context.context()._initialized:
        return "TensorFlow has started its runtime in this process, and its threads do not survive a fork."
    return None


def pin_one_thread() -> None:
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
