"""Every command of examples/README.md, as a newcomer runs it: no argument, no download."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tests.limits import START_S
from tests.process.scripts import DUOKA_RUN, PYTHON, Run

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "examples" / "README.md"
pytestmark = [pytest.mark.torch, pytest.mark.tensorflow, pytest.mark.timeout(4 * START_S)]
SETTINGS = dict.fromkeys(("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS"), "1") | {
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "CUDA_VISIBLE_DEVICES": "",
}
ELSEWHERE = {"python examples/demo.py"}  # test_examples.py runs it on a reduced setting
OTHER_BACKEND = {  # TensorFlow takes half a minute to compile MobileNetV2; mobilenet_mnist_loop does it
    f"duoka run --devices 2 examples/{name}/after.py": {"KERAS_BACKEND": "torch"}
    for name in ("mobilenet_mnist_keras", "cats_and_dogs")
}


def commands() -> list[str]:
    return re.findall(r"^\| .* \| `([^`]+)` \|$", PAGE.read_text(), re.MULTILINE)


def test_the_page_has_a_command_for_every_example():
    folders = {path.name for path in (ROOT / "examples").iterdir() if path.is_dir() and path.name != "__pycache__"}
    shown = {Path(command.split()[-1]).parent.name for command in commands()}
    assert shown == folders | {"examples"}


@pytest.mark.parametrize("command", sorted(set(commands()) - ELSEWHERE))
def test_a_command_of_the_page_runs_as_printed(tmp_path, command):
    words = shlex.split(command)
    program = DUOKA_RUN if words[:2] == ["duoka", "run"] else PYTHON
    options = words[len(("duoka", "run")) : -1] if program is DUOKA_RUN else []
    files = tmp_path / "files"  # what the examples save goes here
    files.mkdir()
    words = [*program, *options, str(ROOT / words[-1])]
    going = Run(tmp_path, words, SETTINGS | OTHER_BACKEND.get(command, {}), cwd=files)
    ended = going.finish(2 * START_S, leaves=[""])  # frameworks and scripts write temporary files
    assert ended.code == 0, ended.out + ended.err
    results = [line for line in ended.out.splitlines() if not line.startswith("data:")]
    assert re.search(r"\d", "\n".join(results)), "an example prints its results"
    assert not re.search(r"\b(nan|inf)\b", ended.out), ended.out
