"""One exchange of a call of `strategy.backward`. It is repeated where its layout turned out to be too small."""

from __future__ import annotations

import enum
import functools
import itertools
import operator
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from duoka.collectives.collective import Buffer, Exchange
from duoka.collectives.decision import Difference
from duoka.data.seeds import derive
from duoka.data.shares import share
from duoka.errors import MismatchError, WorkerLost
from duoka.frameworks.additivity import FEWEST_SAMPLES, split
from duoka.frameworks.torch.function.extras import describe_error, exchange_metrics, fits_into_note
from duoka.frameworks.torch.function.first_call import check_again, check_function
from duoka.frameworks.torch.function.gradient_buffers import set_gradients
from duoka.frameworks.torch.function.in_place import (
    read_parameter_marks,
    read_versions,
    refuse_changed_arguments,
    refuse_changed_parameters,
)
from duoka.frameworks.torch.function.inputs import Inputs
from duoka.frameworks.torch.function.note import Digests, Note, Notes, read_digests
from duoka.frameworks.torch.function.returned import (
    NO_METRICS,
    Measured,
    Returned,
    combine,
    decode,
    encode,
    refuse_samples,
)
from duoka.frameworks.torch.function.unprepared import refuse_unprepared
from duoka.frameworks.torch.function.update_guard import UpdateGuard
from duoka.frameworks.torch.randomness import seed_all
from duoka.frameworks.torch.sync_batchnorm import SyncedPart, restart_needed

if TYPE_CHECKING:
    from duoka.frameworks.torch.function.call import Calls

Function = Callable[..., Any]
# For map: a comprehension is a call, and these are in every step.
_GRAD, _BUFFERS = operator.attrgetter("grad"), operator.attrgetter("buffers")


class Check(enum.Enum):
    """What is looked at before a function runs for replica 0."""

    NOTHING = enum.auto()
    LOSS = enum.auto()  # once more: whether it is a mean over samples
    ALL = enum.auto()


