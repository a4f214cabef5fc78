"""`strategy.batches`: one handle per global batch. Each replica's samples are loaded where they are needed."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader

from duoka.data.shares import share
from duoka.errors import MismatchError
from duoka.frameworks.torch.function import arguments
from duoka.frameworks.torch.function.shares import OWN_GENERATOR, Loaded
from duoka.frameworks.torch.generators import capture_generators, restore_generators
from duoka.frameworks.torch.loader_processes import start
from duoka.frameworks.torch.nested import map_tensors
from duoka.frameworks.torch.single_samples import count_last_batch
from duoka.strategies.training_loop import TrainingLoop

if TYPE_CHECKING:
    from duoka.frameworks.torch.function.loaders import Loaders

Load = Callable[[int], Any]  # a replica's samples
Cuts = tuple[tuple[int, int], ...]
LoadCuts = Callable[[Cuts], dict[int, Any]]


class Batch:
    """A handle of one global batch, for `strategy.backward`. It can be used until the next one is drawn."""

    last_size = 0  # with the first batch: samples of the loader's last one, if it is smaller

    def __init__(
        self,
        num_samples: int,
        index: int,
        epoch: int,
        load: Load,
        load_cuts: LoadCuts,
        device: torch.device,
        samples_digest: int = 0,
        order_digest: int = 0,
    ) -> None:
        self.num_samples, self._load, self._load_cuts = num_samples, load, load_cuts
        self._move = operator.methodcaller("to", device, non_blocking=True)
        self.index, self.epoch = index, epoch
        self.order_digest = order_digest  # of the indices of the samples
        self.samples_digest = samples_digest  # of samples that all workers must find alike; 0: none were looked at
        self._is_current = True
        self._moved: dict[int, Any] = {}

    def __len__(self) -> int:
        return self.num_samples

    @property
    def title(self) -> str:
        """To be compared between workers."""
        return f"batch {self.index} of pass {self.epoch} ({self.num_samples} samples)"

    def load(self, replica: int) -> Any:
        """A replica's samples, on the device."""
        if replica not in self._moved:
            value = self._load(replica)
            if type(value) in (tuple, list):  # no Python call for tensors side by side: this happens in every step
                move, parts = self._move, value
                value = []
                for part in parts:
                    value.append(move(part) if isinstance(part, torch.Tensor) else map_tensors(part, move))
            else:
                value = map_tensors(value, self._move)
            self._moved[replica] = value
        return self._moved[replica]

    def load_cuts(self, cuts: Cuts) -> dict[int, Any]:
        """These parts of the batch, each by itself: for the check of a function."""
        return {number: map_tensors(part, self._move) for number, part in self._load_cuts(cuts).items()}

    def check_current(self) -> None:
        if not self._is_current:
            raise MismatchError(
                f"strategy.backward was passed {self.title}, and a later batch of its loader has been drawn since.",
                why="a handle can be used until the next batch of its loader is drawn.",
                do="use it within its turn of the loop; several batches in one call need loaders of their own.",
            )

    def end(self) -> None:
        self._is_current = False
        self._moved.clear()
        self._load = self._load_cuts = _gone

    def __iter__(self) -> Iterator[Any]:
        raise MismatchError(
            "A batch of strategy.batches was taken apart.",
            why="it is a handle: every replica's samples are loaded where they are needed.",
            do="pass it on: strategy.backward(loss_of, batch), with `def loss_of(x, y): ...`.",
        )

    def __getitem__(self, key: Any) -> Any:
        return self.__iter__()

    def __getattr__(self, name: str) -> Any:
        """`batch.items()`, `batch.to(device)`, `batch.labels`. An AttributeError, for hasattr and copies."""
        raise AttributeError(
            f"a batch of strategy.batches has no {name!r}: it is a handle, and every replica's samples are loaded where"
            " they are needed. Pass it on: strategy.backward(loss_of, batch), with `def loss_of(x, y): ...`"
        )


def _nothing() -> None:
    return None


def _gone(_: Any) -> Any:
    raise AssertionError("this batch has ended")


