"""`exact=True`: PyTorch takes only kernels that give the same bits each time."""

from __future__ import annotations

import os

import torch


def use_deterministic_kernels() -> None:
    """For the rest of the process. An operation that has no such kernel raises an error that names it."""
    # cuBLAS reads it when it is first used on the card, which a script has mostly not done when it prepares its model.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False
