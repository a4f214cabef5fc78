"""Keras's old names on real workers, and the page about Keras."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest

import duoka.keras
from duoka.errors import DeviceError, MismatchError
from tests.limits import START_S
from tests.process.scripts import DUOKA_RUN, start

SCRIPT = Path(__file__).parent / "keras_borrowed.py"
PAGE = Path(__file__).parents[2] / "docs" / "keras.md"
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS"), "1")
BACKENDS = [
    pytest.param("torch", marks=pytest.mark.torch),
    *(pytest.param(name, marks=[getattr(pytest.mark, name), pytest.mark.slow]) for name in ("tensorflow", "jax")),
]


def run(directory: Path, backend: str, *options: str) -> tuple[dict, str]:
    """What the script reported, and what Duoka said. It is started as users start it: by Python alone."""
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(directory / "model.keras"), *options],
        capture_output=True,
        text=True,
        timeout=280,
        cwd=directory,
        env=os.environ | ONE_THREAD | {"KERAS_BACKEND": backend},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("{")]  # equal on all workers: shown once
    return json.loads(line), done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_multi_gpu_model_shares_the_batch_and_the_original_keeps_the_weights(tmp_path, backend):
    ours, said = run(tmp_path, backend)
    plain, _ = run(tmp_path, backend, "--plain")
    assert ours["is_lazy"] and ours["is_the_original"]
    assert "devices=2 uses 2 virtual CPU devices" in said and "2 replicas on 2 workers" in said
    if backend == "torch":  # where every call of a layer can be seen
        assert min(ours["rows"]) == 16 and plain["rows"] == [32]
    for name in ("weights", "predicted", "evaluated"):
        for a, b in zip(ours[name], plain[name], strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    assert ours["history"].keys() == plain["history"].keys()
    for name, values in plain["history"].items():
        assert ours["history"][name] == pytest.approx(values, rel=1e-5)
    # A process without workers has read the file, and computes the same with it.
    np.testing.assert_allclose(plain["saved"], ours["predicted"], rtol=1e-5, atol=1e-6)
    with zipfile.ZipFile(tmp_path / "model.keras") as file:
        assert not [name for name in file.namelist() if b"duoka" in file.read(name)]


@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.parametrize("option", ["--names", "--compile"])
def test_old_lists_of_devices_and_one_call_of_compile_train_alike(tmp_path, option):
    (ours, said), (other, _) = run(tmp_path, "torch", option), run(tmp_path, "torch")
    assert ours["weights"] == other["weights"] and ours["history"] == other["history"]
    if option == "--names":
        assert "gpu:1 is not here: cpu:0/v1, a virtual CPU device, takes its place" in said


def test_numbers_in_a_list_are_gpus_and_names_stay_as_they_are():
    read = duoka.keras._read_gpus
    assert read([0, np.int64(3)]) == ["gpu:0", "gpu:3"]
    assert read(range(2)) == ["gpu:0", "gpu:1"]
    assert read(("gpu(0)", "/gpu:1")) == ["gpu(0)", "/gpu:1"]
    assert (read(None), read(4), read("cuda:0,cuda:1")) == (None, 4, "cuda:0,cuda:1")
    with pytest.raises(DeviceError, match="True is not a GPU"):
        read([True])


def test_what_is_no_keras_model_is_refused_before_anything_is_started():
    for thing in ("model", None, np.zeros(3)):
        with pytest.raises(MismatchError, match="multi_gpu_model was given a"):
            duoka.keras.multi_gpu_model(thing, gpus=2)


def test_borrowed_names_do_not_import_keras():
    code = "import sys, duoka.keras; print(not {'keras', 'tensorflow', 'torch', 'jax'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=START_S)
    assert done.stdout == "True\n"


# The page.


@pytest.mark.torch
@pytest.mark.slow
def test_the_page_about_keras_runs_from_top_to_bottom(tmp_path):
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    assert len(blocks) >= 8
    facts = """
import json
print(json.dumps({"step": strategy.step, "words": words, "right": float((predicted == y).mean()),
                  "history": history.history}), flush=True)
"""
    script = "\n".join(["import os, sys; os.chdir(sys.argv[1])", *blocks, facts])
    program = [*DUOKA_RUN, "--devices", "2", "--replicas", "4"]
    environ = ONE_THREAD | {"KERAS_BACKEND": "torch", "TF_CPP_MIN_LOG_LEVEL": "3"}
    directory = tmp_path / "files"
    directory.mkdir()
    ended = start(tmp_path, script, str(directory), program=program, env=environ).finish(300, leaves=["torchinductor_"])
    assert ended.code == 0, ended.err
    first, second = ended.facts().values()
    assert first == second
    epochs = len(first["history"]["loss"])
    assert first["step"] == 10 * (3 + epochs) + 13 * 4 and first["right"] > 0.8
    assert first["words"] == "downloaded once"
    files = sorted(path.name for path in directory.iterdir())
    assert files == ["best.keras", "log.csv", "old.weights.h5", "trained.keras", "words.txt"]
    assert (directory / "log.csv").read_text().count("\n") == 1 + epochs  # written once
    assert ended.out.count("Epoch 1/3") == 1 and len(re.findall(r"^epoch 0: loss", ended.out, re.MULTILINE)) == 1


def test_every_error_that_the_page_names_exists():
    named = re.findall(r"^\| `([^`]+)` \|", PAGE.read_text().partition("## Errors")[2], re.MULTILINE)
    assert len(named) >= 10
    source = "".join(path.read_text() for path in (PAGE.parents[1] / "src").rglob("*.py"))
    said = re.sub(r'"\s*\n\s*f?"', "", source)  # strings that go on in the next line
    assert [text for text in named if text not in said] == []
