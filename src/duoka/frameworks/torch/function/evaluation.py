"""`strategy.evaluate`: metrics over a whole loader, shared between replicas, the same bits on any number of workers.

Batch i of the loader belongs to replica i modulo R, and is evaluated as a whole. What the loader draws is what
`for batch in loader` would draw.
"""

from __future__ import annotations

import inspect
import math
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader

from duoka.collectives.collective import Collective
from duoka.data.seeds import derive
from duoka.errors import MismatchError
from duoka.frameworks.torch.function import arguments
from duoka.frameworks.torch.function.batches import count_loosely
from duoka.frameworks.torch.function.extras import exchange_metrics
from duoka.frameworks.torch.function.first_call import list_names
from duoka.frameworks.torch.function.identity import fingerprint
from duoka.frameworks.torch.function.loaders import Loaders
from duoka.frameworks.torch.function.loss_probe import in_eval_mode
from duoka.frameworks.torch.function.returned import ALONE, Measured, Rows, combine, refuse_samples
from duoka.frameworks.torch.function.seed import BaseSeed
from duoka.frameworks.torch.function.shares import EvaluationReader
from duoka.frameworks.torch.function.side_effects import Watch, find_in_train_mode
from duoka.frameworks.torch.generators import capture_generators, restore_generators
from duoka.frameworks.torch.loader_processes import start
from duoka.frameworks.torch.nested import map_tensors
from duoka.frameworks.torch.randomness import seed_all, seeded

Function = Callable[..., Any]
_DO = "return (sum, count), strategy.rows(tensor), or a dictionary of them: the same names and shapes for every batch."


class Evaluator:
    """All evaluations of one strategy."""

    def __init__(
        self,
        collective: Collective,
        models: Sequence[nn.Module],
        device: torch.device,
        seed: BaseSeed,
        tell: Callable[..., None],
        inside: Callable[[], Any],
        loaders: Loaders,
        find_known: Callable[[], set[int]],
    ) -> None:
        self._collective, self._models, self._device, self._seed = collective, models, device, seed
        self._tell, self._inside, self._loaders = tell, inside, loaders
        self._find_known = find_known  # ids of prepared objects, which may change
        self._watched: set[str] = set()  # functions
        self._number = 0  # of the pass that the evaluation under way makes

    def evaluate(self, function: Function, loader: DataLoader[Any]) -> Any:
        self._number = self._loaders.begin_pass()
        with torch.no_grad(), in_eval_mode(self._models):
            return self._evaluate(function, loader)

    def _evaluate(self, function: Function, loader: DataLoader[Any]) -> Any:
        reader = self._read(loader)
        totals: dict[int, _Totals] = {}
        begin = time.monotonic()
        if self._collective.num_replicas == 1:
            self._add_up(function, reader, (0,), totals)
            measured = totals[0].measured
            answer = (
                None if measured is None else combine(measured.kinds, measured.numbers, measured.rows, self._device)
            )
        else:
            failure: list[BaseException] = []  # of this worker: all others hear of it in the exchange

            def add_up(replicas: Sequence[int]) -> None:
                try:
                    self._add_up(function, reader, replicas, totals)
                except (Exception, SystemExit) as error:
                    failure.append(error)

            def measure(replica: int) -> Measured | None:
                if replica not in totals and not failure:  # the replica of a lost worker
                    add_up((replica,))
                return totals[replica].measured if replica in totals else None

            add_up(self._collective.replicas)
            seconds = time.monotonic() - begin
            # Whoever has harder batches, or a lost replica's, takes longer by a part of what these took.
            answer = exchange_metrics(
                self._collective,
                f"strategy.evaluate {self._number}",
                lambda: reader.num_samples,
                measure,
                self._device,
                reader.places,
                lambda: 3.0 * math.ceil(seconds),
                failure,
                lambda: reader.order,
            )
            self._collective.end_step()
            self._watched.add(fingerprint(function))
        if answer is None:
            self._tell("strategy.evaluate: the loader gave no batch, so the answer is NaN")
            return math.nan
        return answer

    def _read(self, loader: DataLoader[Any]) -> Any:
        shares, num_replicas = self._loaders.shares(loader), self._collective.num_replicas
        if shares is None:
            return _WholeReader(loader, num_replicas)
        return EvaluationReader(shares, loader, num_replicas, self._number)

    def _add_up(self, function: Function, reader: Any, replicas: Sequence[int], totals: dict[int, _Totals]) -> None:
        totals.update({replica: _Totals() for replica in replicas})
        takes_one, title = _takes_one(function), fingerprint(function)
        is_alone = self._collective.num_replicas == 1
        unwatched = set() if is_alone or title in self._watched else set(replicas)
        for replica, number, batch in reader.read(replicas):
            self._collective.work_on(self._number, (replica,))
            batch = map_tensors(batch, lambda tensor: tensor.to(self._device, non_blocking=True))
            parts = list(batch) if type(batch) in (tuple, list) else [batch]
            given = [batch] if takes_one and len(parts) > 1 else parts
            seed = derive("evaluation", self._seed.number, self._number, number)
            with nullcontext() if is_alone else seeded(seed), self._inside():
                if replica in unwatched:
                    returned = self._run_watched(function, given, title, seed)
                else:
                    returned = function(*given)
            if replica in unwatched:
                unwatched.remove(replica)
                refuse_samples(returned if isinstance(returned, dict) else {ALONE: returned}, count_loosely(parts))
            totals[replica].add(returned, reader.size_of(number))

    def _run_watched(self, function: Function, given: Sequence[Any], title: str, seed: int) -> Any:
        """Refuse what the function changes outside of itself: a worker would have its own batches' share of it."""
        known = self._find_known()
        watch, training, used = Watch(function, known), find_in_train_mode(function, known), set()
        hooks = [
            module.register_forward_pre_hook(lambda *_, name=name: used.add(name)) for name, module in training.items()
        ]
        try:
            returned = function(*given)
            watch.look_again()
            if watch.has_new:  # a cache is made once, a value for the script in each run
                seed_all(seed)
                function(*given)
        finally:
            for hook in hooks:
                hook.remove()
        changed = [*watch.find_changes(), *watch.find_grown()]
        if changed:
            raise MismatchError(
                f"{title} changes {list_names(changed)}, outside of itself, in strategy.evaluate.",
                why="each worker evaluates some of the batches, and would have its own share of it.",
                do="return (sum, count) pairs or strategy.rows(tensor), and use what strategy.evaluate returns. For a"
                " module that was not prepared, such as an average of the weights, call eval(), or prepare it.",
            )
        if used:
            self._tell(
                f"{list_names(sorted(used))} is in training mode in strategy.evaluate, which sets prepared modules to"
                " eval mode only: call eval() on it, or prepare it"
            )
        return returned


