from __future__ import annotations

import torch


def why_not_fork() -> str | None:
    if torch.cuda.is_initialized():
        return "PyTorch has initialised CUDA in this process, and CUDA does not survive a fork."
    return None


def pin_one_thread() -> None:
    torch.set_num_threads(1)
