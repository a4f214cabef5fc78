"""MobileNetV2 (Sandler et al., 2018) for small grey images: it halves them three times instead of five."""

import torch
from torch import nn

# Expansion, channels, blocks, stride of the first block. Published strides are 1, 2, 2, 2, 1, 2, 1.
STAGES = [
    (1, 16, 1, 1),
    (6, 24, 2, 1),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
]


class MobileNetV2(nn.Module):
    def __init__(self, num_classes: int, width: float = 1.0, dropout: float = 0.2) -> None:
        """`width` scales the channels of every layer, in multiples of eight."""
        super().__init__()
        channels = scale(32, width)
        layers: list[nn.Module] = [*convolution(1, channels, kernel=3)]
        for expansion, published, num_blocks, stride in STAGES:
            for number in range(num_blocks):
                block = InvertedResidual(channels, scale(published, width), expansion, stride if number == 0 else 1)
                layers.append(block)
                channels = scale(published, width)
        last = scale(1280, max(width, 1.0))
        self.features = nn.Sequential(*layers, *convolution(channels, last, kernel=1))
        self.head = nn.Sequential(nn.Dropout(dropout), nn.Linear(last, num_classes))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.features(images).mean((2, 3)))


class InvertedResidual(nn.Module):
    """Widen by a 1x1 convolution, filter each channel alone, narrow again; add the input where shapes allow."""

    def __init__(self, channels_in: int, channels_out: int, expansion: int, stride: int) -> None:
        super().__init__()
        hidden = channels_in * expansion
        self.adds_input = stride == 1 and channels_in == channels_out
        self.layers = nn.Sequential(
            *(convolution(channels_in, hidden, kernel=1) if expansion > 1 else []),
            *convolution(hidden, hidden, kernel=3, stride=stride, groups=hidden),
            nn.Conv2d(hidden, channels_out, 1, bias=False),
            nn.BatchNorm2d(channels_out),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.layers(x) if self.adds_input else self.layers(x)


def convolution(channels_in: int, channels_out: int, *, kernel: int, stride: int = 1, groups: int = 1) -> list:
    return [
        nn.Conv2d(channels_in, channels_out, kernel, stride, padding=kernel // 2, groups=groups, bias=False),
        nn.BatchNorm2d(channels_out),
        nn.ReLU6(),
    ]


def scale(channels: int, width: float) -> int:
    return max(8, round(channels * width / 8) * 8)
