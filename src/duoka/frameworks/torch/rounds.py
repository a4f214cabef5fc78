"""The memory of one exchange of gradients: shared slots to write into, and this worker's own memory for the sums."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from duoka.collectives.collective import Buffer, Collective, Exchange
from duoka.frameworks.torch.layout import Layout, numpy_dtype
from duoka.frameworks.torch.statistics import Statistics

_REFERENCES_OF_OURS = 3  # the list, the loop's variable and the question itself


class Round:
    """The n-th backward of the bodies of a step: its buffers, and what has come in."""

    def __init__(
        self,
        collective: Collective,
        parameters: Sequence[torch.Tensor],
        statistics: Statistics,
        sparse: Sequence[int] = (),
    ) -> None:
        self.statistics = statistics
        self._collective = collective
        self._num_parameters = len(parameters)
        # For each parameter with sparse gradients, which of its rows were touched.
        touched = [torch.empty(len(parameters[index]), device="meta") for index in sparse]
        merged = [place.tensor for place in statistics.merged]
        self._layout = Layout.of([*parameters, *merged, *touched])
        self.touched_at = {index: len(parameters) + len(statistics.merged) + n for n, index in enumerate(sparse)}
        self.buffers: list[Buffer] = [
            collective.buffer(size, numpy_dtype(dtype))
            for size, dtype in zip(self._layout.sizes, self._layout.dtypes, strict=True)
        ]
        if statistics.others:
            self.buffers.append(collective.buffer(statistics.other_bytes, np.uint8))
        self._device = parameters[0].device if parameters else torch.device("cpu")
        self._private: list[torch.Tensor] = []  # this worker's own memory for the sums, made when it is needed
        self._private_views: list[torch.Tensor] = []
        self._shared_flats: list[torch.Tensor] = []
        self._changes_in_place = False  # the user writes into p.grad: a copy costs less than page after page
        self.views: list[torch.Tensor] = []  # the sums, as p.grad may show them
        self.exchange: Exchange | None = None
        self.used: np.ndarray | None = None  # which parameters got a gradient; known once it is committed
        self.count = 0.0  # of rows, or as given with strategy.weigh, in the whole batch
        self.taken: set[int] = set()
        self.bases: dict[int, torch.Tensor | None] = {}
        self._slots: dict[int, list[torch.Tensor]] = {}
        self._zeros: set[int] = set()  # replicas whose slots are known to hold zeros

    def forget(self) -> None:
        """A new batch begins."""
        self.exchange = self.used = None

    def open(self, name: str) -> Exchange:
        if self.exchange is None:
            self.exchange = self._collective.exchange(self.buffers, name)
        return self.exchange

    def slots(self, replica: int) -> list[torch.Tensor]:
        """A view for each parameter, merged statistic and mask into this replica's slots."""
        self._zeros.discard(replica)
        return self._views(replica)

    def _views(self, replica: int) -> list[torch.Tensor]:
        if replica not in self._slots:
            assert self.exchange is not None
            flats = [
                torch.as_tensor(self.exchange.slot(self.buffers[group], replica))
                for group in range(len(self._layout.dtypes))
            ]
            self._slots[replica] = self._layout.views(flats)
        return self._slots[replica]

    def touched(self, replica: int, index: int) -> torch.Tensor | None:
        """Where a replica says which rows of a sparse gradient it has touched."""
        return self._views(replica)[self.touched_at[index]] if index in self.touched_at else None

    def others(self, replica: int) -> torch.Tensor:
        assert self.exchange is not None
        return torch.as_tensor(self.exchange.slot(self.buffers[-1], replica))

    def fill_with_zeros(self, replica: int) -> None:
        """For a replica whose rows another one of this worker has computed with its own."""
        if replica in self._zeros:
            return  # sums are written elsewhere: what was zero is still zero
        for slot in self._views(replica):
            slot.zero_()
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
        for slot, place in zip(slots[self._num_parameters :], self.statistics.merged, strict=False):
            slot.copy_(place.tensor).mul_(weight) if weight else slot.zero_()
        if self.statistics.others:
            others = self.others(replica)
            self.statistics.write_others(others) if replica == 0 else others.zero_()

    def used_here(self) -> np.ndarray:
        """Which parameters got a gradient in this body."""
        used = np.zeros(self._num_parameters, bool)
        used[list(self.taken)] = True
        return used

    def take_results(self, divisor: float | None, *, is_changed: bool) -> None:
        """Take the sums out of the exchange. Users may change what p.grad shows; nobody else sees it.

        Where nobody is going to write into them, they are shown where they lie, and copied only if they are still in
        use when the memory is needed again.
        """
        assert self.exchange is not None
        if divisor is None and not is_changed and not self._changes_in_place and self._show_shared():
            return
        self._make_private()
        for buffer, private in zip(self.buffers, self._private, strict=False):
            _copy(self.exchange.result(buffer), private, divisor)
        self.views = self._private_views

    def _show_shared(self) -> bool:
        assert self.exchange is not None
        flats = []
        for buffer in self.buffers[: len(self._layout.dtypes)]:
            own = self.exchange.own(buffer, self._let_go)
            if own is None:
                return False
            flats.append(torch.from_numpy(own))
        self._shared_flats = flats
        self.views = self._layout.views(flats)
        return True

    def _let_go(self) -> None:
        """The memory is about to be written by others: what somebody still looks at moves to memory of our own."""
        if not self._shared_flats:
            return
        self._changes_in_place = any(flat._version for flat in self._shared_flats)
        is_needed = self.exchange is not None  # within the batch: after a loss it may have to be shown again
        for index, view in enumerate(self.views):
            is_in_use = view._use_count() > 1 or sys.getrefcount(view) > _REFERENCES_OF_OURS
            if is_in_use or is_needed:
                self._make_private()
                self._private_views[index].copy_(view)
            if is_in_use:
                view.set_(self._private_views[index])
        self._shared_flats, self.views = [], self._private_views

    def _make_private(self) -> None:
        if not self._private:
            kinds = zip(self._layout.sizes, self._layout.dtypes, strict=True)
            self._private = [torch.zeros(size, dtype=dtype, device=self._device) for size, dtype in kinds]
            self._private_views = self._layout.views(self._private)

    def is_private(self, index: int, tensor: torch.Tensor) -> bool:
        """Whether this tensor lies where the next result may be written."""
        if not self._private or tensor.layout != torch.strided:
            return False
        return tensor.data_ptr() == self._private_views[index].data_ptr()

    def take_statistics(self) -> None:
        """Give the model the merged statistics, and replica 0's other buffers."""
        assert self.exchange is not None
        start = self._num_parameters
        for place, view in zip(self.statistics.merged, self.views[start:], strict=False):
            place.put(view)
        if self.statistics.others:
            self.statistics.read_others(_private(self.exchange.result(self.buffers[-1])))


def _copy(result: Any, private: torch.Tensor, divisor: float | None) -> None:
    if isinstance(result, torch.Tensor):
        private.copy_(result) if divisor is None else torch.div(result, divisor, out=private)
    elif divisor is None:
        np.copyto(private.numpy(), result)
    else:
        np.divide(result, result.dtype.type(divisor), out=private.numpy())


def _private(result: Any) -> torch.Tensor:
    return result if isinstance(result, torch.Tensor) else torch.from_numpy(result.copy())
