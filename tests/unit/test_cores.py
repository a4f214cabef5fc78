"""Workers that take all cores together keep to their own; children of theirs, and runs that leave some, do not."""

import os
import subprocess
import sys

import pytest

CORES = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [0]
needs_two = pytest.mark.skipif(len(CORES) < 2, reason="needs two cores")

SHOW = """
import os, sys
from duoka.devices.cores import keep_to_own_cores

worker, num_workers, threads = map(int, sys.argv[1:])
print(keep_to_own_cores(worker, num_workers, threads, dict(os.environ)), flush=True)
print(*sorted(os.sched_getaffinity(0)), flush=True)
if os.fork() == 0:
    print(*sorted(os.sched_getaffinity(0)), flush=True)
    os._exit(0)
os.wait()
"""


def cores_of(worker: int, num_workers: int, threads: int, **environ: str) -> list[str]:
    words = [str(number) for number in (worker, num_workers, threads)]
    done = subprocess.run(
        [sys.executable, "-c", SHOW, *words], capture_output=True, text=True, check=True, env=os.environ | environ
    )
    return done.stdout.splitlines()


def named(cores: list[int]) -> str:
    return " ".join(map(str, cores))


@needs_two
def test_each_worker_has_a_core_of_its_own_and_its_children_have_all():
    for worker, core in enumerate(CORES):
        assert cores_of(worker, len(CORES), 1) == ["True", str(core), named(CORES)]


@needs_two
def test_where_cores_are_left_over_the_kernel_decides():
    assert cores_of(0, 1, len(CORES)) == ["False", named(CORES), named(CORES)]
    assert cores_of(0, len(CORES) + 1, 1)[0] == "False"


@needs_two
def test_settings_of_the_users_own_win():
    assert cores_of(0, len(CORES), 1, OMP_PROC_BIND="false")[0] == "False"


THREAD = """
import os, threading
from duoka.devices.cores import count_all_cores, keep_to_own_cores, on_all_cores

keep_to_own_cores(1, len(os.sched_getaffinity(0)), 1, {})
begun, done = threading.Event(), threading.Event()
thread = threading.Thread(target=lambda: (begun.set(), done.wait(10)))
with on_all_cores():
    thread.start()
    begun.wait(10)
print(*sorted(os.sched_getaffinity(thread.native_id)))
print(*sorted(os.sched_getaffinity(0)))
print(count_all_cores())
done.set()
"""


@needs_two
def test_a_thread_that_is_started_on_all_cores_stays_there_and_its_starter_does_not():
    done = subprocess.run([sys.executable, "-c", THREAD], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [named(CORES), str(CORES[1]), str(len(CORES))]
