"""`strategy.backward`: run a function on each replica's samples, exchange, and add the mean gradient to `p.grad`.

A call is atomic. Whatever a replica's function changes is put back before it runs again: gradients, buffers, global
generators. So a replica can be computed anew on another worker, and an error leaves everything as it was.
"""

from __future__ import annotations

import functools
import random
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch

from duoka.collectives.collective import Buffer, Collective, Exchange
from duoka.data.seeds import derive
from duoka.data.shares import share
from duoka.errors import MismatchError
from duoka.frameworks.additivity import FEWEST_SAMPLES, split
from duoka.frameworks.exchange.checks import Checks
from duoka.frameworks.torch.function import arguments
from duoka.frameworks.torch.function.batches import Batch
from duoka.frameworks.torch.function.extras import exchange_metrics, fits_into_note
from duoka.frameworks.torch.function.first_call import check_function, check_models
from duoka.frameworks.torch.function.gradient_buffers import GradientBuffers
from duoka.frameworks.torch.function.note import Digests, Note, Notes
from duoka.frameworks.torch.function.returned import Measured, Returned, Rows, combine, decode, encode, read, weigh
from duoka.frameworks.torch.function.trained import Trained
from duoka.frameworks.torch.nested import map_tensors
from duoka.frameworks.torch.randomness import seeded

Function = Callable[..., Any]
_FIRST_CALLS, _EVERY = 3, 100  # in these calls, and in every hundredth, global tensors are compared as a whole


class Given:
    """The arguments of one call: what every replica gets of them."""

    def __init__(self, args: Sequence[Any], num_replicas: int, device: torch.device) -> None:
        self._args, self._num_replicas, self._device = args, num_replicas, device
        self.handles = [arg for arg in args if isinstance(arg, Batch)]
        self.tensors = [arg for arg in args if not isinstance(arg, Batch)]
        for handle in self.handles:
            handle.check_current()
        lengths = [len(handle) for handle in self.handles]
        count = arguments.count_samples(self.tensors)
        lengths += [] if count is None else [count]
        if not lengths:
            raise MismatchError(
                "strategy.backward was given nothing that could be cut by samples.",
                why="every replica computes its own samples of the global batch.",
                do="pass a batch of strategy.batches(loader), or the tensors of the global batch, to the function.",
            )
        if count is not None and self.handles and count != lengths[0]:
            raise MismatchError(
                f"strategy.backward was given {count} samples in tensors and {lengths[0]} in a batch.",
                do="pass tensors with one row per sample of the batch, or close over them in the function.",
            )
        self.num_samples = lengths[0]
        self.has_one_length = len(set(lengths)) == 1

    def describe(self) -> str:
        parts = [handle.title for handle in self.handles]
        return ", ".join([*parts, arguments.describe(self.tensors)])

    def cut(self, replica: int) -> list[Any]:
        """This replica's arguments, on its device."""
        found: list[Any] = []
        for arg in self._args:
            if isinstance(arg, Batch):
                value = arg.load(replica)
                found += value if type(value) in (tuple, list) else [value]
            else:
                rows = share(self.num_samples, self._num_replicas, replica)
                found.append(map_tensors(arguments.cut(arg, rows.start, rows.stop), self._move))
        return found

    def cutter(self, cuts: Sequence[tuple[int, int]]) -> Callable[[int, int], list[Any]]:
        """A function that returns the arguments for one of these ranges of the first samples."""
        parts = {id(handle): handle.load_cuts(tuple(cuts)) for handle in self.handles}

        def cut(start: int, stop: int) -> list[Any]:
            found: list[Any] = []
            for arg in self._args:
                if isinstance(arg, Batch):
                    value = parts[id(arg)][list(cuts).index((start, stop))]
                    found += value if type(value) in (tuple, list) else [value]
                else:
                    found.append(map_tensors(arguments.cut(arg, start, stop), self._move))
            return found

        return cut

    def whole(self) -> list[Any]:
        """All samples: with one replica."""
        return self.cut(0)

    def _move(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self._device, non_blocking=True)


