"""The global generators, as values that can be saved and compared."""

from __future__ import annotations

import random
import zlib
from typing import Any

import numpy as np
import torch

from duoka.data import generators


def capture_generators() -> dict[str, Any]:
    return generators.capture_generators() | {
        "torch": torch.get_rng_state().numpy(),
        "cuda": [state.numpy() for state in torch.cuda.get_rng_state_all()] if torch.cuda.is_initialized() else [],
    }


def restore_generators(state: dict[str, Any]) -> None:
    generators.restore_generators(state)
    torch.set_rng_state(torch.from_numpy(state["torch"]))
    for index, one in enumerate(state["cuda"][: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(torch.from_numpy(one), index)


def digest_generators() -> int:
    """A digest of the global generators of Python, NumPy and PyTorch."""
    digest = zlib.crc32(torch.get_rng_state().numpy())
    digest = zlib.crc32((hash(random.getstate()[1]) & 0xFFFFFFFF).to_bytes(4, "little"), digest)
    state: Any = np.random.get_state(legacy=False)
    return zlib.crc32(int(state["state"]["pos"]).to_bytes(4, "little"), zlib.crc32(state["state"]["key"], digest))
