"""The memory of one exchange of gradients: shared slots to write into, and this worker's own memory for the sums."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from duoka.collectives.collective import Buffer, Collective, Exchange
from duoka.frameworks.torch.layout import Layout, numpy_dtype
from duoka.frameworks.torch.note import read_story
from duoka.frameworks.torch.statistics import Statistics
from duoka.topology.placement import Placement


class Round:
    """The n-th backward of the bodies of a step: its buffers, and what has come in."""

    def __init__(
        self,
        collective: Collective,
        parameters: Sequence[torch.Tensor],
        statistics: Statistics,
        sparse: Sequence[int] = (),
        name: str = "",
    ) -> None:
        self.statistics = statistics
        self._collective = collective
        self._num_parameters = len(parameters)
        # For each parameter with sparse gradients, which of its rows were touched.
        touched = [torch.empty(len(parameters[index]), device="meta") for index in sparse]
        self._layout = Layout.of([*parameters, *touched])
        self.touched_at = {index: len(parameters) + n for n, index in enumerate(sparse)}
        self.buffers: list[Buffer] = [
            collective.buffer(size, numpy_dtype(dtype), name)
            for size, dtype in zip(self._layout.sizes, self._layout.dtypes, strict=True)
        ]
        self._num_groups = len(self.buffers)
        if statistics.merged:
            self.buffers.append(collective.buffer(statistics.num_merged, np.float64, name and f"{name}, statistics"))
        if statistics.others:
            self.buffers.append(collective.buffer(statistics.other_bytes, np.uint8, name and f"{name}, buffers"))
        # What p.grad shows is this worker's own, allocated once.
        device = parameters[0].device if parameters else torch.device("cpu")
        kinds = zip(self._layout.sizes, self._layout.dtypes, strict=True)
        self._private = [torch.zeros(size, dtype=dtype, device=device) for size, dtype in kinds]
        self._merged = torch.zeros(statistics.num_merged, dtype=torch.float64, device=device)
        self._others = torch.empty(0, dtype=torch.uint8)
        self.views = self._layout.views(self._private)
        self.exchange: Exchange | None = None
        self.used: np.ndarray | None = None  # which parameters got a gradient; known once it is committed
        self.taken: set[int] = set()
        self._slots: dict[int, list[torch.Tensor]] = {}
        self._witnessed: list[torch.Tensor] = []  # the views of a replica that is computed for comparison only
        self._zeros: set[int] = set()  # replicas whose slots are known to hold zeros
        self._zeros_in: Placement | None = None  # as long as replicas lie like this

    def forget(self) -> None:
        """A new batch begins."""
        self.exchange = self.used = None
        self._witnessed = []

    def open(self, name: str, *, is_tried: bool = False) -> Exchange:
        if self.exchange is None:
            self.exchange = self._collective.exchange(self.buffers, name)
            self.exchange.common_part = read_story
            if is_tried:
                self.exchange.compare_juniors()
        return self.exchange

    def slots(self, replica: int) -> list[torch.Tensor]:
        """A view for each parameter and mask into this replica's slots."""
        self._zeros.discard(replica)
        return self._views(replica)

    def _views(self, replica: int) -> list[torch.Tensor]:
        assert self.exchange is not None
        if self.exchange.is_shadow(replica):
            self._witnessed = self._witnessed or self._make_views(self.exchange, replica)
            return self._witnessed
        if replica not in self._slots:
            self._slots[replica] = self._make_views(self.exchange, replica)
        return self._slots[replica]

    def _make_views(self, exchange: Exchange, replica: int) -> list[torch.Tensor]:
        groups = range(len(self._layout.dtypes))
        return self._layout.views([torch.as_tensor(exchange.slot(self.buffers[group], replica)) for group in groups])

    def touched(self, replica: int, index: int) -> torch.Tensor | None:
        """Where a replica says which rows of a sparse gradient it has touched."""
        return self._views(replica)[self.touched_at[index]] if index in self.touched_at else None

    def merged(self, replica: int) -> torch.Tensor:
        assert self.exchange is not None
        return torch.as_tensor(self.exchange.slot(self.buffers[self._num_groups], replica))

    def others(self, replica: int) -> torch.Tensor:
        assert self.exchange is not None
        return torch.as_tensor(self.exchange.slot(self.buffers[-1], replica))

    def fill_with_zeros(self, replica: int) -> None:
        """For a replica whose rows another one of this worker has computed with its own."""
        if self._zeros_in is not self._collective.placement:
            self._zeros_in = self._collective.placement  # others may have owned these replicas, and written to them
            self._zeros.clear()
        if replica in self._zeros:
            return  # sums are written elsewhere: what was zero is still zero
        for slot in self._views(replica):
            slot.zero_()
        if self.statistics.merged:
            self.merged(replica).zero_()
        if self.statistics.others:
            self.others(replica).zero_()
        self._zeros.add(replica)

    def write_rest(self, replica: int, weight: float) -> None:
        """Write what no gradient came for: zeros for unused parameters, and the buffers."""
        slots = self.slots(replica)
        for index in range(self._num_parameters):
            if index not in self.taken:
                slots[index].zero_()
                if index in self.touched_at:
                    slots[self.touched_at[index]].zero_()
        if self.statistics.merged:
            self.statistics.write_merged(self.merged(replica), weight)
        if self.statistics.others:
            others = self.others(replica)
            self.statistics.write_others(others) if replica == 0 else others.zero_()

    def used_here(self) -> np.ndarray:
        """Which parameters got a gradient in this body."""
        used = np.zeros(self._num_parameters, bool)
        used[list(self.taken)] = True
        return used

    def take_results(self, divisor: float | None) -> None:
        """Take the sums out of shared memory. Users may change what p.grad shows; nobody else sees it."""
        assert self.exchange is not None
        for buffer, private in zip(self.buffers, self._private, strict=False):
            _copy(self.exchange.result(buffer), private, divisor)
        if self.statistics.merged:  # weighted by rows, whatever the gradients are weighted by
            _copy(self.exchange.result(self.buffers[self._num_groups]), self._merged, None)
        if self.statistics.others:
            self._others = _private(self.exchange.result(self.buffers[-1]))
        self.exchange.release()

    def is_private(self, index: int, tensor: torch.Tensor) -> bool:
        """Whether this tensor lies where the next result will be written."""
        return tensor.layout == torch.strided and tensor.data_ptr() == self.views[index].data_ptr()

    def take_statistics(self) -> None:
        """Give the model the merged statistics, and replica 0's other buffers."""
        self.statistics.put_merged(self._merged)
        if self.statistics.others:
            self.statistics.read_others(self._others)


def _copy(result: Any, private: torch.Tensor, divisor: float | None) -> None:
    if isinstance(result, torch.Tensor):
        private.copy_(result) if divisor is None else torch.div(result, divisor, out=private)
    elif divisor is None:
        np.copyto(private.numpy(), result)
    else:
        np.divide(result, result.dtype.type(divisor), out=private.numpy())


def _private(result: Any) -> torch.Tensor:
    return result if isinstance(result, torch.Tensor) else torch.from_numpy(result.copy())
