"""Names that blocks without a framework may use without defining them."""

import numpy as np

features = np.random.default_rng(0).normal(size=(96, 8))
targets = features.sum(1)
weights = np.zeros(8)
loss = 0.5


def gradient_of(replica):
    """Return a replica's part of the gradient, from its samples of the batch."""
    samples = slice(replica, None, strategy.replicas)  # noqa: F821
    return features[samples].T @ (features[samples] @ weights - targets[samples]) / len(targets)


class SummaryWriter:
    """Accepts the calls of TensorBoard's writer, which is not installed here."""

    def __init__(self, directory):
        self.directory = directory

    def add_scalar(self, name, value, step):
        pass
