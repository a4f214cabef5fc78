"""A real memory limit for a CPU worker, and its translation when it is met."""

from __future__ import annotations

import errno
import resource
from collections.abc import Iterator
from pathlib import Path

from duoka.devices.device import MB, Device
from duoka.errors import DeviceError, OutOfMemory

# What the frameworks say when memory is used up; their exception types cannot be imported here.
_TYPE_NAMES = {"OutOfMemoryError", "ResourceExhaustedError"}
_TEXTS = (
    "DefaultCPUAllocator:",  # PyTorch, a RuntimeError
    "CUDA out of memory",
    "OOM when allocating",  # TensorFlow
    "exception:Status: 1,",  # TensorFlow's oneDNN kernels, an AbortedError: 1 is dnnl_out_of_memory
    "RESOURCE_EXHAUSTED",  # JAX, a ValueError or XlaRuntimeError
    "Out of memory allocating",
    "std::bad_alloc",
)
# What a process writes last when C++ code that cannot raise runs out of memory, and aborts.
_LAST_WORDS = (*_TEXTS, "MemoryError", "Cannot allocate memory", "pthread_create() failed")

_soft_limit_before: int | None = None


def limit_memory(limit_mb: int, status: Path = Path("/proc/self/status")) -> None:
    """Let this process take ``limit_mb`` more than it has now; beyond that, allocations fail.

    Call it once the framework has started: TensorFlow crashes if its own start meets the limit.
    Counted is what is reserved, used or not: a new thread's stack counts in full. Memory that was
    already reserved and lies free in the process's own heap is not counted again.
    """
    global _soft_limit_before
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if _soft_limit_before is None:
        _soft_limit_before = soft
    wanted = _read_data_bytes(status) + limit_mb * MB
    resource.setrlimit(resource.RLIMIT_DATA, (_smallest(wanted, _soft_limit_before, hard), hard))


def lift() -> None:
    """Take the limit away again. Do so before reporting an error: a report needs memory, too."""
    global _soft_limit_before
    if _soft_limit_before is not None:
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (_soft_limit_before, hard))
        _soft_limit_before = None


def explain(error: BaseException, device: Device) -> OutOfMemory | None:
    """Our out-of-memory error, naming the device and its limit; None if ``error`` is something else.

    What caused the error, or was being handled when it was raised, is looked at as well.
    """
    if device.memory_limit_mb is None:
        return None
    for reason in _follow_causes(error):
        if _is_out_of_memory(reason):
            lines = str(reason).strip().splitlines() or [type(reason).__name__]
            return _tell(device, next((line for line in lines if _speaks_of_memory(line)), lines[0]))
    return None


def explain_death(last_words: str, device: Device) -> OutOfMemory | None:
    """Like `explain`, for a worker that could not raise: from the end of what it wrote before it died.

    TensorFlow and JAX abort (SIGABRT) when one of their threads, and not an operation, finds no memory.
    """
    if device.memory_limit_mb is None:
        return None
    for line in reversed(last_words.splitlines()):
        if any(phrase in line for phrase in _LAST_WORDS):
            return _tell(device, line)
    return None


def _tell(device: Device, said: str) -> OutOfMemory:
    return OutOfMemory(
        f"{device} has used up its {device.memory_limit_mb} MB of memory.",
        why="the limit was set with memory_mb, memory_limit_mb or memory_fraction; the allocation that failed said:"
        f" {said.strip()[:300]}",
        do="raise memory_mb for this device, or what the strategy was given, or use a smaller batch or more replicas.",
    )


def _follow_causes(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = current.__cause__ or (None if current.__suppress_context__ else current.__context__)


def _is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, MemoryError) or type(error).__name__ in _TYPE_NAMES:
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return _speaks_of_memory(str(error))


def _speaks_of_memory(text: str) -> bool:
    return any(phrase in text for phrase in _TEXTS)


def _read_data_bytes(status: Path) -> int:
    """Bytes of private writable memory, the amount RLIMIT_DATA is compared with."""
    try:
        for line in status.read_text().splitlines():
            if line.startswith("VmData:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    raise DeviceError(
        "a memory limit on a CPU device cannot be set here.",
        why=f"it needs Linux: {status} does not say how much memory this process has.",
        do="leave memory_mb out for CPU devices.",
    )


def _smallest(*limits: int) -> int:
    finite = [limit for limit in limits if limit != resource.RLIM_INFINITY]
    return min(finite, default=resource.RLIM_INFINITY)