class Calls:
    """All calls of one strategy."""

    def __init__(
        self,
        collective: Collective,
        trained: Trained,
        device: torch.device,
        seed: int,
        tell: Callable[..., None],
        checks: Checks,
    ) -> None:
        self._collective, self._trained, self._device, self._tell = collective, trained, device, tell
        self._seed, self._checks = seed, checks
        self.number = 0  # of calls begun
        self._is_inside = False  # a function is under way
        self._num_groups: dict[str, int] = {}  # of loss terms, by function
        self._checked: set[str] = set()  # functions

    # Inside of functions.

    @property
    def is_inside(self) -> bool:
        return self._is_inside

    def weigh(self, term: Any, count: Any) -> Any:
        return term if self._collective.num_replicas == 1 else weigh(term, count)

    def rows(self, tensor: Any) -> Rows:
        if not self._is_inside:
            raise MismatchError(
                "strategy.rows was called outside of a function given to strategy.backward or strategy.evaluate.",
                do="return it from that function, as a metric: return loss, strategy.rows(tensor).",
            )
        return Rows(tensor)

    @contextmanager
    def inside(self) -> Iterator[None]:
        self._is_inside = True
        try:
            yield
        finally:
            self._is_inside = False

    # The call.

    def backward(
        self, function: Function, args: Sequence[Any], scaler: Any, rates: Sequence[float], *, check: bool = True
    ) -> Any:
        if self._is_inside:
            raise MismatchError(
                "strategy.backward was called inside of a function that it runs.",
                do="return the loss from the function; make a second call after the first one.",
            )
        given = Given(args, self._collective.num_replicas, self._device)
        self._trained.scan()
        if not self._trained.parameters:
            raise MismatchError(
                "strategy.backward was called before anything was prepared that could be trained.",
                do="call model, optimizer, loader = strategy.prepare(model, optimizer, loader) first.",
            )
        self._checks.at_border(self.number, self._trained.state)
        self.number += 1
        if self._collective.num_replicas == 1:
            return self._run_alone(function, given, scaler)
        title = fingerprint(function)
        is_first = check and title not in self._checked
        if is_first:
            self._checked.add(title)
            trained = self._trained
            check_models(trained.models, trained.parameters, trained.names, self._tell)
        while True:
            attempt = _Attempt(self, function, given, scaler, self._num_groups.get(title, 1))
            attempt.is_checked = is_first
            is_first = False
            with attempt.restoring():
                notes = attempt.exchange(f"strategy.backward({title}) on {given.describe()}; {_tell_rates(rates)}")
                if len(notes.groups) > attempt.num_groups:
                    self._num_groups[title] = len(notes.groups)
                    continue
                if notes.moved:
                    self._trained.move(notes.moved)
                    continue
                return attempt.finish(notes)

    def _run_alone(self, function: Function, given: Given, scaler: Any) -> Any:
        """With one replica: the plain script, with nothing seeded and nothing exchanged."""
        data = given.whole()
        with self.inside():
            returned = read(function(*data))
        total = _add(term.value for term in returned.terms)
        backward(total, scaler, self._device)
        loss = total.detach()
        if not returned.has_metrics:
            return loss
        measured = Measured.of(returned.metrics, given.num_samples)
        return loss, combine(measured.kinds, measured.numbers, measured.rows, self._device)


