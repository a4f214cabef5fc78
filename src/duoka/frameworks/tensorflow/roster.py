"""The variables of this process, under names that a process which runs the same script finds again.

Those that are there when the first loop begins are *early*: the same ones, in the same order, whenever the script is
run. Others come into being while it trains (slots of optimizers, layers that are built by their first batch), and when
a run is resumed not always in the same order; of them a value may be known before they are there.
"""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf
from keras.src.backend.tensorflow.core import Variable as KerasVariable
from tensorflow.python.eager.polymorphic_function.polymorphic_function import UnliftedInitializerVariable
from tensorflow.python.ops.resource_variable_ops import ResourceVariable, UninitializedVariable

from duoka.checkpoint.storage import TYPE_NAMES
from duoka.collectives.arrays import Array
from duoka.errors import CheckpointError
from duoka.frameworks.replacing import replacing
from duoka.frameworks.tensorflow.given import Gifts, describe_optimizers, name_changes

_LATER = "later "


@dataclass(frozen=True)
class Entry:
    name: str
    line: str  # name, shape and type
    is_early: bool
    find: Callable[[], Any]  # None, once it is gone

    def get(self) -> Any:
        variable = self.find()
        return variable if variable is not None and bool(variable.is_initialized()) else None


class Roster:
    def __init__(self, see_restored: Callable[[Any], None] = lambda variable: None) -> None:
        self._see_restored = see_restored  # a variable that came into being has got its saved value
        self._entries: list[Entry] = []
        self._by_id: dict[int, Entry] = {}  # an id is used again when a variable is gone
        self._counts: Counter[tuple[bool, str]] = Counter()
        self._awaited: dict[str, Array] = {}
        self._paths: list[str] = []  # of variables of Keras that are being made, the innermost last
        self._given: Gifts = {}  # to optimizers, by the script
        self._watching: ExitStack | None = None

    def begin(self) -> None:
        """The first loop begins. Later calls do nothing."""
        if self._watching is None:
            gc.collect()  # what nobody holds any more is not of the run
            known = gc.get_objects()
            paths = {id(each._value): each.path for each in known if issubclass(type(each), KerasVariable)}
            for variable in sorted(filter(_is_variable, known), key=_age):
                self._add(variable, paths.get(id(variable)), is_early=True)
            self._given = describe_optimizers(known, self.name_of)
            self._watching = ExitStack()
            self._watching.enter_context(replacing([*self._watch_making(), self._watch_keras()]))

    def _add(self, variable: Any, path: str | None, *, is_early: bool) -> Entry | None:
        if not _can_be_saved(variable):
            return None
        name = path or variable.name.removesuffix(":0")
        self._counts[is_early, name] += 1
        count = self._counts[is_early, name]
        name = name if count == 1 else f"{name} ({count})"
        line = f"{name} {tuple(variable.shape)} {variable.dtype.name}"
        entry = self._by_id[id(variable)] = Entry(name, line, is_early, weakref.ref(variable))
        self._entries.append(entry)
        return entry

    # Those that come later.

    def _watch_making(self) -> Iterator[tuple[Any, str, Any]]:
        for kind in (ResourceVariable, UninitializedVariable, UnliftedInitializerVariable):
            yield kind, "__init__", self._after(kind.__init__)

    def _after(self, make: Callable[..., None]) -> Callable[..., None]:
        def make_seen(variable: Any, *args: Any, **kwargs: Any) -> None:
            make(variable, *args, **kwargs)
            if type(variable).__init__ is not make_seen:
                return  # called by the one that is; some of them give the first value after this
            entry = self._add(variable, self._paths[-1] if self._paths else None, is_early=False)
            if entry is not None and entry.name in self._awaited:
                with tf.init_scope():  # before it is used: TensorFlow gives no first value to one that has a value
                    _assign(variable, self._awaited.pop(entry.name))
                self._see_restored(variable)

        return make_seen

    def _watch_keras(self) -> tuple[Any, str, Any]:
        initialize = KerasVariable._initialize

        def initialize_named(variable: Any, value: Any) -> None:
            self._paths.append(variable.path)
            try:
                initialize(variable, value)
            finally:
                self._paths.pop()

        return KerasVariable, "_initialize", initialize_named

    # Values.

    def name_of(self, variable: Any) -> str | None:
        entry = self._by_id.get(id(variable))
        return None if entry is None or entry.find() is not variable else _full_name(entry)

    def find(self, name: str) -> Any:
        entries = (entry for entry in self._entries if _full_name(entry) == name)
        return next((variable for entry in entries if (variable := entry.find()) is not None), None)

    def awaited(self, name: str) -> Array | None:
        return self._awaited.get(name.removeprefix(_LATER)) if name.startswith(_LATER) else None

    def capture(self) -> dict[str, Any]:
        self._entries = [entry for entry in self._entries if entry.is_early or entry.find() is not None]
        found = [(entry, variable) for entry in self._entries if (variable := entry.get()) is not None]
        early = {entry.name: _bits(variable) for entry, variable in found if entry.is_early}
        later = {entry.name: _bits(variable) for entry, variable in found if not entry.is_early}
        lines = [entry.line for entry in self._entries if entry.is_early]
        return {"variables": early, "later": later | self._awaited, "lines": lines, "given": self._given}

    def check(self, state: dict[str, Any]) -> None:
        """The same variables have to be there at the beginning of the first loop; the first difference is named."""
        here = [entry.line for entry in self._entries if entry.is_early]
        saved = list(state["lines"])
        for mine, other in zip(here, saved, strict=False):
            if mine != other:
                raise _other_model(f"{mine} is in this one where the saved one has {other}")
        if len(here) != len(saved):
            rest = (here if len(here) > len(saved) else saved)[min(len(here), len(saved))]
            where = "in this one, and not in the saved one" if len(here) > len(saved) else "in the saved one only"
            raise _other_model(f"{rest} is {where}")

    def name_changes(self, state: dict[str, Any]) -> list[str]:
        """What this script gives to its optimizers otherwise than the one that has begun the run."""
        if "given" not in state:  # older
            return []
        here, self._given = self._given, state["given"]
        return name_changes(here, self._given)

    def restore(self, state: dict[str, Any]) -> list[Any]:
        """All that are there get their values, now; the others when they come. Gives those that have got one."""
        self._awaited = dict(state["later"])
        restored = []
        for entry in self._entries:
            variable = entry.find()
            values = state["variables"] if entry.is_early else self._awaited
            if variable is not None and entry.name in values:
                _assign(variable, values[entry.name] if entry.is_early else self._awaited.pop(entry.name))
                restored.append(variable)
        return restored


