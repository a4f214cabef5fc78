"""What tests take for left behind in shared memory."""

from __future__ import annotations

import subprocess
import sys
from multiprocessing.shared_memory import SharedMemory

from tests.abandoned import list_abandoned

LEAVE = """
from multiprocessing import resource_tracker, shared_memory
shared = shared_memory.SharedMemory(create=True, size=100)
resource_tracker.unregister(shared._name, "shared_memory")
print(shared.name)
"""


def test_memory_of_a_process_that_has_ended_is_abandoned():
    name = subprocess.run([sys.executable, "-c", LEAVE], capture_output=True, text=True, check=True).stdout.strip()
    assert name in list_abandoned()
    left = SharedMemory(name)
    left.close()
    left.unlink()
    assert name not in list_abandoned()


def test_memory_that_a_living_process_has_is_not():
    shared = SharedMemory(create=True, size=100)
    try:
        assert shared.name not in list_abandoned()
    finally:
        shared.close()
        shared.unlink()