class _Totals:
    """The metrics of one replica, so far."""

    def __init__(self) -> None:
        self.measured: Measured | None = None

    def add(self, returned: Any, num_samples: int | None) -> None:
        named = returned if isinstance(returned, dict) else {ALONE: returned}
        for name in returned if isinstance(returned, dict) else ():
            if not isinstance(name, str) or not name:
                used = repr(name) if name != "" else "an empty string"
                raise MismatchError(f"The function given to strategy.evaluate used {used} as a name.", do=_DO)
        for name, metric in named.items():
            if not isinstance(metric, Rows) and not (isinstance(metric, tuple | list) and len(metric) == 2):
                is_list = isinstance(metric, tuple | list)
                what = f"{len(metric)} values" if is_list else f"a {type(metric).__name__}"
                raise MismatchError(
                    f"The function given to strategy.evaluate returned {what}{f' for {name!r}' if name else ''}, not a"
                    " sum and a count.",
                    why="means of batches of different sizes cannot be put together again.",
                    do=_DO,
                )
        rows = [metric for metric in named.values() if isinstance(metric, Rows)]
        count = num_samples if num_samples is not None else len(rows[0].tensor) if rows else 0
        new = Measured.of(named, count)
        if self.measured is None:
            self.measured = new
            return
        if new.kinds != self.measured.kinds:
            raise MismatchError(
                "The function given to strategy.evaluate returned different things for different batches.",
                why=f"{[kind.name or 'a pair' for kind in self.measured.kinds]} and"
                f" {[kind.name or 'a pair' for kind in new.kinds]}",
                do=f"{_DO} Where there is nothing to count, return (0, 0).",
            )
        rows_so_far = [np.concatenate(pair) for pair in zip(self.measured.rows, new.rows, strict=True)]
        self.measured = Measured(new.kinds, self.measured.numbers + new.numbers, rows_so_far)


class _WholeReader:
    """Reads every batch: with one replica, and of streams. After a loss it reads again, from the same random state."""

    def __init__(self, loader: DataLoader[Any], num_replicas: int) -> None:
        self._loader, self._num_replicas = loader, num_replicas
        self._sizes: list[int] = []
        self._state: Any = None
        self.order = 0  # a digest of what was read

    def read(self, replicas: Sequence[int]) -> Iterator[tuple[int, int, Any]]:
        if self._num_replicas == 1:
            yield from ((0, number, batch) for number, batch in enumerate(start(self._loader)))
            return
        is_again, now = self._state is not None, capture_generators()
        if is_again:
            restore_generators(self._state)
        else:
            self._state = now
        sizes, self.order = [], 0
        for number, batch in enumerate(start(self._loader)):
            parts = batch if type(batch) in (tuple, list) else [batch]
            sizes.append(arguments.count_samples(parts) or 0)
            self.order = zlib.crc32(arguments.fingerprint(parts, is_whole=False).to_bytes(4, "little"), self.order)
            if number % self._num_replicas in replicas:
                yield number % self._num_replicas, number, batch
        self._sizes = sizes
        if is_again:
            restore_generators(now)

    def size_of(self, number: int) -> int | None:
        return None  # a function's rows have to be as many as it says

    @property
    def num_samples(self) -> int:
        return sum(self._sizes)

    def places(self, replica: int) -> list[range]:
        starts = np.concatenate([[0], np.cumsum(self._sizes)]).astype(int).tolist()
        batches = range(replica, len(self._sizes), self._num_replicas)
        return [range(starts[number], starts[number + 1]) for number in batches]


def _takes_one(function: Function) -> bool:
    """Whether a function takes the batch as one argument: `def count(batch)`, and not `def count(x, y)`."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return True
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    required = [each for each in parameters if each.kind in kinds and each.default is inspect.Parameter.empty]
    return len(required) == 1 and not any(each.kind is inspect.Parameter.VAR_POSITIONAL for each in parameters)