class _Attempt:
    """One exchange of a call. It is repeated where its layout turned out to be too small."""

    def __init__(self, calls: Calls, function: Function, given: Given, scaler: Any, num_groups: int) -> None:
        self._calls, self._function, self._given, self._scaler = calls, function, given, scaler
        self._collective, self._trained = calls._collective, calls._trained
        self._device, self._number = calls._device, calls.number
        self._num_replicas = self._collective.num_replicas
        self.num_groups = num_groups
        self._parameters = self._trained.parameters
        self._statistics = self._trained.statistics
        self._buffers: list[GradientBuffers] = self._trained.buffers(num_groups)
        self._statistic_buffers = self._make_statistic_buffers()
        self._measured: dict[int, Measured] = {}
        self._error: Exception | None = None
        self._exchange: Exchange | None = None
        self.is_checked = False  # the function is, before it runs for replica 0
        self._digests = self._digest()

    def _make_statistic_buffers(self) -> list[Buffer]:
        statistics, name, found = self._statistics, f"function statistics {self._trained.version}", []
        if statistics.merged:
            found.append(self._collective.buffer(statistics.num_merged, np.float64, name))
        if statistics.others:
            found.append(self._collective.buffer(statistics.other_bytes, np.uint8, f"{name}, others"))
        return found

    def _digest(self) -> Digests:
        is_whole = self._number <= _FIRST_CALLS or self._number % _EVERY == 0
        samples = 0
        for handle in self._given.handles:
            if handle.samples_digest:
                samples = zlib.crc32(handle.samples_digest.to_bytes(4, "little"), samples)
        inputs = arguments.fingerprint(self._given.tensors, is_whole=is_whole) if self._given.tensors else 0
        return Digests(digest_generators(), inputs, samples)

    @contextmanager
    def restoring(self) -> Iterator[None]:
        """Gradients and buffers are as before the call, unless it has finished."""
        self._bases = [parameter.grad for parameter in self._parameters]
        self._statistics.begin_batch()
        self._statistics.watch_still()
        self._is_finished = False
        try:
            yield
        finally:
            if not self._is_finished:
                self._put_back()

    def _put_back(self) -> None:
        for parameter, base in zip(self._parameters, self._bases, strict=True):
            parameter.grad = base
        self._statistics.begin_later_body()

    # The exchange.

    def exchange(self, name: str) -> Notes:
        buffers = [buffer for group in self._buffers for buffer in group.buffers]
        self._exchange = self._collective.exchange([*buffers, *self._statistic_buffers], name)
        self._exchange.carry_out(self._place)
        notes = Notes(self._exchange.notes, len(self._parameters), self._number)
        try:
            if self._error is not None:
                raise self._error
            notes.raise_failure()
            notes.compare(self._number - 1)
        except BaseException:
            self._end()
            raise
        if len(notes.groups) > self.num_groups or notes.moved:
            self._end()
        return notes

    def _end(self) -> None:
        assert self._exchange is not None
        self._exchange.release()
        self._collective.end_step()

    def _place(self, replica: int) -> bytes:
        """Compute a replica and write what comes of it into its slots."""
        rows = share(self._given.num_samples, self._num_replicas, replica)
        self._collective.work_on(self._number, (replica,))
        if not rows or self._error is not None:
            self._clear(replica)
            return Note(digests=self._digests, error="" if self._error is None else describe_error(self._error)).pack()
        try:
            if replica == 0 and self.is_checked:
                self._check()
            note = self._compute(replica, len(rows))
        except Exception as error:
            self._error = error
            self._clear(replica)
            return Note(digests=self._digests, error=describe_error(error)).pack()
        return note.pack()

    def _check(self) -> None:
        """Look at the function before its first call. It is left as it was found."""
        count = self._given.num_samples
        first, second = split(count)
        cuts = ((0, first), (first, first + second), (0, first + second))
        with self._calls.inside():
            check_function(
                self._function,
                self._given.cutter(cuts) if count >= FEWEST_SAMPLES else _cut_nothing,
                count,
                self._trained.models,
                self._trained.known,
                self._calls._tell,
                fingerprint(self._function),
                seeded,
            )

    def _clear(self, replica: int) -> None:
        assert self._exchange is not None
        for buffers in self._buffers:
            buffers.clear(self._exchange, replica)
        for buffer in self._statistic_buffers:
            torch.as_tensor(self._exchange.slot(buffer, replica)).zero_()

    def _run(self, replica: int) -> Returned:
        """Run the function on a replica's samples, from the state before the call."""
        for parameter in self._parameters:
            parameter.grad = None
        self._statistics.begin_later_body()
        self._statistics.watch_still()
        data = self._given.cut(replica)
        with self._calls.inside():
            return read(self._function(*data))

    def _seed(self, replica: int) -> AbstractContextManager[None]:
        return seeded(derive("call", self._calls._seed, self._number, replica))

    def _compute(self, replica: int, num_rows: int) -> Note:
        with self._seed(replica):
            returned = self._run(replica)
            if not self._given.has_one_length and any(term.kind == "samples" for term in returned.terms):
                raise MismatchError(
                    "Batches of different lengths were given, and the loss is a mean over samples.",
                    do="weigh each term of the loss by its own number of samples: strategy.weigh(term, len(x)).",
                )
            weight = num_rows / self._given.num_samples
            groups = [group for group in returned.groups() if group]
            kinds = "".join("c" if group[0].kind == "count" else "k" for group in groups)
            numbers, used = self._differentiate(replica, groups, weight)
        self._write_statistics(replica, weight)
        measured = self._measured[replica] = Measured.of(returned.metrics, num_rows)
        packed = encode(measured.kinds) if returned.has_metrics else b""
        is_large = not fits_into_note(measured, packed)
        loss = returned.terms[0].value
        return Note(
            is_nan=any(number != number for number in numbers),
            is_large=is_large,
            dtype=str(loss.dtype).removeprefix("torch."),
            groups=kinds,
            others=self._statistics.digest_others() if self._statistics.others else 0,
            numbers=tuple(numbers) if is_large else (*numbers, *measured.numbers),
            metrics=b"" if is_large else packed,
            moved=tuple(self._statistics.moved()),
            used=used,
            digests=self._digests,
        )

    def _differentiate(self, replica: int, groups: Sequence[Any], weight: float) -> tuple[list[float], np.ndarray]:
        """Write the gradient of each group of loss terms; return their numbers, and which parameters took part."""
        assert self._exchange is not None
        numbers: list[float] = []
        used = np.zeros(len(self._parameters), bool)
        for position, group in enumerate(groups):
            total, factor, counted = _weigh_group(group, weight)
            number = float(total.detach())
            numbers += [number * factor if factor else 0.0, counted]
            if position >= self.num_groups:
                continue  # the call is repeated with more memory
            if factor == 0 or not total.requires_grad:
                self._buffers[position].clear(self._exchange, replica)
                continue
            backward(total, self._scaler, self._device, retain_graph=position < len(groups) - 1)
            gradients = [parameter.grad for parameter in self._parameters]
            self._buffers[position].write(self._exchange, replica, gradients, factor)
            for index, gradient in enumerate(gradients):
                if gradient is not None:
                    used[index] = True
                    self._parameters[index].grad = None
        for position in range(len(groups), self.num_groups):
            self._buffers[position].clear(self._exchange, replica)
        return numbers, used

    def _write_statistics(self, replica: int, weight: float) -> None:
        assert self._exchange is not None
        slots = [torch.as_tensor(self._exchange.slot(buffer, replica)) for buffer in self._statistic_buffers]
        if self._statistics.merged:
            self._statistics.write_merged(slots[0], weight)
        if self._statistics.others:
            self._statistics.write_others(slots[-1]) if replica == 0 else slots[-1].zero_()

    # The result.

    def finish(self, notes: Notes) -> Any:
        """Take the sums, and show them."""
        assert self._exchange is not None
        exchange, statistics = self._exchange, self._statistics
        if nan := [replica for replica, note in enumerate(notes.all) if note.is_nan]:
            self._calls._tell(
                f"the loss of replica {nan[0]} is NaN at call {self._number}, and with it the whole gradient", "nan"
            )
        if statistics.others and len({note.others for note in notes.with_samples}) > 1:
            names = ", ".join(sorted({place.name for place in statistics.others})[:5])
            self._calls._tell(f"buffers differ between replicas, and replica 0's count: {names}", "buffers")
        divisors = notes.divisors()
        sums = [buffers.take(exchange, divisor) for buffers, divisor in zip(self._buffers, divisors, strict=False)]
        results = [torch.as_tensor(exchange.result(buffer)).clone() for buffer in self._statistic_buffers]
        exchange.release()
        metrics = self._finish_metrics(notes)
        used = notes.used
        self._is_finished = True
        self._put_back()
        if statistics.merged:
            statistics.put_merged(results[0])
        if statistics.others:
            statistics.read_others(results[-1])
        for buffers, taken in zip(self._buffers, sums, strict=False):
            buffers.show(taken, used)
        self._collective.end_step()
        loss = torch.tensor(notes.loss(), dtype=getattr(torch, notes.with_samples[0].dtype), device=self._device)
        return (loss, metrics) if self._has_metrics(notes) else loss

    def _has_metrics(self, notes: Notes) -> bool:
        first = notes.with_samples[0]
        return bool(first.metrics) or first.is_large

    def _finish_metrics(self, notes: Notes) -> Any:
        first = notes.with_samples[0]
        if any(note.is_large for note in notes.all):
            return exchange_metrics(
                self._collective,
                f"metrics of call {self._number}",
                self._given.num_samples,
                self._measure,
                self._device,
            )
        if not first.metrics:
            return None
        if len({note.metrics for note in notes.with_samples}) > 1:
            raise MismatchError(
                "The function returned different metrics on different replicas.",
                do="return the same names and shapes for every batch; (0, 0) where there is nothing to count.",
            )
        start = 2 * len(notes.groups)
        numbers = np.sum([note.numbers[start:] for note in notes.with_samples], axis=0)
        return combine(decode(first.metrics), numbers, [], self._device)

    def _measure(self, replica: int) -> Measured | None:
        """A replica's metrics; computed again where the worker that had them was lost."""
        rows = share(self._given.num_samples, self._num_replicas, replica)
        if not rows:
            return None
        if replica not in self._measured:
            with self._seed(replica):
                self._measured[replica] = Measured.of(self._run(replica).metrics, len(rows))
        return self._measured[replica]


