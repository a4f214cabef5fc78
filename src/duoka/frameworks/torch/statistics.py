"""What a model keeps beside its parameters: running statistics, which are merged, and other buffers.

Every replica starts a step from the same values. Afterwards the running statistics of normalisation layers are
the mean over replicas, weighted by rows; every other buffer is replica 0's. Buffers that nobody changes (masks,
tables of positions) stay where they are.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from duoka.errors import MismatchError
from duoka.frameworks.torch.tensors import as_bytes

# Layers whose running statistics are means over rows, so that their weighted mean makes sense.
_NORMALISATIONS = (nn.modules.batchnorm._NormBase,)
_MERGED = ("running_mean", "running_var")
_LARGEST_DIGEST_BYTES = 1 << 20


def _goes_back_without(module: nn.Module) -> bool:
    """Whether a layer's backward needs no running statistics: it normalises with those of the rows it is given.

    Autograd takes note of the running ones all the same, as the forward was given them. PyTorch's own forward changes
    them unnoticed too, so that a layer may run twice before the backward of its first run. What a layer does in eval
    mode goes back with the running statistics, and so may a forward that the user has written.
    """
    return module.training and type(module).forward is nn.modules.batchnorm._BatchNorm.forward


class Place(NamedTuple):
    """A buffer by the module that holds it: layers may put another tensor there."""

    module: nn.Module
    name: str

    @property
    def tensor(self) -> torch.Tensor:
        tensor = self.module._buffers[self.name]
        assert tensor is not None
        return tensor.detach()

    @property
    def held(self) -> torch.Tensor | None:
        """The very tensor that is there now."""
        return self.module._buffers[self.name]

    @property
    def mark(self) -> tuple[int, int]:
        """Changes when the buffer is changed in place or replaced."""
        tensor = self.module._buffers[self.name]
        return id(tensor), 0 if tensor is None else tensor._version

    def put(self, value: torch.Tensor) -> None:
        """A backward through what has read the buffer before is refused from here on."""
        self.tensor.copy_(value.view(self.tensor.shape))

    def put_back(self, held: torch.Tensor | None, value: torch.Tensor) -> None:
        """Let the same tensor be there again, with this value.

        A layer that has put another tensor there may have put the batch itself there: nothing is written to it.
        """
        self.module._buffers[self.name] = held
        self.put(value)

    def put_in_body(self, value: torch.Tensor) -> None:
        """The same, in the middle of a body: backwards through what has read the buffer may follow."""
        value = value.view(self.tensor.shape)
        if _goes_back_without(self.module):
            self.tensor.data.copy_(value)  # past autograd
        elif not torch.equal(as_bytes(self.tensor), as_bytes(value)):
            # Else its layer goes back with these very values: it is left alone.
            self.put(value)

    def put_bytes(self, data: torch.Tensor) -> None:
        # Cloned: a view of another type must begin at a multiple of its size.
        self.put_in_body(data.clone().view(self.tensor.dtype).to(self.tensor.device))


class Statistics:
    """The buffers of these models: `merged` ones, `others` that travel, and the `still` ones, which nobody changed."""

    def __init__(self, models: Sequence[nn.Module], moving: Iterable[Any] = (), *, is_synced: bool = False) -> None:
        self.merged: list[Place] = []
        self.others: list[Place] = []
        self.still: list[Place] = []
        known = set(moving)
        seen: set[int] = set()
        for module in _modules(models):
            is_normalisation = isinstance(module, _NORMALISATIONS)
            for name, buffer in module._buffers.items():
                if buffer is None or id(buffer) in seen:
                    continue
                seen.add(id(buffer))
                place = Place(module, name)
                if is_normalisation and name in _MERGED and not is_synced:
                    self.merged.append(place)
                elif is_normalisation or (id(module), name) in known:
                    self.others.append(place)
                else:
                    self.still.append(place)
        self.has_any = bool(self.merged or self.others or self.still)
        self._at_start: list[torch.Tensor] = []  # what a batch began with: the merged ones, then the others
        self._held: list[torch.Tensor | None] = []  # the tensors themselves, in the same order
        self._still_held: list[torch.Tensor | None] = []
        self._still_marks: list[tuple[int, int]] = []
        self._marks: list[tuple[int, int]] = []
        self._is_whole = False
        self._still_values: list[torch.Tensor] = []

    def keep_still(self) -> None:
        """Copy the still ones, once: should a body change one after all, the next body starts from this."""
        self._still_values = [place.tensor.clone() for place in self.still]
        self._still_held = [place.held for place in self.still]
        self._still_marks = [place.mark for place in self.still]

    @property
    def signature(self) -> tuple[Any, ...]:
        return self.describe({})

    def describe(self, numbers: Mapping[int, int]) -> tuple[Any, ...]:
        """All buffers; modules by these numbers, else by identity."""
        kinds = (self.merged, self.others, self.still)
        return tuple(
            tuple(
                (numbers.get(id(place.module), id(place.module)), place.name, place.tensor.shape, place.tensor.dtype)
                for place in places
            )
            for places in kinds
        )

    @property
    def other_bytes(self) -> int:
        return sum(place.tensor.numel() * place.tensor.element_size() for place in self.others)

    def begin_batch(self, *, is_whole: bool = False) -> None:
        """`is_whole`: look at the values of the still ones, because changes through `.data` leave no mark."""
        self._is_whole = is_whole
        places = (*self.merged, *self.others)
        self._at_start, self._held = [place.tensor.clone() for place in places], [place.held for place in places]
        for position, place in enumerate(self.still[: len(self._still_values)]):
            if is_whole or place.mark != self._still_marks[position]:  # the script has changed it since it was copied
                self._still_values[position] = place.tensor.clone()
                self._still_held[position], self._still_marks[position] = place.held, place.mark

    def begin_later_body(self) -> None:
        """Another replica of the same batch starts from where the first one did."""
        for place, held, value in zip((*self.merged, *self.others), self._held, self._at_start, strict=True):
            place.put_back(held, value)
        for position in self.moved():
            self.still[position].put_back(self._still_held[position], self._still_values[position])
            self._still_marks[position] = self.still[position].mark

    @property
    def num_merged(self) -> int:
        """Numbers in all of them."""
        return sum(place.tensor.numel() for place in self.merged)

    def write_merged(self, slot: torch.Tensor, weight: float) -> None:
        """Their values, weighted, in float64: rounded to what a layer has, the mean of equal values is that very value.

        So layers in eval mode keep what they have learned, to the last bit.
        """
        if not weight:
            slot.zero_()
            return
        for place, part in zip(self.merged, self._cut(slot), strict=True):
            part.copy_(place.tensor.reshape(-1)).mul_(weight)

    def put_merged(self, values: torch.Tensor) -> None:
        """Give layers the values of all replicas, in the middle of a body.

        A GAN steps its judge, then goes back through the batch that its maker made before.
        """
        for place, value in zip(self.merged, self._cut(values), strict=True):
            place.put_in_body(value.to(place.tensor.dtype))

    def _cut(self, flat: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return flat.split([place.tensor.numel() for place in self.merged])

    def watch_still(self) -> None:
        """A body begins: from here on, whoever changes a buffer that does not travel is noticed."""
        self._marks = [place.mark for place in self.still]

    def moved(self) -> list[int]:
        """The positions, among the still ones, of buffers that this body has changed after all."""
        return [
            n
            for n, (place, mark) in enumerate(zip(self.still, self._marks, strict=True))
            if place.mark != mark or (self._is_whole and not _is_equal(place.tensor, self._still_values[n]))
        ]

    def write_others(self, place: torch.Tensor) -> None:
        start = 0
        for other, begun in zip(self.others, self._at_start[len(self.merged) :], strict=True):
            if other.tensor.shape != begun.shape or other.tensor.dtype != begun.dtype:
                raise MismatchError(
                    f"The buffer {other.name} of a {type(other.module).__name__} had the shape {tuple(begun.shape)} and"
                    f" has {tuple(other.tensor.shape)} after the forward.",
                    why="buffers travel between workers, in memory of a fixed size.",
                    do="let the buffer have its full size from the start, or keep it outside of the model.",
                )
            data = as_bytes(other.tensor)
            place[start : start + data.numel()] = data
            start += data.numel()

    def read_others(self, place: torch.Tensor) -> None:
        start = 0
        for other in self.others:
            nbytes = other.tensor.numel() * other.tensor.element_size()
            other.put_bytes(place[start : start + nbytes])
            start += nbytes

    def digest_others(self) -> int:
        """To see whether replicas differ in what only replica 0 passes on."""
        return _digest(self.others)

    def digest(self) -> int:
        """To see whether replicas start a step from the same values."""
        return _digest([*self.merged, *self.others])


def _is_equal(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether all bits are. Tensors that are not strided count as equal: their marks have to do."""
    return first.layout is not torch.strided or torch.equal(as_bytes(first), as_bytes(second))


def _digest(places: Sequence[Place]) -> int:
    """Of all bytes; of large buffers, of some of them."""
    digest = 0
    for place in places:
        data = as_bytes(place.tensor)
        step = 1 + data.numel() // _LARGEST_DIGEST_BYTES
        digest = zlib.crc32((data if step == 1 else data[::step].contiguous()).cpu().numpy(), digest)
    return digest


def _modules(models: Iterable[nn.Module]) -> Iterable[nn.Module]:
    for model in models:
        yield from model.modules()
