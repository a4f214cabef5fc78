"""The heap of a worker on a CPU: memory that was freed is kept for the next step."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping

# From malloc.h of the GNU C library.
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX = -1, -2, -4
_GROWTH_BYTES = 64 * 2**20


def keep_freed_memory(environ: Mapping[str, str] = os.environ) -> bool:
    """Let malloc neither map large blocks one by one nor give them back: every step needs them again.

    Fresh pages are zeroed by the kernel, one fault each. Says whether it was done: other C libraries have no such
    dial, and the user's own settings win.
    """
    if any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in environ):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(_MMAP_MAX, 0) and mallopt(_TRIM_THRESHOLD, 2**31 - 1) and mallopt(_TOP_PAD, _GROWTH_BYTES))
