"""What the steps of a loop train: weights, moving state and optimizers, as bits that must be equal on all workers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from duoka.collectives.arrays import Array, as_array
from duoka.errors import CheckpointError
from duoka.frameworks.exchange.digest import as_bytes
from duoka.frameworks.tensorflow.recording import Update, slots_of
from duoka.frameworks.tensorflow.variables import raw


class Names(Protocol):
    """Variables by names that hold on all workers; see `Roster`."""

    def name_of(self, variable: Any) -> str | None: ...

    def find(self, name: str) -> Any:
        """None if it is not there, or not there yet."""
        ...

    def awaited(self, name: str) -> Array | None:
        """The value that it will have then."""
        ...


class Trained:
    """In the order of names, or in the order in which it was first seen: either is the same on all workers.

    Metrics and counters are left out: scripts reset them as they like.
    """

    def __init__(self) -> None:
        self.names: Names | None = None
        self._variables: dict[int, Any] = {}
        self._optimizers: dict[int, Any] = {}
        self._restored: dict[str, str] = {}  # kinds by name: what was trained in the run that this one goes on with
        self._classes: set[str] = set()  # of the optimizers of that run

    def see(self, updates: Sequence[Update], moving: Sequence[Any]) -> None:
        for update in updates:
            if id(update.optimizer) not in self._optimizers:
                self._compare_class(update.optimizer)
                self._optimizers[id(update.optimizer)] = update.optimizer
            for variable in update.variables:
                self._variables.setdefault(id(raw(variable)), raw(variable))
        for variable in moving:
            self._variables.setdefault(id(variable), variable)

    def _compare_class(self, optimizer: Any) -> None:
        """What one of another class would find of the saved run's is of no use to it."""
        name = type(optimizer).__name__
        if self._classes and name not in self._classes:
            saved = ", ".join(sorted(self._classes))
            raise CheckpointError(
                "The saved state is of another optimizer.",
                why=f"this script trains with {name}, and the saved run with {saved}.",
                do=f"use {saved}, or begin a new run in another directory.",
            )

    def state(self) -> TensorFlowState:
        """Optimizers make their slots with the first update, so they are asked anew each time."""
        slots = [slot for optimizer in self._optimizers.values() for slot in slots_of(optimizer)]
        seen = {id(each): each for each in [*self._variables.values(), *slots]}
        found: list[tuple[str, Kept]] = [(self._name(each), KeptVariable(each)) for each in seen.values()]
        found += self._find_restored({name for name, _ in found})
        found.sort(key=lambda pair: pair[0])
        return TensorFlowState([kept for _, kept in found if kept.is_number])

    def _name(self, variable: Any) -> str:
        return (self.names.name_of(variable) if self.names is not None else None) or ""

    def _find_restored(self, seen: set[str]) -> list[tuple[str, Kept]]:
        """What this process has not trained itself yet, there or not."""
        found: list[tuple[str, Kept]] = []
        for name, kind in self._restored.items():
            if self.names is not None and name not in seen:
                variable, bits = self.names.find(name), self.names.awaited(name)
                if variable is not None:
                    found.append((name, KeptVariable(variable)))
                elif bits is not None:
                    found.append((name, KeptBits(f"{name}: {kind}", bits)))
        return found

    def capture(self) -> dict[str, str]:
        """Kinds by name."""
        slots = [slot for optimizer in self._optimizers.values() for slot in slots_of(optimizer)]
        named = {self._name(each): KeptVariable(each).kind for each in [*self._variables.values(), *slots]}
        return self._restored | {name: kind for name, kind in named.items() if name}

    def list_classes(self) -> list[str]:
        """Of the optimizers, here and in the run that this one goes on with."""
        return sorted({*self._classes, *(type(optimizer).__name__ for optimizer in self._optimizers.values())})

    def restore(self, kinds: dict[str, str], classes: Sequence[str]) -> None:
        self._restored, self._classes = dict(kinds), set(classes)
        for optimizer in self._optimizers.values():
            self._compare_class(optimizer)


class Kept(Protocol):
    @property
    def line(self) -> str: ...

    @property
    def is_number(self) -> bool: ...

    def read(self) -> Array: ...


class KeptVariable:
    """Read outside of graphs: also by a call out of one, when nothing in it uses the variable."""

    def __init__(self, variable: Any) -> None:
        self._variable = variable
        self.is_number = bool(variable.dtype.is_floating or variable.dtype.is_integer)

    @property
    def kind(self) -> str:
        return f"{tuple(self._variable.shape)} {self._variable.dtype.name}"

    @property
    def line(self) -> str:
        return f"{self._variable.name.removesuffix(':0')}: {self.kind}"

    def read(self) -> Array:
        return as_bytes(as_array(self._variable))


class KeptBits:
    """Of a variable that is not there yet."""

    is_number = True

    def __init__(self, line: str, bits: Array) -> None:
        self.line, self._bits = line, bits

    def read(self) -> Array:
        return as_bytes(self._bits)


class TensorFlowState:
    def __init__(self, kept: Sequence[Kept]) -> None:
        self._kept = list(kept)
        self.lines = [each.line for each in self._kept]

    def read(self, place: int) -> Array:
        return self._kept[place].read()