class Batches:
    """The global batches of a loader, pass by pass."""

    def __init__(
        self,
        loader: DataLoader[Any],
        number: int,
        loaders: Loaders,
        num_replicas: int,
        device: torch.device,
        begin: Callable[[], None],
        tell: Callable[..., None],
        loop: TrainingLoop,
        *,
        is_sharded: bool = False,
    ) -> None:
        self.is_sharded = is_sharded  # every worker draws batches of its own
        self.loader, self.number, self.loaders, self.num_replicas = loader, number, loaders, num_replicas
        self.device, self.tell, self.loop = device, tell, loop
        self._begin = begin
        self.epoch = -1  # passes begun before the last one
        self.last_pass: Callable[[], LoaderPass | None] = _nothing  # a weak reference: None if it was dropped
        self.last_batch: Batch | None = None
        self._saved: dict[str, Any] | None = None  # a pass of the saved run that is to be continued
        self._is_claimed = False  # by a pass that was made on the way to where the run was saved
        self.generators = _Generators(loader)

    def __len__(self) -> int:
        """Global batches."""
        return len(self.loader)

    def __iter__(self) -> LoaderPass:
        return self.begin(self._begin)

    def begin(self, choose_style: Callable[[], None]) -> LoaderPass:
        """Begin a pass: a function over its handles, or a plain loop over this worker's samples."""
        self._check_batch_size()
        choose_style()
        made = LoaderPass(self)
        self.last_pass = weakref.ref(made)
        return made

    def capture(self) -> dict[str, Any]:
        """Where the script is in this loader, and the states of the loader's own generators."""
        last = self.last_pass()
        return {
            "epoch": self.epoch,
            "open": last.capture() if last is not None and last.is_open else None,
            "generators": self.generators.capture(),
        }

    def resume(self, position: dict[str, Any]) -> None:
        self.epoch, self._saved = position["epoch"], position["open"]
        self.generators.restore(position["generators"])

    def claim_saved_pass(self) -> None:
        """The script has made, on its way to where the run was saved, the iterator that it had there."""
        self._is_claimed = True

    def take_saved_pass(self, *, has_claim: bool) -> dict[str, Any] | None:
        """The pass of the saved run that this pass continues, if it does."""
        saved, self._saved = self._saved, None
        return saved if has_claim or not self._is_claimed else None

    def _check_batch_size(self) -> None:
        size = self.loader.batch_size or getattr(self.loader.batch_sampler, "batch_size", None)
        if isinstance(size, int) and size < self.num_replicas and not self.is_sharded:
            raise MismatchError(
                f"A batch of {size} samples cannot be split between {self.num_replicas} replicas.",
                why="batch_size is global: every replica takes its share of each batch.",
                do=f"use batch_size={self.num_replicas} or more, or fewer replicas.",
            )


class LoaderPass(Iterator[Batch]):
    """One iteration over a loader: at its first batch, or where the saved run was."""

    def __init__(self, batches: Batches) -> None:
        self._batches = batches
        self._source: Iterator[Batch] | None = None
        self._number = -1  # in the run
        self._num_drawn = 0
        # The generators when it began, and when its first batch was drawn: samplers draw then, or before.
        self._at_begin: dict[str, Any] = {}
        self._at_first: dict[str, Any] = {}
        self._is_over = False
        # In a resumed script that is on its way to where the run was saved, nothing is drawn before it is there.
        self._has_claim = batches.loop.is_on_the_way
        if self._has_claim:
            batches.claim_saved_pass()
        else:
            # Begun here, not at the first batch: what an iterator draws when it is made is drawn in the script's order.
            self._open()

    @property
    def loader_number(self) -> int:
        return self._batches.number

    @property
    def number(self) -> int:
        """Of this pass in the run."""
        return self._number

    @property
    def is_open(self) -> bool:
        return self._source is not None and not self._is_over

    def capture(self) -> dict[str, Any]:
        moments = {"at_begin": self._at_begin, "at_first": self._at_first}
        return {"number": self._number, "num_drawn": self._num_drawn} | moments

    def __next__(self) -> Batch:
        batches = self._batches
        if self._is_over or not batches.loop.before_draw(self):
            self._is_over = True
            raise StopIteration
        if self._source is None:
            self._open()
            assert self._source is not None
        if batches.last_pass() is not self:
            raise MismatchError(
                "Two iterators over the same strategy.batches were drawn from in turns.",
                do="prepare a loader for each of them.",
            )
        if not self._num_drawn:
            batches.loop.check_pass(self)
            self._at_first = self._capture_generators()
        batch = next(self._source, None)
        if batch is None:
            self._is_over, self._source = True, iter(())
            batches.loop.after_last(self)
            raise StopIteration
        if batches.last_batch is not None:
            batches.last_batch.end()
        batches.last_batch = batch
        self._num_drawn += 1
        if batch.index == 0:
            batch.last_size = count_last_batch(batches.loader)
        return batch

    def _open(self) -> None:
        batches = self._batches
        saved = batches.take_saved_pass(has_claim=self._has_claim)
        if batches.epoch >= (0 if saved is None else 1):
            self._start_processes()
        if saved is None:
            self._number = batches.loaders.begin_pass()
            batches.epoch += 1
            self._at_begin = self._capture_generators()
            self._source = self._begin_source()
            return
        self._number, self._num_drawn = saved["number"], saved["num_drawn"]
        self._at_begin, self._at_first = saved["at_begin"], saved["at_first"]
        now = self._capture_generators()
        self._restore_generators(self._at_begin)
        self._source = self._begin_source()
        self._restore_generators(now)

    def _start_processes(self) -> None:
        """Persistent ones were started by an earlier pass, here or in the saved run: nothing is drawn for that now."""
        shares = None if self._batches.is_sharded else self._batches.loaders.shares(self._batches.loader)
        if shares is not None and shares.lacks_processes:
            now = self._capture_generators()
            shares.start_processes()
            self._restore_generators(now)

    def _capture_generators(self) -> dict[str, Any]:
        return {"run": capture_generators(), "own": self._batches.generators.capture()}

    def _restore_generators(self, states: dict[str, Any]) -> None:
        restore_generators(states["run"])
        self._batches.generators.restore(states["own"])

    def _begin_source(self) -> Iterator[Batch]:
        """Begin to draw from the loader, behind the batches that the saved run had drawn."""
        batches, first = self._batches, self._num_drawn
        shares = None if batches.is_sharded else batches.loaders.shares(batches.loader)
        if shares is not None:
            is_probed = batches.epoch == 0 and not first
            requests = shares.begin(self._number, first, is_probed=is_probed)
            if first:
                self._restore_generators(self._at_first)
                requests.skip()
            return self._read_shares(shares.read(requests), first)
        # With one replica, and of streams: every worker reads everything, again too.
        whole = start(batches.loader)
        if first:
            self._restore_generators(self._at_first)
            for _ in range(first):
                next(whole)
        return self._read_whole(whole, first)

    def _read_shares(self, shares: Iterator[Loaded], first: int) -> Iterator[Batch]:
        batches = self._batches
        epoch, device = batches.epoch, batches.device
        for index, loaded in enumerate(shares, first):
            digest = loaded.digest
            if digest == OWN_GENERATOR:
                digest = 0
                batches.tell(
                    "a sample of the loader's dataset differs from one time to the next, because the dataset draws from"
                    " a generator of its own: runs do not repeat bit for bit. Draw from the global generator of torch,"
                    " NumPy or Python"
                )
            load, load_cuts = loaded.load, loaded.load_cuts
            yield Batch(loaded.num_samples, index, epoch, load, load_cuts, device, digest, loaded.order)

    def _read_whole(self, whole: Iterator[Any], first: int) -> Iterator[Batch]:
        batches = self._batches
        num_replicas = 1 if batches.is_sharded else batches.num_replicas
        epoch, device = batches.epoch, batches.device
        for index, batch in enumerate(whole, first):
            parts = batch if type(batch) in (tuple, list) else [batch]
            num_samples = _count(parts, num_replicas)
            digest = arguments.fingerprint(parts, is_whole=False) if num_replicas > 1 else 0
            cut = _Cut(batch, num_samples, num_replicas)
            yield Batch(num_samples, index, epoch, cut, cut.load_cuts, device, digest)


