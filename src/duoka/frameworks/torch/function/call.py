"""`strategy.backward`: run a function on each replica's samples, exchange, and add the mean gradient to `p.grad`.

A call is atomic. Whatever a replica's function changes is restored before it runs again: gradients, buffers, global
generators. So a replica can be computed again on another worker, and an error leaves everything as it was.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch

from duoka.collectives.collective import Collective
from duoka.errors import CheckpointError, MismatchError
from duoka.frameworks.exchange.checks import Checks
from duoka.frameworks.torch.function.attempt import Attempt, Check, add, backward
from duoka.frameworks.torch.function.differences import title_call
from duoka.frameworks.torch.function.first_call import check_models
from duoka.frameworks.torch.function.identity import Seen, fingerprint
from duoka.frameworks.torch.function.inputs import Inputs
from duoka.frameworks.torch.function.note import Digests
from duoka.frameworks.torch.function.returned import Measured, Returned, Rows, combine, read, weigh
from duoka.frameworks.torch.function.seed import BaseSeed
from duoka.frameworks.torch.function.trained import Trained
from duoka.frameworks.torch.generators import digest_generators
from duoka.frameworks.torch.randomness import KeptGenerators
from duoka.frameworks.torch.shapes import fix_shapes
from duoka.frameworks.torch.single_samples import SingleSamples
from duoka.frameworks.torch.sync_batchnorm import SyncedPart, restart_needed

Function = Callable[..., Any]
_FIRST_CALLS, _EVERY = 3, 100  # in these calls, and in every hundredth, global tensors and graphs are looked at whole
_LATER_CHECKS = (2, 3, 10)  # calls of a function in which its loss is checked again, and every hundredth
_MOST_OBJECTS = 5  # of one name that are checked as first calls are: a loop may make a lambda in each iteration


class Calls:
    """All calls of one strategy."""

    def __init__(
        self,
        collective: Collective,
        trained: Trained,
        device: torch.device,
        seed: BaseSeed,
        tell: Callable[..., None],
        checks: Checks,
        *,
        is_synced: bool = False,
    ) -> None:
        self.is_synced = is_synced and collective.num_replicas > 1  # BatchNorm over the whole batch
        self.synced_part: SyncedPart | None = None  # which part of it is computed now
        self.collective, self.trained, self.device, self.tell = collective, trained, device, tell
        self.seed, self._checks = seed, checks
        self.single_samples = SingleSamples(trained.models, collective.num_replicas, tell)
        self.number = 0  # of calls begun
        self.is_inside = False  # a function is under way
        self._num_groups: dict[str, int] = {}  # of loss terms, by function
        self._seen: dict[str, Seen] = {}  # functions, by their names

    # The state of a run.

    def capture(self) -> dict[str, Any]:
        return {
            "number": self.number,
            "seed": self.seed.number,
            "num_groups": dict(self._num_groups),
            "functions": {title: [seen.num_calls, seen.first_loss] for title, seen in sorted(self._seen.items())},
            "agreed_step": self._checks.agreed_step,
        }

    def check(self, state: dict[str, Any]) -> None:
        """With one replica nothing is seeded, and generators are restored."""
        if state["seed"] != self.seed.number and self.collective.num_replicas > 1:
            raise CheckpointError(
                f"The saved run has the seed {state['seed']}, and this script the seed {self.seed.number}.",
                why="order and dropout would be those of another run.",
                do=f"call torch.manual_seed({state['seed']}) as before, or begin a new run in another directory.",
            )

    def restore(self, state: dict[str, Any]) -> None:
        self.number, self._num_groups = state["number"], dict(state["num_groups"])
        self._seen = {title: Seen(*numbers) for title, numbers in state["functions"].items()}
        self._checks.agreed_step = state["agreed_step"]

    def has_seen(self, title: str) -> bool:
        """Whether a call of this function has been exchanged."""
        return title in self._seen

    def first_loss(self, title: str) -> float:
        """What a function's first call returned, without its sign."""
        return self._seen[title].first_loss if title in self._seen else 0.0

    # Inside of functions.

    def weigh(self, term: Any, count: Any) -> Any:
        return term if self.collective.num_replicas == 1 else weigh(term, count)

    def rows(self, tensor: Any) -> Rows:
        if not self.is_inside:
            raise MismatchError(
                "strategy.rows was called outside of a function given to strategy.backward or strategy.evaluate.",
                do="return it from that function, as a metric: return loss, strategy.rows(tensor).",
            )
        return Rows(tensor)

    def refuse_inside(self, call: str) -> None:
        """Refuse a call between workers while a function of this worker's samples is under way."""
        if self.is_inside:
            raise MismatchError(
                f"{call} was called inside a function passed to strategy.backward or strategy.evaluate.",
                why="the function runs for some replicas on one worker and for some on another: workers would wait for"
                " each other.",
                do="return the value from the function as a metric, and use it after the call.",
            )

    @contextmanager
    def inside(self) -> Iterator[None]:
        self.is_inside = True
        try:
            yield
        finally:
            self.is_inside = False

    def run(self, function: Function, data: Sequence[Any]) -> Returned:
        self.is_inside = True
        try:
            return read(function(*data))
        finally:
            self.is_inside = False

    # The call.

    def backward(
        self, function: Function, args: Sequence[Any], scaler: Any, rates: Sequence[str], *, check: bool = True
    ) -> Any:
        self.refuse_inside("strategy.backward")
        if not callable(function):
            raise MismatchError(
                f"strategy.backward was given a {type(function).__name__}, not a function.",
                why="it runs the function for each replica, on that replica's samples, and calls loss.backward().",
                do="def loss_of(x, y): return criterion(model(x), y); then strategy.backward(loss_of, batch).",
            )
        inputs = Inputs(args, self.collective.num_replicas, self.device)
        self.trained.scan()
        if not self.trained.parameters:
            raise MismatchError(
                "strategy.backward was called before anything was prepared that could be trained.",
                do="call model, optimizer, loader = strategy.prepare(model, optimizer, loader) first.",
            )
        self._checks.at_border(self.number, self.trained.state)
        self.number += 1
        if self.collective.num_replicas == 1:
            return self._run_alone(function, inputs, scaler)
        if self.is_synced:
            self._check_synced(inputs.num_samples)
        fix_shapes()  # before the check, which runs on other sizes
        title = fingerprint(function)
        # Written out here, as it is done in every call: most functions are objects that have been seen.
        seen = self._seen.get(title) or Seen()
        owner = function.__self__ if type(function) is MethodType else function
        reference, number = seen.objects.get(id(owner)), seen.num_calls + 1
        is_new = seen.num_objects < _MOST_OBJECTS and (reference is None or reference() is not owner)
        look = Check.NOTHING
        if check and is_new:
            look, trained = Check.ALL, self.trained
            is_synced = self.is_synced
            check_models(trained.models, trained.parameters, trained.names, self.tell, is_synced=is_synced)
        elif check and (number in _LATER_CHECKS or number % _EVERY == 0):
            look = Check.LOSS
        name = title_call(title, inputs.describe(), rates)
        is_whole = self.number <= _FIRST_CALLS or self.number % _EVERY == 0
        digests = Digests(
            digest_generators(), inputs.digest(is_whole=is_whole), inputs.digest_samples(), inputs.digest_order()
        )
        with KeptGenerators():
            while True:
                num_groups = self._num_groups.get(title, 1)
                is_looked_at = is_whole or is_new
                attempt = Attempt(
                    self, function, inputs, title, digests, scaler, num_groups, look, is_looked_at=is_looked_at
                )
                try:
                    notes = attempt.exchange(name)
                    self._seen[title], seen.num_calls = seen, number
                    if is_new:
                        seen.add(owner)
                        is_new = False
                    if not notes.moved and len(notes.groups) <= attempt.num_groups:
                        result = attempt.finish(notes)
                        if number == 1:
                            loss = (result[0] if notes.has_metrics else result).item()
                            seen.first_loss = abs(loss) if math.isfinite(loss) else 0.0
                        return result
                finally:
                    attempt.restore()
                look = Check.NOTHING
                self._num_groups[title] = max(len(notes.groups), num_groups)
                if notes.moved:
                    self.trained.move(notes.moved)

    def _check_synced(self, num_samples: int) -> None:
        """Every worker computes one replica, in step with all others, and none of it can be done again."""
        num_replicas, num_workers = self.collective.num_replicas, len(self.collective.workers)
        if num_workers < num_replicas:
            raise restart_needed(num_replicas - num_workers, num_replicas)
        if num_samples < num_replicas:
            raise MismatchError(
                f"A batch of {num_samples} samples leaves replicas without samples, and sync_batchnorm=True needs all"
                f" {num_replicas} of them.",
                do="use drop_last=True in the DataLoader, or another batch_size.",
            )

    def _run_alone(self, function: Function, inputs: Inputs, scaler: Any) -> Any:
        """With one replica: the plain script, with nothing seeded and nothing exchanged."""
        returned = self.run(function, inputs.cut(0))
        total = add([term.value for term in returned.terms])
        backward(total, scaler, self.device)
        loss = total.detach()
        if not returned.has_metrics:
            return loss
        measured = Measured.of(returned.metrics, inputs.num_samples)
        return loss, combine(measured.kinds, measured.numbers, measured.rows, self.device)
