"""Launches of the mission's scripts: real processes, with the facts that each worker prints."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.limits import START_S
from tests.process.scripts import DUOKA_RUN, PYTHON, Run

SCRIPTS = Path(__file__).parent / "scripts"
LIMIT_S = 4 * START_S
"""A launch starts up to eight workers, and each imports a framework."""
QUIET = dict.fromkeys(("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS"), "1") | {
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "CUDA_VISIBLE_DEVICES": "",
    "KERAS_BACKEND": "tensorflow",
    "XLA_FLAGS": "--xla_backend_optimization_level=0",  # each worker compiles a step of JAX that runs twenty times
}


@dataclass(frozen=True)
class Launch:
    """A launch that has ended well: facts by worker, and everything on its screen."""

    facts: list[dict[str, Any]]
    out: str
    err: str

    @property
    def screen(self) -> str:
        return self.out + self.err

    def of(self, name: str) -> list[Any]:
        """One scenario's facts, by worker."""
        return [facts[name] for facts in self.facts]


def launch(
    directory: Path,
    script: str,
    *options: str,
    num_workers: int = 1,
    backend: str = "tensorflow",
) -> Launch:
    """Run a script as `python script.py`, or with options as `duoka run options script.py`."""
    program = (*DUOKA_RUN, *options) if options else PYTHON
    run = Run(directory, [*program, str(SCRIPTS / script)], env=QUIET | {"KERAS_BACKEND": backend})
    ended = run.finish(LIMIT_S, leaves=[""])  # frameworks and scripts write temporary files
    assert ended.code == 0, ended.err[-4000:]
    lines = [line.partition("FACTS ")[2] for line in ended.out.splitlines() if "FACTS " in line]
    facts = sorted(map(json.loads, lines), key=lambda each: each["worker"])
    assert [each["worker"] for each in facts] == list(range(num_workers)), ended.err[-4000:]
    return Launch(facts, ended.out, ended.err)
