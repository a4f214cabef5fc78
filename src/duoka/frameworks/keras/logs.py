"""What a step reports: numbers that metrics keep are read from them; the others are means over replicas."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from keras import ops

from duoka.errors import MismatchError
from duoka.frameworks.replacing import shadowing


def metric_results(model: Any, names: Sequence[str] | None = None) -> dict[str, Any]:
    """Everything the metrics can tell, under the names that a step may use for it; with `names`, at least those."""
    results = dict(model.get_metrics_result())
    for metric in model.metrics:
        if metric.name not in results and (names is None or metric.name in names):
            results[metric.name] = metric.result()
    return results


def _names_kept(model: Any, results: dict[str, Any], updated: set[int]) -> set[str]:
    """The names whose numbers metrics keep; `updated` are the ids of variables that the step has changed.

    A step may report a loss of its own, and leave the metric of that name alone.
    """
    is_updated = {
        id(metric): not metric.variables or bool(updated & set(map(id, metric.variables))) for metric in model.metrics
    }
    idle = {metric.name for metric in model.metrics if not is_updated[id(metric)]}
    return set(results) - (idle - {metric.name for metric in model.metrics if is_updated[id(metric)]})


class Logs:
    """What a step reports, learned from one of its runs, or its tracing."""

    def __init__(self, model: Any, tell: Callable[[str], None]) -> None:
        self._model, self._tell = model, tell
        self.names: list[str] = []
        self.own: list[str] = []  # the names of numbers that no metric keeps
        self._told: list[tuple[str, Any]] = []  # what metrics have told the step, with their names

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Around a step: what it asks a metric for, and reports as it is, is the metric's, updated or not."""
        self._told = []
        with ExitStack() as shadows:
            for metric in self._model.metrics:
                shadows.enter_context(shadowing(metric, {"result": self._listen(metric.name, metric.result)}))
            yield

    def _listen(self, name: str, own: Callable[[], Any]) -> Callable[[], Any]:
        def result() -> Any:
            value = own()
            self._told.append((name, value))
            return value

        return result

    def learn(self, reported: Any, results: dict[str, Any], updated: set[int]) -> list[Any]:
        """Gives the numbers that no metric keeps. For `results` and `updated` see `_names_kept`."""
        kept = _names_kept(self._model, results, updated)
        if isinstance(reported, dict):
            kept |= {name for name, value in self._told if reported.get(name) is value}
        self._told = []
        self.names, own = _split(reported, kept, self._tell)
        self.own = list(own)
        return list(own.values())

    def pick(self, results: dict[str, Any]) -> dict[str, Any]:
        """Of all that metrics can tell, what is reported."""
        return {name: results[name] for name in self.names if name in results and name not in self.own}

    def assemble(self, results: dict[str, Any], own: Sequence[Any]) -> dict[str, Any]:
        """The logs of a batch, in the step's order, from what the metrics tell and the numbers that none keeps."""
        numbers = results | dict(zip(self.own, own, strict=True))
        return {name: numbers[name] for name in self.names}


def _split(reported: Any, known: set[str], tell: Callable[[str], None]) -> tuple[list[str], dict[str, Any]]:
    """The names that a step reports, in its order, and those of its numbers that no metric keeps."""
    if not isinstance(reported, dict):
        raise MismatchError(
            f"A train_step returned a {type(reported).__name__}.",
            do="let it return a dictionary of numbers by name, such as self.compute_metrics(...).",
        )
    names, own = [], {}
    for name, value in reported.items():
        if name not in known:
            value = ops.convert_to_tensor(value)
            if len(value.shape):
                tell(f"{name!r} is not one number, and is left out of the logs")
                continue
            own[name] = ops.cast(value, "float32")
        names.append(name)
    return names, own
