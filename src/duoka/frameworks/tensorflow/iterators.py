"""Iterators of datasets inside a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tensorflow.python.data.ops.iterator_ops import OwnedIterator

from duoka.errors import MismatchError
from duoka.frameworks.replacing import definitions, replacing


@contextmanager
def refusing_iterators() -> Iterator[None]:
    """Around one run, or one tracing, of a step. A dataset that it goes through itself, from the start, is its own."""
    made: dict[int, Any] = {}
    make = OwnedIterator.__init__

    def make_seen(iterator: Any, *args: Any, **kwargs: Any) -> None:
        made[id(iterator)] = iterator
        make(iterator, *args, **kwargs)

    def refuse(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def draw(iterator: Any) -> Any:
            if id(iterator) not in made:
                raise MismatchError(
                    "The step draws from the iterator of a dataset.",
                    why="each replica would draw a batch of its own, where one device draws one for all.",
                    do="draw before, and give the batch to the step: strategy.run(step, args=(next(iterator),)).",
                )
            return original(iterator)

        return draw

    draws = definitions(OwnedIterator, ["_next_internal", "get_next_as_optional"])
    refusing = [(kind, name, refuse(method)) for kind, name, method in draws]
    with replacing([*refusing, (OwnedIterator, "__init__", make_seen)]):
        yield
