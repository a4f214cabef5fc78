"""Settings of one rehearsed run. They travel to the workers in the plan."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Death:
    """Where a worker kills itself: in this phase of this step, or before the next step if the phase is absent."""

    worker: int
    step: int
    phase: str


@dataclass(frozen=True)
class Rehearsal:
    title: str  # names the directory of the logs, below runs/
    directory: str  # where workers leave their records
    num_steps: int
    death: Death | None = None
    dropout: bool = True  # False: dropout layers are switched off
    batchnorm: bool = True  # False: BatchNorm layers use their running statistics
    stop: int | None = None  # after this many steps, at a boundary: write the state to a file, and end
    state: str = ""  # that file
    resumes: bool = False  # from that file

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Rehearsal:
        """Read what `to_json` wrote.

        >>> settings = Rehearsal("killed", "/tmp/a", num_steps=3, death=Death(1, 2, "before"))
        >>> Rehearsal.from_json(settings.to_json()) == settings
        True
        """
        death = fields["death"]
        return cls(**{**fields, "death": None if death is None else Death(**death)})