class Attempt:
    """What a call computes, exchanges and takes, and what it restores if it fails."""

    def __init__(
        self,
        calls: Calls,
        function: Function,
        inputs: Inputs,
        title: str,
        digests: Digests,
        scaler: Any,
        num_groups: int,
        check: Check,
        *,
        is_looked_at: bool,
    ) -> None:
        self._calls, self._function, self._inputs, self._scaler = calls, function, inputs, scaler
        self._collective, self._trained, self._device = calls.collective, calls.trained, calls.device
        self._number, self._num_replicas, self._seed = calls.number, calls.collective.num_replicas, calls.seed.number
        self.num_groups = num_groups
        self._check = check  # of the function, before it runs for replica 0
        self._is_looked_at = is_looked_at  # parameters and metrics are, in this call, also with check=False
        self._parameters = self._trained.parameters
        self._statistics = self._trained.statistics
        self._buffers = self._trained.buffers(num_groups)
        self._statistic_buffers = self._make_statistic_buffers() if self._statistics.has_any else []
        self._measured: dict[int, Measured] = {}
        self._error: BaseException | None = None
        self._exchange: Exchange | None = None
        self._digests, self._title = digests, title
        self._bases = list(map(_GRAD, self._parameters))
        self._has_bases = any(map(operator.is_not, self._bases, itertools.repeat(None)))
        if self._statistics.has_any:
            self._statistics.begin_batch(is_whole=is_looked_at)
            self._statistics.watch_still()
        self._is_finished = False

    def _make_statistic_buffers(self) -> list[Buffer]:
        statistics, name, found = self._statistics, f"function statistics {self._trained.statistic_layout}", []
        if statistics.merged:
            found.append(self._collective.buffer(statistics.num_merged, np.float64, name))
        if statistics.others:
            found.append(self._collective.buffer(statistics.other_bytes, np.uint8, f"{name}, others"))
        return found

    def restore(self) -> None:
        """Gradients and buffers are as before the call, unless it has finished."""
        if not self._is_finished:
            set_gradients(self._parameters, self._bases)
            self._restore_buffers()

    def _restore_buffers(self) -> None:
        if self._statistics.has_any:
            self._statistics.begin_later_body()
            self._statistics.watch_still()

    # The exchange.

    def exchange(self, name: str) -> Notes:
        buffers = list(itertools.chain.from_iterable(map(_BUFFERS, self._buffers)))
        if self._has_bases:
            set_gradients(self._parameters, itertools.repeat(None))
        self._exchange = self._collective.exchange([*buffers, *self._statistic_buffers], name)
        if self._collective.joining is not None:
            self._exchange.common_part = read_digests
            if self._collective.compares_juniors:
                self._exchange.compare_juniors()
        self._exchange.carry_out(self._place)
        try:
            if self._error is not None:
                raise self._error
            notes = Notes(self._exchange.notes, len(self._parameters), self._number)
            notes.compare()
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
        if self._calls.is_synced and self._measured:
            raise restart_needed(1, self._num_replicas)
        assert self._exchange is not None
        rows = share(self._inputs.num_samples, self._num_replicas, replica)
        self._collective.work_on(self._number, (replica,))
        if rows and self._error is None:
            try:
                if replica or self._check is Check.NOTHING or self._exchange.is_shadow(replica):
                    return self._compute(replica, len(rows))
                return self._compute_checked(len(rows))
            except WorkerLost:
                raise
            except (Exception, SystemExit) as error:
                what = f"failed with {describe_error(error).splitlines()[0][:200]} in replica {replica}"
                self._collective.yield_if_junior(Difference(f"fails {type(error).__name__}", what))
                self._error = error
            finally:
                self._calls.synced_part = None
        self._clear(replica)
        return Note(digests=self._digests, error="" if self._error is None else describe_error(self._error)).pack()

    def _compute_checked(self, num_rows: int) -> bytes:
        failure = self._check_function()
        note = self._compute(0, num_rows)  # where it raises here too, this error is the one to show
        if failure is not None:
            text = describe_error(failure).splitlines()[0]
            self._calls.tell(
                f"{self._title} is not checked: it raises in eval mode ({text}); check=False leaves the check out"
            )
        return note

    def _check_function(self) -> BaseException | None:
        """Look at the function, which is left as it was found. Returns what it raised in eval mode, if it did."""
        calls = self._calls
        is_first = not calls.has_seen(self._title)
        count = self._inputs.fewest_samples
        if count < FEWEST_SAMPLES:
            if is_first:
                calls.tell(
                    f"{self._title} is not checked: its first batch has {count} samples, fewer than {FEWEST_SAMPLES}"
                )
            return None
        sizes = split(count)
        # Later looks are at other samples: the first ones may all be of one length or class.
        start = 0 if is_first else derive("check offset", self._number) % (count - sum(sizes) + 1)
        middle, stop = start + sizes[0], start + sum(sizes)
        cut = self._inputs.cutter(((start, middle), (middle, stop), (start, stop)))

        def cut_from_start(first: int, last: int) -> list[Any]:
            self._restore_buffers()  # each run begins from them: a queue of keys would be a longer one
            return cut(start + first, start + last)

        with calls.inside():
            if self._check is Check.ALL:
                return check_function(
                    self._function,
                    self._title,
                    cut_from_start,
                    sizes,
                    self._trained,
                    calls.tell,
                )
            first_loss = calls.first_loss(self._title)
            check_again(self._function, self._title, cut_from_start, sizes, self._trained, first_loss, calls.tell)
            return None

    def _clear(self, replica: int) -> None:
        assert self._exchange is not None
        for buffers in self._buffers:
            buffers.clear(self._exchange, replica)
        for buffer in self._statistic_buffers:
            torch.as_tensor(self._exchange.slot(buffer, replica)).zero_()

    def _run_watched(self, replica: int, data: Sequence[Any], num_rows: int) -> Returned:
        total, last_size = self._inputs.num_samples, self._inputs.last_size
        end_watch = self._calls.single_samples.watch(replica, num_rows, total, last_size)
        try:
            return self._calls.run(self._function, data)
        finally:
            end_watch()

    def _run(self, replica: int, num_rows: int) -> Returned:
        """Run the function on a replica's samples, from the state before the call."""
        if self._statistics.has_any:
            self._restore_buffers()
        seed_all(derive("call", self._seed, self._number, replica))
        if self._calls.is_synced:
            self._calls.synced_part = SyncedPart(num_rows, num_rows / self._inputs.num_samples)
        data = self._inputs.cut(replica)
        versions = read_versions(data)
        if num_rows > 1 and not self._inputs.last_size:
            returned = self._calls.run(self._function, data)
        else:
            returned = self._run_watched(replica, data, num_rows)
        if read_versions(data) != versions:
            refuse_changed_arguments(data, versions, self._title)
        other = self._inputs.find_other_length(data, num_rows)
        if other is not None and any(term.kind == "samples" for term in returned.terms):
            raise MismatchError(
                f"The loader's collate_fn made {other} rows of {num_rows} samples.",
                why="the loss would be weighted by the number of samples.",
                do="return strategy.weigh(loss, len(x)), or leave samples out in the dataset or the sampler.",
            )
        return returned

    def _compute(self, replica: int, num_rows: int) -> bytes:
        marks = read_parameter_marks(self._trained.everything) if self._is_looked_at else []
        if self._check is Check.ALL:
            with UpdateGuard(self._trained, self._title) as guard:  # other workers look at their own replicas
                returned = self._run(replica, num_rows)
                guard.look()
        else:
            returned = self._run(replica, num_rows)
        if self._is_looked_at:
            trained, losses = self._trained, [term.value for term in returned.terms]
            refuse_changed_parameters(trained.everything, trained.all_names, marks, self._title)
            refuse_unprepared(self._function, losses, trained.known, self._title)
            refuse_samples(returned.metrics, num_rows)
        if not self._inputs.has_one_length and any(term.kind == "samples" for term in returned.terms):
            raise MismatchError(
                "Batches of different lengths were given, and the loss is a mean over samples.",
                do="weigh each term of the loss by its own number of samples: strategy.weigh(term, len(x)).",
            )
        weight = num_rows / self._inputs.num_samples
        kinds, groups = returned.groups()
        numbers, used = self._differentiate(replica, groups, weight)
        if self._statistic_buffers:
            self._write_statistics(replica, weight)
        measured = self._measured[replica] = (
            Measured.of(returned.metrics, num_rows) if returned.has_metrics else NO_METRICS
        )
        packed = encode(measured.kinds) if returned.has_metrics else b""
        is_large = returned.has_metrics and not fits_into_note(measured, packed)
        return Note(
            is_nan=sum(numbers) != sum(numbers),
            is_large=is_large,
            dtype=str(returned.terms[0].value.dtype).removeprefix("torch."),
            groups=kinds,
            others=self._statistics.digest_others() if self._statistics.others else 0,
            numbers=tuple(numbers) if is_large else (*numbers, *measured.numbers),
            metrics=b"" if is_large else packed,
            moved=tuple(self._statistics.moved()) if self._statistics.has_any else (),
            used=used,
            digests=self._digests,
        ).pack()

    def _differentiate(
        self, replica: int, groups: Sequence[Any], weight: float
    ) -> tuple[list[float], np.ndarray | None]:
        """Write the gradient of each group of loss terms.

        Returns:
            The number and the count of each group; which parameters took part, None if all did.
        """
        assert self._exchange is not None
        numbers: list[float] = []
        used: np.ndarray | None = np.zeros(len(self._parameters), bool)
        for position, group in enumerate(groups):
            total, factor, counted = _weigh_group(group, weight)
            numbers += [total.item() * factor if factor else 0.0, counted]
            if position >= self.num_groups:
                continue  # the call is repeated with more memory
            if factor == 0 or not total.requires_grad:
                self._buffers[position].clear(self._exchange, replica)
                continue
            if self._calls.is_synced:
                self._calls.synced_part = SyncedPart(1, factor)
            backward(total, self._scaler, self._device, retain_graph=position < len(groups) - 1)
            gradients = list(map(_GRAD, self._parameters))
            unused = self._buffers[position].write(
                self._exchange, replica, gradients, factor, can_change=len(groups) == 1
            )
            set_gradients(self._parameters, itertools.repeat(None))
            if used is not None:
                if unused:
                    used |= [gradient is not None for gradient in gradients]
                else:
                    used = None
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
        exchange = self._exchange
        if notes.nan is not None:
            self._calls.tell(
                f"the loss of replica {notes.nan} is NaN at call {self._number}, and with it the whole gradient", "nan"
            )
        divisors = notes.divisors()
        sums = [buffers.take(exchange, divisor) for buffers, divisor in zip(self._buffers, divisors, strict=False)]
        results = list(map(_copy_of, map(exchange.result, self._statistic_buffers)))
        exchange.release()
        has_metrics = notes.has_metrics
        metrics = self._finish_metrics(notes) if has_metrics else None
        self._is_finished = True
        if self._has_bases:
            set_gradients(self._parameters, self._bases)
        self._take_statistics(results, notes)
        for buffers, taken in zip(self._buffers, sums, strict=False):
            buffers.show(taken, notes.used)
        self._collective.end_step()
        loss = torch.tensor(notes.sum_loss(divisors), dtype=getattr(torch, notes.dtype), device=self._device)
        return (loss, metrics) if has_metrics else loss

    def _take_statistics(self, results: Sequence[torch.Tensor], notes: Notes) -> None:
        statistics = self._statistics
        if not statistics.has_any:
            return
        self._restore_buffers()
        if statistics.others and len({note.others for note in notes.with_samples}) > 1:
            names = ", ".join(sorted({place.name for place in statistics.others})[:5])
            self._calls.tell(f"buffers differ between replicas, and replica 0's count: {names}", "buffers")
        if statistics.merged:
            statistics.put_merged(results[0])
        if statistics.others:
            statistics.read_others(results[-1])

    def _finish_metrics(self, notes: Notes) -> Any:
        if notes.are_metrics_large:
            return exchange_metrics(
                self._collective,
                f"metrics of call {self._number}",
                lambda: self._inputs.num_samples,
                self._measure,
                self._device,
            )
        first = notes.with_samples[0]
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
        rows = share(self._inputs.num_samples, self._num_replicas, replica)
        if not rows:
            return None
        if replica not in self._measured:
            self._measured[replica] = Measured.of(self._run(replica, len(rows)).metrics, len(rows))
        return self._measured[replica]


