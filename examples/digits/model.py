"""A small CNN for images of 8x8 pixels, with dropout.

GELU and average pooling are smooth: a last bit that was rounded otherwise stays a last bit. ReLU and max pooling can
turn it into another choice, and the weights of two runs then drift apart sooner.
"""

from torch import nn


def make_model(dropout: float) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.GELU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.GELU(),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Dropout(dropout),
        nn.Linear(32 * 4 * 4, 64),
        nn.GELU(),
        nn.Dropout(dropout),
        nn.Linear(64, 10),
    )
