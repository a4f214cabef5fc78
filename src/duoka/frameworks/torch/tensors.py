"""Tensors as NumPy arrays of the same bits, and back: also of types that NumPy does not have."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from duoka.errors import MismatchError

_SHARED = {torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}
_SHARED |= {torch.float16, torch.float32, torch.float64, torch.complex64, torch.complex128}
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by size in bytes


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor in one dimension, on its device: its own memory where that is possible.

    >>> as_bytes(torch.ones(4, 9, dtype=torch.uint8)[:1, 8])
    tensor([1], dtype=torch.uint8)
    """
    plain = tensor.detach().contiguous()
    if plain.is_conj() or plain.is_neg():
        plain = plain.resolve_conj().resolve_neg()
    # Not view(-1): one row keeps its stride in it, as in t[:1, 8], and PyTorch refuses to show its bytes.
    return plain.as_strided((plain.numel(),), (1,)).view(torch.uint8)


class Tensors:
    """Reads and makes tensors for a strategy, which knows arrays only."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def on_host(self, value: Any) -> Any:
        """A tensor in the memory of the CPU; anything else as it is."""
        return value.detach().cpu() if isinstance(value, torch.Tensor) else value

    def read(self, value: Any) -> tuple[str, np.ndarray] | None:
        """The name of a tensor's type, and its bits; None for anything else."""
        if not isinstance(value, torch.Tensor):
            return None
        if value.layout is not torch.strided or value.is_quantized:
            kind = "quantized" if value.is_quantized else value.layout
            raise MismatchError(f"A tensor that is {kind} cannot be gathered.", do="call to_dense() or dequantize().")
        tensor = value.detach().resolve_conj().resolve_neg().cpu().contiguous()
        bits = tensor if tensor.dtype in _SHARED else tensor.view(_INTEGERS[tensor.element_size()])
        return str(tensor.dtype), bits.numpy()

    def make(self, kind: str, bits: np.ndarray, like: Any) -> torch.Tensor:
        """The tensor that `read` saw, on the device of `like`, or on this worker's when that is no tensor."""
        dtype = getattr(torch, kind.removeprefix("torch."))
        tensor = torch.from_numpy(bits)
        tensor = tensor if tensor.dtype == dtype else tensor.view(dtype)
        return tensor.to(like.device if isinstance(like, torch.Tensor) else self._device)
