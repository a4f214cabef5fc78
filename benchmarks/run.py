"""Every claim of the README, measured again: `make bench`. Writes benchmarks/RESULTS.md."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent


def run(name: str) -> dict:
    """Run one benchmark by itself, show what it prints, and return its numbers."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "numbers.json"
        environ = os.environ | {"DUOKA_BENCH_JSON": str(path)}
        subprocess.run([sys.executable, str(HERE / name)], env=environ, cwd=folder, check=True)
        return json.loads(path.read_text())


def table(rows: list[tuple[str, str, str, bool]]) -> str:
    lines = ["| what | asked | measured | |", "|---|---|---|---|"]
    lines += [
        f"| {what} | {asked} | {measured} | {'yes' if met else '**no**'} |" for what, asked, measured, met in rows
    ]
    return "\n".join(lines)


def at_least(what: str, asked: float, measured: float) -> tuple[str, str, str, bool]:
    return what, f">= {asked:g}x", f"{measured:.1f}x", measured >= asked


def at_most(what: str, asked: float, measured: float) -> tuple[str, str, str, bool]:
    return what, f"<= {asked:g}x", f"{measured:.2f}x", measured <= asked


def main() -> None:
    numbers = run("all_reduce.py") | run("startup.py") | run("imports.py")
    reduce, startup = numbers["all_reduce_us"], numbers["startup_s"]
    rows = [at_least("all_reduce, 4 KB, handed-out buffer, against Gloo", 3, _times(reduce["4 KB"], "shared"))]
    for size in ("1 MB", "4 MB", "25 MB", "100 MB"):
        rows.append(at_least(f"the same, {size}", 4, _times(reduce[size], "shared")))
    for size in ("1 MB", "4 MB", "25 MB", "100 MB"):
        rows.append(
            at_least(
                f"all_reduce, {size}, any array (copied in and out), against Gloo", 2, _times(reduce[size], "array")
            )
        )
    for size in ("25 MB", "100 MB"):
        row = reduce[size]
        rows.append(at_most(f"{size}, result stays shared, in libc memcpys", 1.0, row["shared"] / row["memcpy"]))
        rows.append(at_most(f"{size}, private result, in libc memcpys", 1.4, row["private"] / row["memcpy"]))
        rows.append(at_most(f"{size}, private result, in PyTorch copies (copy_)", 1.4, row["private"] / row["copy_"]))
    rows.append(
        at_most(
            "start-up to the first barrier, `duoka run`, against torchrun",
            0.75,
            startup["duoka run"] / startup["torchrun"],
        )
    )
    rows.append(("`import duoka`", "< 100 ms", f"{numbers['import_ms']:.0f} ms", numbers["import_ms"] < 100))
    rows.append(
        ("`duoka devices`, whole command", "< 300 ms", f"{numbers['devices_ms']:.0f} ms", numbers["devices_ms"] < 300)
    )
    text = "\n\n".join([
        "# Measured by `make bench`",
        f"{_machine()}. CPU only: no GPU was there. Two workers, one thread each; medians; contestants take turns.",
        table(rows),
        "## All-reduce of float32, two workers, microseconds",
        _all_reduce_table(reduce),
        f"Barrier: {numbers['barrier_us']['duoka']:.0f} us, Gloo {numbers['barrier_us']['gloo']:.0f} us.",
        "## Start-up: two workers, PyTorch imported, first barrier passed",
        "\n".join(["| launcher | seconds |", "|---|---|", *(f"| {who} | {s:.2f} |" for who, s in startup.items())]),
        NOTES,
    ])  # fmt: skip
    (HERE / "RESULTS.md").write_text(text + "\n")
    print(f"\n{table(rows)}\n\nwritten to benchmarks/RESULTS.md")


NOTES = """## Notes

- `memcpy` is libc's (through NumPy), which writes around the cache; `copy_` is PyTorch's own copy loop, which does
  not. Both workers copy at once.
- Where the private result costs more than 1.4 libc memcpys: one core of this machine reads about 12.5 GB/s and writes
  about 10 GB/s. Adding up half of the buffer is bound by reading, copying the result out by writing, and without
  code of our own that does both at once the two times add up. Tried, and slower or equal: copying each piece out
  while it lies in the cache; every worker adding up everything straight into its own memory; adding into a small
  buffer and copying from there."""


def _times(row: dict, kind: str) -> float:
    return row["gloo"] / row[kind]


def _all_reduce_table(reduce: dict) -> str:
    kinds = ["gloo", "shared", "private", "array", "memcpy", "copy_"]
    lines = ["| size | " + " | ".join(kinds) + " |", "|---" * (len(kinds) + 1) + "|"]
    lines += [f"| {size} | " + " | ".join(f"{row[kind]:,.0f}" for kind in kinds) + " |" for size, row in reduce.items()]
    return "\n".join(lines)


def _machine() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    return (
        f"{model}, {os.cpu_count()} cores, Linux {platform.release().split('-')[0]}, Python {platform.python_version()}"
    )


main()
