"""Compiled models whose kernels depend on the size of a batch, and on nothing that came before it."""

from __future__ import annotations

import sys

_MOST_SIZES = 64  # kernels for each size of a share: a global batch and a short last one need at most four


def fix_shapes() -> None:
    """Let torch.compile make one kernel for each size, instead of a general one after the second size.

    Which sizes a worker has seen depends on how many workers there are, and a general kernel rounds otherwise.
    """
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is None:
        return  # nothing has been compiled; importing it takes seconds
    config = dynamo.config
    config.automatic_dynamic_shapes = False
    config.assume_static_by_default = True
    config.recompile_limit = max(config.recompile_limit, _MOST_SIZES)
