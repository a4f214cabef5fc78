"""What the promise of equal bits depends on, beside the run itself."""

from __future__ import annotations

import platform
import sys

from duoka.devices.device import Device

_LIBRARIES = ("torch", "tensorflow", "jax", "keras", "numpy")


def take_fingerprint(device: Device, threads: int) -> dict[str, str]:
    """Processor or card, the versions of the libraries in use, threads, flags: to be compared, and read by people."""
    libraries = {name: sys.modules.get(name) for name in _LIBRARIES}
    versions = {name: str(getattr(module, "__version__", "?")) for name, module in libraries.items() if module}
    return versions | {
        "device": f"{device.kind}: {device.title or platform.processor() or 'unknown'}",
        "machine": platform.machine(),
        "python": platform.python_version(),
        "threads": str(threads),
    }