def _full_name(entry: Entry) -> str:
    return entry.name if entry.is_early else _LATER + entry.name


def _is_variable(thing: Any) -> bool:
    """By its type: there are things that do something when they are asked for their class."""
    return issubclass(type(thing), (ResourceVariable, UninitializedVariable)) and not thing._in_graph_mode


def _age(variable: Any) -> int:
    """TensorFlow numbers them."""
    return int(str(variable._unique_id).rpartition("_")[2])


def _can_be_saved(variable: Any) -> bool:
    """Text cannot; what belongs to a graph with a session is none of ours."""
    dtype = variable.dtype
    return not variable._in_graph_mode and bool(
        dtype.is_floating or dtype.is_integer or dtype.is_bool or dtype.is_complex
    )


def _bits(variable: Any) -> Array:
    """Types that files do not know, bfloat16 among them, as whole numbers."""
    array: Array = np.asarray(variable.numpy())
    if array.dtype.name in TYPE_NAMES or array.dtype.kind == "c":
        return array
    return array.view(f"u{array.dtype.itemsize}")


def _assign(variable: Any, bits: Array) -> None:
    dtype = variable.dtype.as_numpy_dtype
    variable.assign(bits if bits.dtype == dtype else bits.view(dtype))


def _other_model(why: str) -> CheckpointError:
    return CheckpointError(
        "The saved state is of another model.",
        why=f"{why}.",
        do="use the model of that run, or begin a new run in another directory.",
    )