def _cut_nothing(start: int, stop: int) -> list[Any]:
    raise AssertionError("too few samples are not checked")


def backward(loss: torch.Tensor, scaler: Any, device: torch.device, *, retain_graph: bool = False) -> None:
    """`loss.backward()`, outside of autocast."""
    is_autocast = torch.is_autocast_enabled(device.type)
    with torch.autocast(device.type, enabled=False) if is_autocast else nullcontext():
        value = loss if scaler is None else scaler.scale(loss)
        value.backward(retain_graph=True) if retain_graph else value.backward()


def _weigh_group(group: Sequence[Any], weight: float) -> tuple[torch.Tensor, float, float]:
    """A group's terms as one number, the weight of its gradient, and its count."""
    kinds = {term.kind for term in group}
    if kinds == {"count"}:
        count = group[0].number
        return _add(term.value for term in group), count, count
    if kinds == {"samples"}:
        return _add(term.value for term in group), weight, 0.0
    return _add(term.value * (weight if term.kind == "samples" else 1.0) for term in group), 1.0, 0.0


def _add(values: Iterator[torch.Tensor] | Any) -> torch.Tensor:
    return functools.reduce(lambda total, value: total + value, (value.reshape(()) for value in values))


def fingerprint(function: Any) -> str:
    """Name a function by its file, line and qualified name; partial() and methods are unwrapped.

    >>> fingerprint(functools.partial(fingerprint, None)).split(":")[0]
    'call.py'
    """
    while isinstance(function, functools.partial):
        function = function.func
    function = getattr(function, "__func__", function)
    code = getattr(function, "__code__", None)
    if code is None:
        kind = function if isinstance(function, type) else type(function)
        return f"{kind.__module__}.{kind.__qualname__}"
    return f"{code.co_filename.rpartition('/')[2]}:{code.co_firstlineno} {function.__qualname__}"


def describe_error(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def digest_generators() -> int:
    """A digest of the global generators of Python, NumPy and PyTorch."""
    digest = zlib.crc32(torch.get_rng_state().numpy())
    digest = zlib.crc32((hash(random.getstate()[1]) & 0xFFFFFFFF).to_bytes(4, "little"), digest)
    state: Any = np.random.get_state(legacy=False)
    return zlib.crc32(int(state["state"]["pos"]).to_bytes(4, "little"), zlib.crc32(state["state"]["key"], digest))


def _tell_rates(rates: Sequence[float]) -> str:
    return f"learning rates {', '.join(f'{rate:.9g}' for rate in rates) or 'none'}"
