"""A memory limit on a CPU device is real, and what the framework says about it becomes our error."""

import json
import subprocess
import sys

import pytest

from duoka.devices.device import Device
from duoka.devices.memory_limit import explain, explain_death
from duoka.errors import OutOfMemory
from tests.limits import START_S

LIMIT_MB = 256
PIECE_MB = 16
LIMITED = Device("cpu", 0, virtual=1, memory_limit_mb=LIMIT_MB)

MAKERS = {
    "numpy": "import numpy\ndef make(n): return numpy.ones(n, numpy.float32)",
    "torch": "import torch\ndef make(n): return torch.ones(n)",
    "tensorflow": "import tensorflow\ndef make(n): return tensorflow.ones([n])",
    "jax": "import jax.numpy\ndef make(n): return jax.numpy.ones(n).block_until_ready()",
}
STORY = f"""
import json, resource
from duoka.devices.device import Device
from duoka.devices.memory_limit import explain, lift, limit_memory

before = resource.getrlimit(resource.RLIMIT_DATA)
make(16)
limit_memory({LIMIT_MB})
kept, error = [], None
try:
    while len(kept) < 100:
        kept.append(make({PIECE_MB} * 2**18))
except BaseException as caught:
    error = caught
lift()
told = None if error is None else explain(error, Device("cpu", 0, virtual=1, memory_limit_mb={LIMIT_MB}))
kept += [make({PIECE_MB} * 2**18) for _ in range(4)]
print(json.dumps({{
    "reached_mb": (len(kept) - 4) * {PIECE_MB},
    "error": type(error).__name__,
    "told": [type(told).__name__, str(told)],
    "is_restored": resource.getrlimit(resource.RLIMIT_DATA) == before,
}}))
"""


@pytest.mark.parametrize(
    "framework",
    [
        "numpy",
        pytest.param("torch", marks=pytest.mark.torch),
        pytest.param("tensorflow", marks=[pytest.mark.tensorflow, pytest.mark.slow]),
        pytest.param("jax", marks=pytest.mark.jax),
    ],
)
def test_allocating_past_the_limit_raises_near_it_and_is_translated(framework):
    done = subprocess.run(
        [sys.executable, "-c", MAKERS[framework] + STORY], capture_output=True, text=True, timeout=START_S
    )
    assert done.returncode == 0, done.stderr[-2000:]
    outcome = json.loads(done.stdout.splitlines()[-1])
    assert outcome["told"][0] == "OutOfMemory", outcome
    assert "cpu:0/v1" in outcome["told"][1] and f"{LIMIT_MB} MB" in outcome["told"][1]
    assert 0.6 * LIMIT_MB <= outcome["reached_mb"] <= 1.1 * LIMIT_MB, outcome
    assert outcome["is_restored"]


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: ..."),
        RuntimeError("std::bad_alloc"),
        RuntimeError("Operation received an exception:Status: 1, message: could not create a primitive"),
        ValueError("RESOURCE_EXHAUSTED: Out of memory allocating 16777216 bytes."),
        type("ResourceExhaustedError", (Exception,), {})("OOM when allocating tensor with shape[4194304]"),
        OSError(12, "Cannot allocate memory"),
    ],
)
def test_every_way_of_saying_out_of_memory_names_the_device_and_its_limit(error):
    told = explain(error, LIMITED)
    assert isinstance(told, OutOfMemory)
    assert "cpu:0/v1" in told.what and "256 MB" in told.what


def test_an_error_that_was_caused_by_running_out_of_memory_is_explained():
    def fail(hidden=False):
        try:
            raise MemoryError
        except MemoryError as cause:
            if hidden:
                raise KeyError("a step failed") from None
            raise KeyError("a step failed") from cause

    with pytest.raises(KeyError) as caught:
        fail()
    assert explain(caught.value, LIMITED) is not None
    with pytest.raises(KeyError) as caught:
        fail(hidden=True)
    assert explain(caught.value, LIMITED) is None


def test_other_errors_and_devices_without_a_limit_are_left_alone():
    assert explain(ValueError("shapes differ"), LIMITED) is None
    assert explain(OSError(2, "No such file"), LIMITED) is None
    assert explain(MemoryError(), Device("cpu", 0)) is None


def test_errors_that_cause_each_other_in_a_circle_do_not_hang_the_explanation():
    one, other = ValueError("one"), ValueError("other")
    one.__cause__, other.__cause__ = other, one
    assert explain(one, LIMITED) is None


def test_the_last_words_of_a_worker_that_aborted_are_explained_if_they_speak_of_memory():
    words = "step 3\nterminate called after throwing an instance of 'std::bad_alloc'\n  what():  std::bad_alloc\n"
    told = explain_death(words, LIMITED)
    assert isinstance(told, OutOfMemory)
    assert "cpu:0/v1" in told.what and "256 MB" in told.what
    assert explain_death("Segmentation fault", LIMITED) is None
    assert explain_death(words, Device("cpu", 0)) is None
