"""What strategies stand on: a session, which knows the workers of the run. `session.py` provides it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from duoka.collectives.collective import Collective
from duoka.devices.device import Device


@dataclass(frozen=True)
class Request:
    """What the user asked for, before anything is decided."""

    devices: Any = None
    replicas: int | None = None
    seed: int = 0
    threads: int | None = None
    soft_placement: bool = True
    deadline_s: float = 60.0


class Adapter(Protocol):
    """A framework, as far as a strategy needs it."""

    @property
    def step(self) -> int:
        """Committed steps."""
        ...

    @property
    def stepped(self) -> bool:
        """Whether the batch of the loop body under way is complete."""
        ...

    @property
    def count(self) -> int | None:
        """The true rows of this body; None outside of bodies."""
        ...

    def prepare(self, objects: Sequence[Any]) -> list[Any]: ...

    def weigh(self, loss: Any, count: Any) -> Any: ...

    def contribute(self, kind: str, value: Any, count: Any) -> Any:
        """Hand in a number from inside a loop body; None when there is no body."""
        ...


class Session(Protocol):
    """The run as one worker sees it."""

    @property
    def collective(self) -> Collective: ...

    @property
    def worker(self) -> int: ...

    @property
    def num_replicas(self) -> int: ...

    @property
    def num_workers(self) -> int: ...

    @property
    def device(self) -> Device: ...

    def adapter(self, objects: Sequence[Any]) -> Adapter:
        """An adapter to the framework that these objects belong to; each strategy has its own."""
        ...

    def launch(self, function: Callable[..., Any], *args: Any) -> Any: ...


Connect = Callable[[Request], Session]
