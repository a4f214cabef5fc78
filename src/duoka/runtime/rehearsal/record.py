"""Record of a rehearsed run: printed lines, numbers returned by `strategy.backward`, and the state after its last step.

Each worker writes one JSON file. The main worker adds the bytes of all tensors, in the order of their names.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from duoka.collectives.arrays import Array

Call = dict[str, list[float]]  # the numbers that one call returned, by name
_STATE = "state.bin"
_LINE = re.compile(r"^(?P<name>.*): (?P<kind>[^:]*)$")


class Line(NamedTuple):
    text: str
    where: str = ""  # file:line of the statement in the user's code; empty if it is unknown


@dataclass
class WorkerRecord:
    """One worker's part, as it is written to its file."""

    worker: int
    is_main: bool = False
    num_steps: int = 0
    lines: list[Line] = field(default_factory=list)  # printed from the first step on
    calls: list[Call] = field(default_factory=list)
    tensors: list[tuple[str, int]] = field(default_factory=list)  # "name: shape and type", and the number of bytes
    phases: list[str] = field(default_factory=list)  # of its exchanges: where a worker can be killed
    has_dropout: bool = False
    has_batchnorm: bool = False  # in training mode
    is_plain: bool = False  # a plain loop: one replica per worker, and a restart after a loss
    knows_layers: bool = False  # dropout and BatchNorm can be found and switched off
    killed: tuple[int, str] | None = None  # the step and the phase in which it killed itself
    stopped: str = ""  # where its state was saved

    def write(self, directory: Path, state: Sequence[Array] = ()) -> None:
        if self.is_main:
            with open(directory / _STATE, "wb") as file:
                for data in state:
                    file.write(memoryview(data))  # type: ignore[arg-type]
        (directory / f"worker-{self.worker}.json").write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, path: Path) -> WorkerRecord:
        fields = json.loads(path.read_text())
        fields["lines"] = [Line(*line) for line in fields["lines"]]
        fields["tensors"] = [(line, size) for line, size in fields["tensors"]]
        fields["killed"] = None if fields["killed"] is None else tuple(fields["killed"])
        return cls(**fields)


class Tensor(NamedTuple):
    name: str
    kind: str  # shape and type, as the framework writes them
    data: bytes


@dataclass(frozen=True)
class Record:
    """What one run has left, of all its workers."""

    main: WorkerRecord
    others: tuple[WorkerRecord, ...]
    tensors: tuple[Tensor, ...]

    @property
    def lines(self) -> list[Line]:
        return self.main.lines

    @property
    def lines_of_others(self) -> list[Line]:
        """Lines of other workers that the main worker has not printed, in the order of workers."""
        found: list[Line] = []
        for other in self.others:
            printed = Counter(line.text for line in self.main.lines)
            for line in other.lines:
                if printed[line.text]:
                    printed[line.text] -= 1
                else:
                    found.append(Line(f"[w{other.worker}] {line.text}", line.where))
        return found

    @property
    def phases(self) -> list[str]:
        return sorted({phase for each in (self.main, *self.others) for phase in each.phases})

    @property
    def killed(self) -> tuple[int, int, str] | None:
        """The worker, the step and the phase, if one has killed itself."""
        return next(((each.worker, *each.killed) for each in self.others if each.killed is not None), None)


def join_records(stopped: Record, resumed: Record) -> Record:
    """What a run that was stopped and resumed has printed and returned, and its state at the end."""
    before = {worker.worker: worker for worker in (stopped.main, *stopped.others)}

    def join(after: WorkerRecord) -> WorkerRecord:
        first = before.get(after.worker)
        if first is None:
            return after
        return replace(after, lines=[*first.lines, *after.lines], calls=[*first.calls, *after.calls])

    return Record(join(resumed.main), tuple(map(join, resumed.others)), resumed.tensors)


def read_record(directory: Path) -> Record | None:
    """Read the records of all workers; None if the main worker has left none."""
    workers = [WorkerRecord.read(path) for path in sorted(directory.glob("worker-*.json"))]
    main = next((worker for worker in workers if worker.is_main), None)
    if main is None:
        return None
    data, tensors, start = (directory / _STATE).read_bytes(), [], 0
    for line, size in main.tensors:
        name, kind = split_line(line)
        tensors.append(Tensor(name, kind, data[start : start + size]))
        start += size
    others = tuple(worker for worker in workers if worker is not main)
    return Record(main, others, tuple(tensors))


def split_line(line: str) -> tuple[str, str]:
    """Split a line of a state into the tensor's name and its kind.

    >>> split_line("0.weight: (3, 4) torch.float32")
    ('0.weight', '(3, 4) torch.float32')
    """
    found = _LINE.match(line)
    return (line, "") if found is None else (found["name"], found["kind"])


def flatten(returned: Any) -> Call:
    """Turn what `strategy.backward` returned into lists of numbers.

    >>> flatten((0.5, {"correct": 3.0}))
    {'loss': [0.5], 'correct': [3.0]}
    """
    if not isinstance(returned, tuple):
        return {"loss": _numbers(returned)}
    loss, metrics = returned
    named = metrics if isinstance(metrics, dict) else {"metrics": metrics}
    return {"loss": _numbers(loss)} | {str(name): _numbers(value) for name, value in named.items()}


def _numbers(value: Any) -> list[float]:
    value = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(value, list | tuple):
        return [number for part in value for number in _numbers(part)]
    return [float(value)] if isinstance(value, int | float) else []


def as_numbers(tensor: Tensor) -> np.ndarray[Any, np.dtype[np.float64]] | None:
    """Read a tensor's values; None for a type without a NumPy counterpart.

    >>> as_numbers(Tensor("w", "(1,) torch.bfloat16", bytes([0x80, 0x3F])))
    array([1.])
    """
    kind = tensor.kind.rpartition(" ")[2].removeprefix("torch.")
    if kind == "bfloat16":
        wide = np.frombuffer(tensor.data, np.uint16).astype(np.uint32) << 16
        return wide.view(np.float32).astype(np.float64)
    try:
        dtype = np.dtype({"int": "int64", "float": "float64"}.get(kind, kind))
    except TypeError:
        return None
    if dtype.kind == "c":
        dtype = np.dtype(f"float{dtype.itemsize * 4}")
    return np.frombuffer(tensor.data, dtype).astype(np.float64)
