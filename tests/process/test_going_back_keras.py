"""A worker of `fit` lost in a step that exchanges in its middle: all start anew, from a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.limits import START_S
from tests.process.scripts import PYTHON, Ended, Run

pytestmark = [pytest.mark.slow]
SCRIPT = Path(__file__).with_name("keras_going_back.py")
LEAVES = ("torchinductor", "__autograph_generated_file")
WHO = "worker {0} (cpu:0/v{0}) was lost at step {1}, which cannot be done again; all workers start anew, "
CASES = [
    pytest.param(backend, kind, marks=getattr(pytest.mark, backend))
    for backend in ("torch", "jax", "tensorflow")
    for kind in ("batchnorm", "twice")
]


def train(place: Path, backend: str, **given) -> Ended:
    (place / "work").mkdir(parents=True)
    words = [*PYTHON, str(SCRIPT), json.dumps(given | {"folder": str(place)})]
    return Run(place / "work", words, env={"KERAS_BACKEND": backend}).finish(START_S, LEAVES)


@pytest.mark.parametrize("backend, kind", CASES)
def test_a_fit_that_loses_workers_mid_step_goes_back_to_the_bits_of_a_calm_one(backend, kind, tmp_path):
    calm = train(tmp_path / "calm", backend, kind=kind)
    assert calm.code == 0 and len(calm.facts()) == 2, calm.err[-3000:]
    # Before anything is saved; then worker 0, which saves, in a later epoch.
    place = tmp_path / "struck"
    struck = train(place, backend, kind=kind, every=4, strikes=[[1, 2], [0, 9]])
    assert struck.code == 0, struck.err[-3000:]
    assert len(list(place.glob("struck-*"))) == 2
    assert [line for line in struck.said() if "start anew" in line] == [
        WHO.format(1, 2) + "from the beginning, because there is no checkpoint yet (1 of at most 3 times).",
        WHO.format(0, 9) + "and go back to the checkpoint of step 8 (2 of at most 3 times).",
    ]
    assert struck.facts() == calm.facts()
    assert struck.log(0).count("life") == 3 and "Traceback" not in struck.err
