"""A memory limit of a virtual CPU device is real: whoever passes it is told so by name, and the others are stopped."""

from __future__ import annotations

import pytest

from tests.process.scripts import run

LIMITED = """
import ctypes, os, sys, time
{imports}
import duoka
strategy = duoka.Mirrored(devices=duoka.virtual_devices("cpu:0", memory_mb=[256, 256]), deadline_s=30)
{enough}
strategy.barrier()
print("started", flush=True)
if strategy.worker == 1:
    {too_much}
strategy.barrier()
print("this must not be reached")
"""


def check(ended, worker: int = 1) -> None:
    assert ended.code == 69, ended.err
    assert f"OutOfMemory: cpu:0/v{worker} has used up its 256 MB of memory." in ended.err
    assert "  do   raise memory_mb for this device" in ended.err
    assert "started" in ended.out and "this must not be reached" not in ended.out
    assert ended.err.count("OutOfMemory: ") == 1


@pytest.mark.parametrize(
    "framework",
    [
        pytest.param(("import numpy", "kept = numpy.ones({mb} * 2**17)"), id="numpy"),
        pytest.param(("import torch", "kept = torch.ones({mb} * 2**18)"), id="torch", marks=pytest.mark.torch),
    ],
)
def test_the_worker_that_passes_its_limit_is_named_and_the_others_are_stopped(tmp_path, framework):
    imports, make = framework
    source = LIMITED.format(imports=imports, enough=make.format(mb=150), too_much=make.format(mb=300))
    ended = run(tmp_path, source)
    check(ended)
    assert "1 worker stopped because worker 1 (cpu:0/v1) failed:" in ended.said()
    assert "The above exception was the direct cause" in ended.err  # the framework's own words come first


def test_many_small_pieces_count_and_the_report_still_finds_memory(tmp_path):
    too_much = "kept = []\n    while True: kept.append(bytearray(2**16))"
    check(run(tmp_path, LIMITED.format(imports="", enough="", too_much=too_much)))


def test_an_abort_of_native_code_for_want_of_memory_is_explained_and_not_a_loss(tmp_path):
    too_much = "ctypes.CDLL('libstdc++.so.6')._Znwm(ctypes.c_size_t(2**30))  # operator new"
    ended = run(tmp_path, LIMITED.format(imports="", enough="", too_much=too_much))
    check(ended)
    assert "std::bad_alloc" in ended.err
    assert "was ended by" not in ended.err


def test_a_death_that_has_nothing_to_do_with_memory_is_still_a_loss(tmp_path):
    ended = run(tmp_path, LIMITED.format(imports="", enough="", too_much="ctypes.string_at(0)"))
    assert ended.code == 0
    assert ended.said() == ["worker 1 (cpu:0/v1) was ended by SIGSEGV; 1 worker goes on (generation 1)."]
    assert "OutOfMemory" not in ended.err


def test_shared_buffers_do_not_count_against_the_limit_of_a_worker(tmp_path):
    source = """
        import duoka
        import numpy
        strategy = duoka.Mirrored(devices=duoka.virtual_devices("cpu:0", memory_mb=[256, 256]), replicas=4)
        ones = numpy.broadcast_to(numpy.float32(1), 100 * 2**18)  # 100 MB each, 400 MB shared
        result = strategy.sum_over_replicas(lambda replica: ones)
        strategy.print(float(result[-1]), result.nbytes // 2**20)
        """
    ended = run(tmp_path, source)
    assert (ended.code, ended.out) == (0, "4.0 100\n"), ended.err


def test_a_single_limited_device_is_explained_as_well(tmp_path):
    source = """
        import duoka
        import numpy
        strategy = duoka.Mirrored(devices=duoka.virtual_devices("cpu:0", memory_mb=256))
        print("started", strategy.num_workers, flush=True)
        numpy.ones(2**28)
        """
    ended = run(tmp_path, source)
    check(ended, worker=0)
    assert ended.said() == ["worker 0 (cpu:0/v0) failed:"]
