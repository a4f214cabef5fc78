"""A CNN for images of 32x32 pixels in three colours."""

from torch import nn


def make_model(width: int) -> nn.Module:
    """`width` is the number of channels of the first layer; it doubles with every halving of the image."""
    return nn.Sequential(
        *block(3, width),
        *block(width, 2 * width),
        *block(2 * width, 4 * width),
        nn.Flatten(),
        nn.Linear(4 * width * 4 * 4, 128),
        nn.ReLU(),
        nn.Dropout(0.3),
        nn.Linear(128, 10),
    )


def block(channels_in: int, channels_out: int) -> list[nn.Module]:
    return [nn.Conv2d(channels_in, channels_out, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
