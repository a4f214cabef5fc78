"""Plain loops: what `for x, y in loader` yields on each worker, and what happens between two batches.

A worker draws the samples of its replica. One whose share of a batch is empty runs on two samples of others, and its
results are dropped: so all workers call the same things. Between two draws the global generators are seeded by batch
and replica. Outside of loops all workers have the same ones.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch

from duoka.collectives.collective import Collective
from duoka.data.seeds import derive
from duoka.data.shares import share
from duoka.errors import MismatchError
from duoka.frameworks.torch.function.batches import Batch, Batches, LoaderPass
from duoka.frameworks.torch.function.note import Digests
from duoka.frameworks.torch.function.seed import BaseSeed
from duoka.frameworks.torch.generators import capture_generators, digest_generators, restore_generators
from duoka.frameworks.torch.plain.share import Share
from duoka.frameworks.torch.randomness import KeptGenerators, seed_all

_STAND_IN_SAMPLES = 2  # of others: BatchNorm needs two


class Owner(Protocol):
    """The adapter, as far as loops need it."""

    def choose_plain(self) -> None:
        """A plain loop begins."""
        ...

    def compare(self, number: int) -> None:
        """All workers have drawn this batch, with gradients: are they equal?"""
        ...

    def begin_batch(self) -> None:
        """A batch has been drawn, and nothing of it has been computed."""
        ...

    @property
    def is_evaluating(self) -> bool:
        """Whether all prepared models are in eval mode."""
        ...


class PlainLoop:
    """The plain loops of one strategy. Several may be open at a time: `zip` of two loaders, a validation in between."""

    def __init__(self, collective: Collective, seed: BaseSeed, owner: Owner, tell: Callable[..., None]) -> None:
        self._collective, self._seed, self._owner, self._tell = collective, seed, owner, tell
        self._shares: dict[int, Share] = {}  # by loop: of the batch under way in it
        self._outside: KeptGenerators | None = None  # the generators outside of loops, while one is under way
        self._num_walks = 0
        self._walks: WeakKeyDictionary[Batches, int] = WeakKeyDictionary()  # the last one over each loader
        self.num_batches = 0  # of all loops
        self.num_trained = 0  # of loops with gradients

    def walk(self, batches: Batches) -> Iterator[Any]:
        """Begin a pass over a loader; what an iterator draws when it is made is drawn now."""
        self._leave(-1)
        loader_pass = batches.begin(self._owner.choose_plain)
        self._num_walks += 1
        # A pass before this one is over, also where its iterator is kept: `it = iter(loader); x, y = next(it)`.
        self._shares.pop(self._walks.get(batches, 0), None)
        self._walks[batches] = self._num_walks
        if self._collective.num_replicas == 1:
            return self._walk_alone(loader_pass)
        return self._walk(loader_pass, self._num_walks, is_sharded=batches.is_sharded)

    def _walk_alone(self, loader_pass: LoaderPass) -> Iterator[Any]:
        for batch in loader_pass:
            self._begin_step()
            self._owner.begin_batch()
            yield batch.load(0)

    def _begin_step(self) -> None:
        if torch.is_grad_enabled():
            self._owner.compare(self.num_trained)
            self.num_trained += 1

    def _walk(self, loader_pass: LoaderPass, key: int, *, is_sharded: bool) -> Iterator[Any]:
        is_ending = sys.is_finalizing  # kept here: names of modules may be None when a loop is dropped
        # An evaluation as long as each draw looks like one: some scripts call model.train() in the loop.
        is_evaluation, has_drawn = True, False
        try:
            while True:
                self._leave(key)
                is_evaluation = is_evaluation and self._is_evaluating
                if is_evaluation and has_drawn:
                    self._tell_of_sums()
                batch, has_drawn = next(loader_pass, None), True
                if batch is None:
                    return
                self._begin_step()
                own, samples = self._take(batch, is_evaluation=is_evaluation, is_sharded=is_sharded)
                if is_evaluation and not own.num_samples:
                    continue
                self._shares[key] = own
                self.num_batches += 1
                self._owner.begin_batch()
                self._enter(loader_pass.number, batch.index)
                yield samples
        finally:
            if not is_ending():
                self._leave(key)

    @property
    def _is_evaluating(self) -> bool:
        return not torch.is_grad_enabled() or self._owner.is_evaluating

    def _tell_of_sums(self) -> None:
        self._tell(
            "a loop over a prepared loader without gradients sees this worker's samples: its sums are those of this"
            " worker. Use strategy.evaluate(function, loader), or a loader that is not prepared",
            "evaluation loop",
        )

    def _take(self, batch: Batch, *, is_evaluation: bool, is_sharded: bool) -> tuple[Share, Any]:
        total, replica = len(batch), self._collective.replicas[0]
        digests = Digests(digest_generators(), 0, batch.samples_digest, batch.order_digest)
        if is_sharded:
            even = 1 / self._collective.num_replicas
            title = f"batch {batch.index} of pass {batch.epoch}"
            own = Share(total, title, 1.0, even, is_counted=True, is_evaluation=is_evaluation, digests=digests)
            return own, batch.load(replica)
        num_samples = len(share(total, self._collective.num_replicas, replica))
        last = batch.last_size
        own = Share.of(num_samples, total, batch.title, digests, last, is_evaluation=is_evaluation)
        if num_samples:
            return own, batch.load(replica)
        return own, batch.load_cuts(((0, min(_STAND_IN_SAMPLES, total)),))[0]

    # The generators.

    def _enter(self, pass_number: int, index: int) -> None:
        self._outside = KeptGenerators().__enter__()
        replica = self._collective.replicas[0]
        seed_all(derive("plain", self._seed.number, pass_number, index, replica))

    def _leave(self, key: int) -> None:
        """The batch of this loop is over, and the generators are those outside of loops."""
        self._shares.pop(key, None)
        self.leave_generators()

    def leave_generators(self) -> None:
        """From here on what is drawn is drawn outside of batches: by all workers alike."""
        if self._outside is not None:
            self._outside.put_back()
            self._outside = None

    @contextmanager
    def outside(self) -> Iterator[None]:
        """What is drawn inside is drawn by all workers alike, as outside of loops."""
        if self._outside is None:
            yield
            return
        inside = capture_generators()
        self._outside.put_back()
        try:
            yield
        finally:
            self._outside = KeptGenerators().__enter__()
            seed_all(0)  # the generator of NumPy that is not the one outside
            restore_generators(inside)

    # The batch under way.

    def find_share(self) -> Share:
        """The same, for a backward."""
        found = self.share
        if found is not None and found.is_evaluation and 0 < found.total < self._collective.num_replicas:
            raise MismatchError(
                f"A backward in eval mode, in {found.title}: workers without samples have left this batch out.",
                why="a loop over a prepared loader in eval mode is an evaluation, where all results count.",
                do="use drop_last=True, or another batch_size, or call model.train() before the loop.",
            )
        if found is None:
            raise MismatchError(
                "A backward reached prepared parameters outside of a loop over a prepared loader.",
                why="the gradient would be that of one worker, and nothing tells which part of a global batch it is.",
                do="pass the loader to strategy.prepare, too, and call backward in the loop over it, or before the next"
                " batch of `batches = iter(loader)` is drawn (next(iter(loader)) ends its loop at once; a prefetcher"
                " draws too early). Or train by strategy.backward(loss_of, x, y), with whole batches on every worker.",
            )
        return found

    def refuse(self, call: str) -> None:
        """Raise in an evaluation loop: workers may run through different numbers of batches."""
        if self._is_evaluating and any(each.is_evaluation for each in self._shares.values()):
            raise MismatchError(
                f"{call} was called in an evaluation loop over a prepared loader.",
                why="a worker without samples in the last batch leaves it out, and the others would wait for it.",
                do="call it after the loop, or use strategy.evaluate(function, loader).",
            )

    @property
    def share(self) -> Share | None:
        """This worker's share of the batch under way; None outside of loops."""
        open_shares = list(self._shares.values())
        training = [each for each in open_shares if not each.is_evaluation] or open_shares
        if not training:
            return None
        if len({each.weight for each in training}) > 1:
            raise MismatchError(
                "Batches of several loaders are under way, and this worker has different shares of them:"
                f" {', '.join(f'{each.num_samples} samples of {each.title}' for each in training)}.",
                why="the weight of its gradient would be that of one of them.",
                do="use batch sizes that are multiples of the number of workers, with drop_last=True, or train by"
                " strategy.backward and strategy.weigh(term, len(x)).",
            )
        return training[-1]