class _Generators:
    """The generators that the script has passed to a loader and to its samplers."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        samplers = (loader, loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None))
        found = (getattr(owner, "generator", None) for owner in samplers)
        self._generators = list({id(each): each for each in found if isinstance(each, torch.Generator)}.values())

    def capture(self) -> list[torch.Tensor]:
        return [generator.get_state() for generator in self._generators]

    def restore(self, states: Sequence[torch.Tensor]) -> None:
        for generator, state in zip(self._generators, states, strict=True):
            generator.set_state(state)


class _Cut:
    """A whole batch, from which a replica's samples are cut."""

    def __init__(self, batch: Any, num_samples: int, num_replicas: int) -> None:
        self._batch, self._num_samples, self._num_replicas = batch, num_samples, num_replicas

    def __call__(self, replica: int) -> Any:
        if self._num_replicas == 1:
            return self._batch
        rows = share(self._num_samples, self._num_replicas, replica)
        return self._cut(rows.start, rows.stop)

    def load_cuts(self, cuts: Cuts) -> dict[int, Any]:
        return {number: self._cut(start, stop) for number, (start, stop) in enumerate(cuts)}

    def _cut(self, start: int, stop: int) -> Any:
        if type(self._batch) is list:
            return [arguments.cut(part, start, stop) for part in self._batch]
        return arguments.cut(self._batch, start, stop)


def _count(parts: Any, num_replicas: int) -> int:
    if num_replicas == 1:
        return count_loosely(parts)
    if (count := arguments.count_samples(parts)) is None:
        raise MismatchError(
            "A batch of the loader has nothing that could be cut by samples.",
            do="let the loader give tensors whose first dimension is the samples.",
        )
    return count


def count_loosely(parts: Any) -> int:
    """With one replica nothing is cut: the length of the first tensor, for metrics that are means over samples."""
    try:
        return arguments.count_samples(parts) or 1
    except MismatchError:
        lengths = (len(part) for part in parts if isinstance(part, torch.Tensor) and part.ndim)
        return next(lengths, 1)
