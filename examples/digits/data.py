"""The 1797 digits that come with scikit-learn: nothing is downloaded."""

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch.utils.data import TensorDataset

NUM_TRAIN = 1297  # the other 500 are for testing; 1297 is no multiple of the batch size: the last batch is short


def load_sets() -> tuple[TensorDataset, TensorDataset]:
    """Training and test set, as 1x8x8 images between 0 and 1 with their labels; always the same split."""
    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))
    images = torch.tensor(digits.images[order] / 16, dtype=torch.float32).unsqueeze(1)
    labels = torch.tensor(digits.target[order])
    return (
        TensorDataset(images[:NUM_TRAIN], labels[:NUM_TRAIN]),
        TensorDataset(images[NUM_TRAIN:], labels[NUM_TRAIN:]),
    )
