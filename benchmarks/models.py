"""The PyTorch models of the benchmarks, without torchvision.

python benchmarks/models.py                 (prints the number of parameter tensors and megabytes of each)
"""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import nn


def make_mlp() -> nn.Module:
    """Ten million parameters in eight tensors: little to compute at a small batch, much to exchange."""
    layers: list[nn.Module] = []
    for before, after in pairwise([784, 2048, 2048, 2048, 10]):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def make_resnet() -> nn.Module:
    """ResNet-18 for 32x32 images."""
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
    inside = 64
    for outside, stride in ((64, 1), (64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2), (512, 1)):
        layers.append(_ResNetBlock(inside, outside, stride))
        inside = outside
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10))


def make_mobilenet() -> nn.Module:
    """MobileNetV2 with the strides of the paper, as Keras builds it for 32x32 images."""
    layers: list[nn.Module] = [*_convolution(3, 32, 3, 2), nn.ReLU6()]
    inside = 32
    settings = (
        (1, 16, 1, 1),
        (6, 24, 2, 2),
        (6, 32, 3, 2),
        (6, 64, 4, 2),
        (6, 96, 3, 1),
        (6, 160, 3, 2),
        (6, 320, 1, 1),
    )
    for expansion, outside, num_blocks, stride in settings:
        for number in range(num_blocks):
            layers.append(_InvertedResidual(inside, outside, stride if number == 0 else 1, expansion))
            inside = outside
    layers += [*_convolution(320, 1280, 1, 1), nn.ReLU6()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(1280, 10))


def make_transformer() -> nn.Module:
    """13 blocks of width 64 over 16 tokens: 163 parameter tensors in 1.75 MB, so each exchange is many small ones."""
    return _Transformer(num_blocks=13, width=64, num_tokens=16, num_features=16)


class _ResNetBlock(nn.Module):
    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        first, second = _convolution(inside, outside, 3, stride), _convolution(outside, outside, 3, 1)
        self.main = nn.Sequential(*first, nn.ReLU(), *second)
        self.skip = nn.Sequential()
        if stride != 1 or inside != outside:
            self.skip = nn.Sequential(*_convolution(inside, outside, 1, stride))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.main(x) + self.skip(x))


class _InvertedResidual(nn.Module):
    def __init__(self, inside: int, outside: int, stride: int, expansion: int) -> None:
        super().__init__()
        hidden = inside * expansion
        widen = [*_convolution(inside, hidden, 1, 1), nn.ReLU6()] if expansion != 1 else []
        deep = [*_convolution(hidden, hidden, 3, stride, groups=hidden), nn.ReLU6()]
        self.main = nn.Sequential(*widen, *deep, *_convolution(hidden, outside, 1, 1))
        self.has_skip = stride == 1 and inside == outside

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.main(x) if self.has_skip else self.main(x)


def _convolution(inside: int, outside: int, size: int, stride: int, groups: int = 1) -> list[nn.Module]:
    convolution = nn.Conv2d(inside, outside, size, stride, size // 2, groups=groups, bias=False)
    return [convolution, nn.BatchNorm2d(outside)]


class _Transformer(nn.Module):
    def __init__(self, num_blocks: int, width: int, num_tokens: int, num_features: int) -> None:
        super().__init__()
        self.embed = nn.Linear(num_features, width)
        self.position = nn.Parameter(torch.zeros(num_tokens, width))
        self.blocks = nn.Sequential(*(_TransformerBlock(width) for _ in range(num_blocks)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.blocks(self.embed(x) + self.position)).mean(dim=1))


class _TransformerBlock(nn.Module):
    """Twelve parameter tensors."""

    def __init__(self, width: int, num_heads: int = 4) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.widen, self.narrow = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, width = x.shape
        heads = self.qkv(self.norm_1(x)).view(batch, tokens, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(*heads.unbind(0)).transpose(1, 2).reshape(batch, tokens, width)
        x = x + self.project(seen)
        return x + self.narrow(F.gelu(self.widen(self.norm_2(x))))


def main() -> None:
    for make in (make_mlp, make_resnet, make_mobilenet, make_transformer):
        parameters = list(make().parameters())
        megabytes = sum(p.nbytes for p in parameters) / 1e6
        print(f"{make.__name__[5:]:>12}: {len(parameters)} tensors, {megabytes:.2f} MB")


if __name__ == "__main__":
    main()
