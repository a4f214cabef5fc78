"""What it costs to have Duoka around: `import duoka`, and the whole `duoka devices` command.

    python benchmarks/imports.py               (part of: make bench)

The import is timed above a bare interpreter.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

REPETITIONS = 15


def median_ms(words: list[str]) -> float:
    times = []
    for _ in range(REPETITIONS):
        begin = time.perf_counter()
        subprocess.run([sys.executable, *words], check=True, stdout=subprocess.DEVNULL)
        times.append(time.perf_counter() - begin)
    return statistics.median(times) * 1e3


def main() -> None:
    bare = median_ms(["-c", "pass"])
    numbers = {
        "import_ms": median_ms(["-c", "import duoka"]) - bare,
        "devices_ms": median_ms(["-m", "duoka", "devices"]),
    }
    print(
        f"import duoka: {numbers['import_ms']:.1f} ms above {bare:.1f} ms bare;"
        f" duoka devices: {numbers['devices_ms']:.0f} ms"
    )
    if "DUOKA_BENCH_JSON" in os.environ:
        Path(os.environ["DUOKA_BENCH_JSON"]).write_text(json.dumps(numbers))


main()
