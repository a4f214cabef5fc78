"""The seed of PyTorch's generators."""

from __future__ import annotations

import torch


def seed(number: int) -> None:
    torch.manual_seed(number)
