from __future__ import annotations

import torch


def start() -> None:
    """Make the allocator and the thread pool come up."""
    (torch.ones(64, 64) @ torch.ones(64, 64)).sum().item()
