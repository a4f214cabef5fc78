"""PyTorch tensors on their way into a file and back."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch

from duoka.checkpoint.storage import TYPE_NAMES, StoredTensor
from duoka.errors import CheckpointError
from duoka.frameworks.torch.tensors import as_bytes

_OF_NUMPY = {getattr(torch, ours): theirs for ours, theirs in TYPE_NAMES.items()}
_NAMES = _OF_NUMPY | {torch.bfloat16: "BF16", torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2"}
_PLAIN = (torch.Tensor, torch.nn.Parameter)


class TorchCodec:
    """Tensors come back as plain ones, without gradients: a Parameter as what it holds."""

    kind, reader = "torch", "pt"

    def owns(self, value: Any) -> bool:
        return isinstance(value, torch.Tensor)

    def identity(self, value: torch.Tensor) -> Hashable:
        # Called for every tensor while training waits: no strings, no new tensors.
        if type(value) not in _PLAIN or value.layout != torch.strided or not value.numel():
            return id(value)
        signs = value.is_conj(), value.is_neg()
        return value.data_ptr(), value.device, value.shape, value.stride(), value.dtype, signs

    def store(self, value: torch.Tensor, place: str) -> tuple[StoredTensor, str]:
        tensor = value.detach()
        _refuse_special(tensor, place)
        form = ""
        if tensor.is_complex():
            tensor, form = torch.view_as_real(tensor.resolve_conj()), "complex"
        name = _NAMES.get(tensor.dtype)
        if name is None:
            raise _refusal(f"a tensor of {value.dtype}", place)
        return StoredTensor(
            name, tuple(tensor.shape), tensor.nbytes, tensor.itemsize, lambda: _read_bytes(tensor)
        ), form

    def restore(self, tensor: torch.Tensor, form: str, device: Any) -> torch.Tensor:
        # The library's tensor is the file itself, mapped; a later writer would change it under us.
        private = tensor.clone() if device is None else tensor.to(device, copy=True)
        return torch.view_as_complex(private) if form == "complex" else private


def make_codec() -> TorchCodec:
    return TorchCodec()


def _read_bytes(tensor: torch.Tensor) -> Any:
    if not tensor.numel():
        return b""
    plain = tensor.resolve_neg().cpu().contiguous()
    return plain.numpy() if tensor.dtype in _OF_NUMPY else as_bytes(plain).numpy()


def _refuse_special(tensor: torch.Tensor, place: str) -> None:
    if tensor.layout != torch.strided:
        raise _refusal(f"a sparse tensor ({str(tensor.layout).removeprefix('torch.')})", place, "save x.to_dense().")
    if type(tensor) is not torch.Tensor:
        raise _refusal(f"a {type(tensor).__name__}", place)
    if tensor.is_meta:
        raise _refusal("a tensor on the meta device, which holds no numbers", place, "give it memory first.")
    if tensor.is_quantized or tensor.is_nested:
        raise _refusal("a quantized or nested tensor", place)


def _refusal(what: str, place: str, do: str = "convert it to a plain tensor first.") -> CheckpointError:
    return CheckpointError(f"{place} is {what}, which cannot be saved.", do=do)
