"""A heap that keeps what was freed: pages that were touched once are not touched anew."""

import subprocess
import sys

from duoka.devices.heap import keep_freed_memory

COUNT_FAULTS = """
import resource, sys
import numpy as np
from duoka.devices.heap import keep_freed_memory

if "keep" in sys.argv:
    assert keep_freed_memory({})
faults = []
for _ in range(6):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    np.ones(64 * 2**20, np.uint8)  # made, and freed at once
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(faults[-1])
"""


def faults_of_the_last_round(*words: str) -> int:
    return int(subprocess.run([sys.executable, "-c", COUNT_FAULTS, *words], capture_output=True, text=True).stdout)


def test_memory_that_was_freed_is_used_again_without_page_faults():
    assert faults_of_the_last_round("keep") * 10 < faults_of_the_last_round()


def test_settings_of_the_users_own_win():
    assert not keep_freed_memory({"MALLOC_ARENA_MAX": "2"})
    assert not keep_freed_memory({"GLIBC_TUNABLES": "glibc.malloc.arena_max=2"})
