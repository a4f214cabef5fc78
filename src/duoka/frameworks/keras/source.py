"""Where the batches of a training come from: every worker sees them all, in the same order, and takes its rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import isgenerator
from typing import Any

import keras

from duoka.errors import MismatchError
from duoka.frameworks.exchange.note import DifferentBatches
from duoka.frameworks.keras.backends import load_draws


@dataclass(frozen=True)
class Source:
    name: str
    remedy: str  # for an order that differs between workers
    is_stream: bool = True  # every worker has to read all of it
    is_tensorflow: bool = False


_ARRAYS = Source(
    "arrays",
    "seed what makes or shuffles them (np.random.default_rng(7)), and sort what comes out of a set or a folder.",
    is_stream=False,
)
_PY_DATASET = Source("a PyDataset", "seed what it draws from, and sort what comes out of a set or a folder.")
_GENERATOR = Source(
    "a generator", "seed what it draws from (np.random.default_rng(7)), and make a new one for each training."
)
_BY_ROOT = {
    "tensorflow": Source(
        "a tf.data dataset",
        "give every shuffle a seed, leave deterministic=False out, and let no worker read it alone: each reading"
        " shuffles anew.",
        is_tensorflow=True,
    ),
    "torch": Source(
        "a torch DataLoader",
        "give it a generator with a seed (torch.Generator().manual_seed(7)), and let no worker read it alone.",
    ),
}


def source_of(x: Any) -> Source:
    """What was given to `fit`. Nothing is imported to find it out."""
    if isinstance(x, keras.utils.PyDataset):
        return _PY_DATASET
    if isgenerator(x):
        return _GENERATOR
    for ancestor in type(x).__mro__:
        root = ancestor.__module__.partition(".")[0]
        if root in _BY_ROOT and (".data" in ancestor.__module__):
            return _BY_ROOT[root]
    if hasattr(x, "__next__") or (hasattr(x, "__iter__") and not hasattr(x, "__getitem__")):
        return _GENERATOR
    return _ARRAYS


def settle(argument: Any, tell: Callable[[str], None]) -> Any:
    """An argument of `fit`, or the same data drawn so that they are the same in each run."""
    return load_draws().draw_in_turn(argument, tell) if source_of(argument).is_tensorflow else argument


@contextmanager
def naming(x: Any) -> Iterator[None]:
    """Around what reads these batches: when workers see different ones, say which, and what helps."""
    try:
        yield
    except DifferentBatches as error:
        source = source_of(x)
        raise MismatchError(f"{error.what} They come from {source.name}.", why=error.why, do=source.remedy) from None
