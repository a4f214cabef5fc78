"""`Mirrored`: every replica holds the same weights, and every step adds up all replicas' gradients."""

from __future__ import annotations

import builtins
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar

import numpy as np

from duoka.collectives.arrays import Array, as_array
from duoka.collectives.packing import Packing
from duoka.devices.device import Device
from duoka.strategies.strategy import Adapter, Connect, Request, Session

Compute = Callable[[int], Any]


class Mirrored:
    """Synchronous data parallelism over all devices, or over those given.

    In a script, the first strategy with more than one replica hands over to Duoka's supervisor, which starts
    the script again, once per device. Put it early: what ran before it runs twice.
    """

    connect: ClassVar[Connect]  # set by session.py

    def __init__(
        self,
        devices: Any = None,
        replicas: int | None = None,
        *,
        seed: int = 0,
        threads: int | None = None,
        soft_placement: bool = True,
        deadline_s: float = 60.0,
    ) -> None:
        request = Request(devices, replicas, seed, threads, soft_placement, deadline_s)
        self._session: Session = type(self).connect(request)
        self._step = 0
        self._attempt = 0
        self._adapter: Adapter | None = None

    @property
    def replicas(self) -> int:
        """The number of replicas, R. Fixed for the run, whatever the number of workers."""
        return self._session.num_replicas

    @property
    def num_replicas_in_sync(self) -> int:
        return self.replicas

    @property
    def num_workers(self) -> int:
        return self._session.num_workers

    @property
    def worker(self) -> int:
        """The number of this process among the workers."""
        return self._session.worker

    @property
    def local_replicas(self) -> tuple[int, ...]:
        """The replicas that this worker runs now."""
        return self._session.collective.replicas

    @property
    def device(self) -> Device:
        return self._session.device

    @property
    def is_main(self) -> bool:
        """True on one worker: the one that prints and saves. The role moves when that worker is lost."""
        return self.worker == min(self._session.collective.workers)

    @property
    def step(self) -> int:
        """How many steps have been committed."""
        return self._step if self._adapter is None else self._adapter.step

    @property
    def stepped(self) -> bool:
        """Whether the batch of this loop body is complete: True once per global batch, on every worker."""
        return self._adapter is None or self._adapter.stepped

    @property
    def count(self) -> int | None:
        """The true number of rows of this loop body; 0 for a stand-in."""
        return None if self._adapter is None else self._adapter.count

    def weigh(self, loss: Any, count: Any = None) -> Any:
        """For losses that are not means over rows: say over how many things (tokens) this one is a mean.

        The counts of all replicas are added up, and the gradient is divided by that once. Without a count the loss
        is a sum, and the replicas' gradients are added up as they are. Call it before `backward`, in every body.
        """
        return loss if self._adapter is None else self._adapter.weigh(loss, count)

    def epochs(self, num_epochs: int) -> range:
        """The epochs of a run, from where it stands."""
        return range(num_epochs)

    def enumerate(self, loader: Iterable[Any]) -> Iterator[tuple[int, Any]]:
        """Like enumerate(), with one number for all replicas of a global batch."""
        start: int | None = None
        for batch in loader:
            start = self.step if start is None else start
            yield self.step - start, batch

    def prepare(self, *objects: Any) -> Any:
        """Tie models, optimizers, loaders, schedulers and scalers to this run; they come back in the same order.

        A model stays the same object. The batch size of a loader is the global one.
        """
        if self._adapter is None:
            self._adapter = self._session.adapter(objects)
        prepared = self._adapter.prepare(objects)
        return prepared[0] if len(prepared) == 1 else tuple(prepared)

    def sum_over_replicas(self, compute: Compute) -> Any:
        """One step: the sum of `compute(replica)` over all replicas, in tree order, on every worker.

        `compute` gives an array or a list of arrays, and must depend on the replica's number and on what all
        workers share, nothing else: when a worker is lost, another computes its replicas again.

        >>> import duoka
        >>> strategy = duoka.Mirrored(devices=1, replicas=4)          # doctest: +SKIP
        >>> strategy.sum_over_replicas(lambda replica: replica * 1.0) # doctest: +SKIP
        array(6.)
        """
        collective = self._session.collective
        self._attempt += 1  # also when it fails: a step that one worker leaves out must not pass for the next one
        first = collective.replicas[0]
        given = compute(first)
        layout = Packing.of(_arrays(given))
        ready = {first: _arrays(given)}
        buffers = [collective.scratch(count, dtype) for dtype, count in layout.sizes.items()]
        exchange = collective.exchange(buffers, f"{self._attempt} over replicas of {layout.title}")
        while True:
            for replica in exchange.missing:
                arrays = ready.pop(replica) if replica in ready else _arrays(compute(replica))
                layout.pack(arrays, [exchange.slot(buffer, replica) for buffer in buffers], replica)
                exchange.deposit(replica)
            if exchange.commit():
                break
        results = layout.unpack([exchange.result(buffer) for buffer in buffers])
        collective.end_step()
        self._step += 1
        return results if isinstance(given, (list, tuple)) else results[0]

    def sum(self, value: Any) -> Any:
        """The sum over all replicas. A worker that runs several gives a list, one value for each."""
        if (pending := self._contribute("sum", value)) is not None:
            return pending
        return self._session.collective.all_reduce(self._per_replica(value), "sum")

    def mean(self, value: Any, count: Any = None) -> Any:
        """The mean over all replicas, weighted by `count` (rows, tokens). A count of zero leaves a value out."""
        if (pending := self._contribute("mean", value, count)) is not None:
            return pending
        weights = None if count is None else [float(c) for c in self._per_replica(count)]
        values = [_as_float(v) for v in self._per_replica(value)]
        return self._session.collective.all_reduce(values, "mean", weights=weights)

    def gather(self, value: Any) -> Any:
        """Every replica's value, in the order of replicas, on every worker. Sizes may differ."""
        if (pending := self._contribute("gather", value)) is not None:
            return pending
        return self._session.collective.all_gather(self._per_replica(value))

    def barrier(self) -> None:
        """Wait until all workers are here."""
        self._session.collective.barrier()

    def _contribute(self, kind: str, value: Any, count: Any = None) -> Any:
        """In a loop body a number is handed in, and known when the batch is complete."""
        return None if self._adapter is None else self._adapter.contribute(kind, value, count)

    def _per_replica(self, value: Any) -> list[Any]:
        return list(value) if isinstance(value, (list, tuple)) else [value]

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print once, on the main worker."""
        if self.is_main:
            builtins.print(*args, **kwargs)

    def launch(self, function: Callable[..., Any], *args: Any) -> Any:
        """Run a function on all workers from a notebook; returns what the main worker's call returned.

        The function's result is made of numbers, strings, lists, dictionaries and arrays.
        """
        return self._session.launch(function, *args)


def _arrays(given: Any) -> list[Array]:
    return [as_array(part) for part in given] if isinstance(given, (list, tuple)) else [as_array(given)]


def _as_float(value: Any) -> Array:
    array = as_array(value)
    return array.astype(np.float64) if array.dtype.kind in "iub" else array