def _copy_of(result: Any) -> torch.Tensor:
    return result.clone() if isinstance(result, torch.Tensor) else torch.from_numpy(np.array(result))


def backward(loss: torch.Tensor, scaler: Any, device: torch.device, *, retain_graph: bool = False) -> None:
    """`loss.backward()`, outside of autocast."""
    is_autocast = torch.is_autocast_enabled(device.type)
    with torch.autocast(device.type, enabled=False) if is_autocast else nullcontext():
        value = loss if scaler is None else scaler.scale(loss)
        value.backward(retain_graph=True) if retain_graph else value.backward()


def _weigh_group(group: Sequence[Any], weight: float) -> tuple[torch.Tensor, float, float]:
    """A group's terms as one number, the weight of its gradient, and its count."""
    if len(group) == 1 and group[0].kind == "samples":
        return group[0].value, weight, 0.0
    kinds = {term.kind for term in group}
    if kinds == {"count"}:
        count = group[0].number
        return add([term.value for term in group]), count, count
    if kinds == {"samples"}:
        return add([term.value for term in group]), weight, 0.0
    return add([term.value * (weight if term.kind == "samples" else 1.0) for term in group]), 1.0, 0.0


def add(values: Sequence[torch.Tensor]) -> torch.Tensor:
    return functools.reduce(lambda total, value: total + value, [value.reshape(()) for value in values])
