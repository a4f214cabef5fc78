"""Every claim of the README, measured again: `make bench`. Writes benchmarks/RESULTS.md and the table of README.md.

    python benchmarks/run.py [keras_step.py ...]
    python benchmarks/run.py "keras_reuters_course.py --data ~/.keras/datasets"

With names, only these are measured again, and the numbers of the others are those of benchmarks/numbers.json.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parent


NUMBERS = HERE / "numbers.json"
README = HERE.parent / "README.md"
BENCHMARKS = (
    "all_reduce.py",
    "torch_step.py",
    "torch_overhead.py",
    "checkpoint_stall.py",
    "startup.py",
    "imports.py",
    "keras_step.py",
    "keras_overhead.py",
    "keras_folder.py",
    "tensorflow_step.py",
    "equality_check.py",
    "recovery_pause.py",
)


def measure(names: list[str]) -> dict:
    """Run these one after the other. What one has found is kept at once: the next one may be interrupted."""
    known = json.loads(NUMBERS.read_text()) if NUMBERS.exists() else {}
    for name, *words in map(str.split, names):
        known[name] = {"on": time.strftime("%Y-%m-%d"), "machine": _machine(), "numbers": run(name, words)}
        NUMBERS.write_text(json.dumps(known, indent=1) + "\n")
    return known


def run(name: str, words: list[str]) -> dict:
    """Run one benchmark by itself, show what it prints, and return its numbers."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "numbers.json"
        environ = os.environ | {"DUOKA_BENCH_JSON": str(path)}
        subprocess.run([sys.executable, str(HERE / name), *words], env=environ, cwd=folder, check=True)
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
    known = measure(sys.argv[1:] or list(BENCHMARKS))
    if missing := [name for name in BENCHMARKS if name not in known]:
        raise SystemExit(f"not measured yet: {', '.join(missing)}")
    write_table(known)


def write_table(known: dict) -> None:
    numbers: dict = {}
    for found in known.values():
        numbers |= found["numbers"]
    days = sorted({found["on"] for found in known.values()})
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
    rows += _torch_rows(numbers["torch_step_ms"], numbers["torch_overhead_ms"])
    rows += _keras_rows(numbers["keras_step_ms"], numbers["keras_overhead_ms"], numbers["keras_folder_images_s"])
    rows += _course_rows(numbers["keras_course"]) if "keras_course" in numbers else []
    rows += _loop_rows(numbers["tensorflow_step_ms"])
    rows += [
        at_most(f"a save, {case}: training stands still, in libc memcpys", 2, row["stall"] / row["memcpy"])
        for case, row in numbers["checkpoint_stall_ms"].items()
    ]
    rows += _equality_rows(numbers["equality_check"])
    rows.append(_recovery_row(numbers["recovery_pause_ms"]))
    text = "\n\n".join([
        "# Measured by `make bench`",
        f"{_say_machines(known)} CPU only: no GPU was there. Two workers, one thread each; medians; contestants take"
        f" turns. Measured on {' and '.join(days)}.",
        table(rows),
        "## All-reduce of float32, two workers, microseconds",
        _all_reduce_table(reduce),
        f"Barrier: {numbers['barrier_us']['duoka']:.0f} us, Gloo {numbers['barrier_us']['gloo']:.0f} us.",
        "## One training step of PyTorch, two workers with one thread each, milliseconds",
        _torch_table(numbers["torch_step_ms"]),
        "## One step of Keras's `fit`, milliseconds, median (mean); peers with 1 and 2 threads",
        _keras_table(numbers["keras_step_ms"], numbers["keras_step_mean_ms"]),
        "## One step of a TensorFlow loop (`strategy.run` in a tf.function), milliseconds, median (mean); peers with 1"
        " and 2 threads",
        _keras_table(_on_tensorflow(numbers["tensorflow_step_ms"]), _on_tensorflow(numbers["tensorflow_step_mean_ms"])),
        "## A checkpoint, milliseconds",
        _checkpoint_table(numbers["checkpoint_stall_ms"]),
        "## Start-up: two workers, PyTorch imported, first barrier passed",
        "\n".join(["| launcher | seconds |", "|---|---|", *(f"| {who} | {s:.2f} |" for who, s in startup.items())]),
        NOTES,
    ])  # fmt: skip
    (HERE / "RESULTS.md").write_text(text + "\n")
    _put_into_readme(table(rows))
    print(f"\n{table(rows)}\n\nwritten to benchmarks/RESULTS.md and README.md")


def _put_into_readme(rows: str) -> None:
    """Between its two marks, so that no number in it is copied by hand."""
    begin, end = "<!-- written by make bench -->\n\n", "\n\n<!-- up to here -->"
    before, _, rest = README.read_text().partition(begin)
    _, _, after = rest.partition(end)
    README.write_text(before + begin + rows + end + after)


NOTES = """## Notes

- PyTorch: all contestants run in the same two processes, one thread each, with the same model, data, optimizer
  and allocator settings, in turn. `half` is the plain step on half of the batch, without any communication; `alone` the
  plain step on the whole batch on one worker, while the other one waits; `memcpy` a copy of the gradient, by both.
- Keras and TensorFlow loops: contestants live in processes of their own, which sleep until it is their turn, with the
  same model, data, optimizer and allocator settings. Duoka runs two workers with one thread each; peers run with one
  and with two threads, and the better of the two counts. Bars are judged by medians of single steps: the hypervisor of
  this machine takes a core away for up to 130 ms at a time (steal in /proc/stat, up to a quarter of the time), which
  means measure, and more where two cores have to work together; on JAX, which returns before a step is done, by medians
  of epochs. Means of the same steps are beside, in brackets.
- `half` is plain `fit` on half of each batch in two workers, without any exchange. It is not a bound (Duoka's update is
  compiled by XLA there, that of `half` is not), but it shows where the time goes: half of a batch costs more than half
  of the time. The gradients of MobileNetV2 take 212 ms for 64 rows on one core, 120 ms for 32, 132 to 148 ms where both
  cores compute 32 rows at once, and 184 ms where TensorFlow itself spreads 64 rows over both cores. The update takes
  another 20 to 29 ms in both workers, while TensorFlow alone does parts of it during backward.
- Tried, and kept: graphs called by flat lists of tensors, sums in few flat arrays, XLA for the update of models with
  few variables (4.8 to 1.6 ms for the small CNN in `fit`; a step of a loop 19.8 to 15.4 ms), rows cut by NumPy, not
  by TensorFlow (twenty times as fast), workers kept to cores of their own (16 to 12 ms), no cycles that keep tf.data
  iterators alive (stalls of 0.5 to 2 s), places in flat arrays computed once (0.3 ms), one call out of a loop's graph
  less (0.4 ms), functions that stand in for Keras's put there once for a `fit` and not for every replica (on PyTorch,
  one worker with two replicas 1.10 to 1.00), seeds looked for once (on JAX 1.12 to 1.06). Tried, and no gain: XLA for
  the update of MobileNetV2 (29 to 20 ms by itself, and nothing in a step: 183 against 190 ms), TensorFlow's
  single-threaded executor (its update 21 to 18 ms, nothing elsewhere).
- Which bars lie above `half` on this machine, and which are Duoka's own cost: MobileNetV2 at 1.4 times the better
  MirroredStrategy and the large batch of Reuters at 1.3 times the default one would have to be faster than two
  workers that exchange nothing. In the small steps (Reuters, 32 rows) the exchange takes about 3 ms: 1 ms is copying,
  adding and comparing, the rest is waiting for the slower of two workers at every step, and work that Keras otherwise
  does while the step computes (on JAX and TensorFlow, which return before it is done). A step of MobileNetV2 (147 ms,
  by cProfile): gradients 98, handing them to NumPy 5, waiting for the slower worker 10, adding up and copying 5, the
  update 20.
- JAX against DataParallel: its two devices exchange inside of one compiled program, in one process; Duoka never adds up
  inside of compiled code, because XLA changes bits there.
- The folder has 1,024 pictures of MNIST. Reading and decoding takes both cores with plain `fit`, too. Tried: every
  worker reads all, one reads for all on its own core, one reads for all with threads on all cores (the best of the
  three where decoding is heavy).
- The ResNet step takes seconds, so few are measured: its ratios vary by several percent from run to run.
- The exchange costs more than 3 memcpys here: writing a layer's gradient into shared memory (16 MB at a time) goes
  through the cache and takes about two memcpys, adding up one, copying out one. Tried, and no faster: weighing in
  pieces of the size of the cache and copying those; weighing in place and copying at once; pages lent to `p.grad` by
  copy-on-write (the others then wait for them at their next backward). What helped: saying at once that the result
  was taken (65 to 56 ms a step), one generator for all bodies, memory that malloc keeps.
- A checkpoint: `memcpy` copies as many bytes in one piece, into memory that was touched before. Everything counts from
  the call of `state_dict` until training goes on. The first time, memory for the copy is made and touched.
  The model of 10M parameters that was asked for is the MLP; ResNet-18, with 186 tensors of 9 MB at most, is measured
  beside it. How far it is from one memcpy depends on the processor: 1.7 times on an AMD EPYC, 2.2 to 2.8 times on an
  Intel Xeon, where libc writes around the cache only in larger pieces. GLIBC_TUNABLES with
  glibc.cpu.x86_non_temporal_threshold=0x80000 took it from 2.78 to 2.22 times, and the MLP from 1.9 to 1.3; Duoka does
  not set it, as it changes every memcpy of a script.
  Tried, and no faster: libc's memcpy for each tensor, and PyTorch's `copy_` (26 to 29 ms for the copy in all three
  ways; looking at the state takes another 4 to 6).
- `memcpy` is libc's (through NumPy), which writes around the cache; `copy_` is PyTorch's own copy loop, which does
  not. Both workers copy at once.
- Where the private result costs more than 1.4 libc memcpys: one core of this machine reads about 12.5 GB/s and writes
  about 10 GB/s. Adding up half of the buffer is bound by reading, copying the result out by writing, and without
  code of our own that does both at once the two times add up. Tried, and slower or equal: copying each piece out
  while it lies in the cache; every worker adding up everything straight into its own memory; adding into a small
  buffer and copying from there."""


def _torch_rows(cases: dict, overhead: dict) -> list[tuple[str, str, str, bool]]:
    """The bars: communication-heavy steps twice, a compute-heavy one, and what one worker costs."""
    rows = []
    for (case, row), asked in zip(cases.items(), (1.3, 1.2, 1.0), strict=True):
        for peer in ("ddp", "accelerate", "fabric"):
            ratio = row[peer] / row["duoka"]
            rows.append((f"{case}, against {peer}", f">= {asked:g}x", f"{ratio:.2f}x", ratio >= asked))
    mlp, resnet = (list(cases.values())[n] for n in (0, -1))
    cost = (mlp["duoka"] - mlp["half"]) / mlp["memcpy"]
    rows.append(
        ("cost of the exchange in the first of these, in memcpys of the gradient", "<= 3", f"{cost:.1f}", cost <= 3)
    )
    gain = resnet["alone"] / resnet["duoka"]
    rows.append(("ResNet-18, two workers against one, one thread each", ">= 1.8x", f"{gain:.2f}x", gain >= 1.8))
    ratio = overhead["duoka"] / overhead["plain"]
    rows.append(
        (
            "ResNet-18, one worker with one replica, time against the plain loop",
            "<= 1.02x",
            f"{ratio:.3f}x",
            ratio <= 1.02,
        )
    )
    return rows


def _keras_rows(cases: dict, overhead: dict, folder: dict) -> list[tuple[str, str, str, bool]]:
    """Peers at their better number of threads; "the better MirroredStrategy" is the better of two collectives, too."""

    both = ("mirrored", "hierarchical")
    small, large, mobilenet = (f"{name}, global batch {n}" for name, n in _KERAS_CASES)
    asked = [
        (mobilenet, "tensorflow", "plain `fit`", 1.2, ("plain",)),
        (mobilenet, "tensorflow", "the better MirroredStrategy", 1.4, both),
        (small, "tensorflow", "plain `fit`", 1.0, ("plain",)),
        (small, "tensorflow", "the better MirroredStrategy", 1.2, both),
        (small, "tensorflow", "the default MirroredStrategy", 1.3, ("mirrored",)),
        (large, "tensorflow", "the better MirroredStrategy", 1.0, both),
        (large, "tensorflow", "the default MirroredStrategy", 1.3, ("mirrored",)),
        (small, "jax", "DataParallel on JAX", 1.0, ("dataparallel",)),
        (large, "jax", "DataParallel on JAX", 1.0, ("dataparallel",)),
    ]
    rows = []
    for case, backend, peer, least, kinds in asked:
        rows.append(_against(f"{case}, against {peer}", least, cases[case][backend], kinds))
    for backend, most in (("tensorflow", 1.10), ("jax", 1.10), ("torch", 1.05)):
        found = overhead[backend]["duoka"] / overhead[backend]["plain"]
        what = f"Reuters CNN, one worker with two replicas, time against two plain steps, {backend}"
        rows.append((what, f"<= {most:.2f}x", f"{found:.3f}x", found <= most))
    found = folder["duoka"] / max(folder["plain 1"], folder["plain 2"])
    rows.append(("a folder of pictures, MobileNetV2, against plain `fit`", ">= 1.3x", f"{found:.2f}x", found >= 1.3))
    return rows


def _against(what: str, least: float, times: dict, kinds: tuple[str, ...]) -> tuple[str, str, str, bool]:
    """A peer that hung was left out, and says nothing."""
    known = [times[name] for kind in kinds for threads in (1, 2, 4) if (name := f"{kind} {threads}") in times]
    found = min(known) / times["duoka"] if known else 0.0
    return what, f">= {least:g}x", f"{found:.2f}x" if known else "the peer hung", found >= least


def _course_rows(found: dict) -> list[tuple[str, str, str, bool]]:
    """Of benchmarks/keras_reuters_course.py, which needs data that is not in the repository."""
    what = "Reuters newswires, two replicas against plain `fit`, 10 epochs:"
    first, last, peak = found["first_loss_percent"], found["last_loss_percent"], found["peak_points"]
    return [
        (f"{what} loss of the first epoch", "<= 0.5 %", f"{first:.2f} %", first <= 0.5),
        (f"{what} loss of the last epoch", "<= 5 %", f"{last:.2f} %", last <= 5),
        (f"{what} best validation accuracy", "<= 1 point", f"{peak:.2f} points", peak <= 1),
    ]


def _loop_rows(cases: dict) -> list[tuple[str, str, str, bool]]:
    small, _, mobilenet = (f"{name}, global batch {n}" for name, n in _KERAS_CASES)
    both = ("mirrored", "hierarchical")
    return [
        _against(f"a loop, {mobilenet}, against the plain loop", 1.2, cases[mobilenet], ("plain",)),
        _against(f"a loop, {mobilenet}, against the better MirroredStrategy", 1.4, cases[mobilenet], both),
        _against(f"a loop, {small}, against the better MirroredStrategy", 1.2, cases[small], both),
    ]


def _equality_rows(cases: dict) -> list[tuple[str, str, str, bool]]:
    return [
        (f"comparing replicas every 100 steps, {case}", "<= 1 %", f"{row['percent']:.2f} %", row["percent"] <= 1)
        for case, row in cases.items()
    ]


def _recovery_row(found: dict) -> tuple[str, str, str, bool]:
    most = 3 * found["step"] + 500
    what = f"a worker dies while it waits: until the next committed step, median of {found['kills']}"
    asked = f"<= 3 steps + 0.5 s = {most:.0f} ms"
    return what, asked, f"{found['pause']:.0f} ms (step: {found['step']:.1f} ms)", found["pause"] <= most


_KERAS_CASES = (("Reuters CNN", 32), ("Reuters CNN", 128), ("MobileNetV2 at 32x32", 64))


def _on_tensorflow(cases: dict) -> dict:
    return {case: {"tensorflow": times} for case, times in cases.items()}


def _keras_table(cases: dict, means: dict) -> str:
    lines = ["| step | backend | contestants |", "|---|---|---|"]
    for case, backends in cases.items():
        for backend, times in backends.items():
            each = (f"{who} {ms:.2f} ({means[case][backend][who]:.2f})" for who, ms in times.items())
            lines.append(f"| {case} | {backend} | {', '.join(each)} |")
    return "\n".join(lines)


def _torch_table(cases: dict) -> str:
    kinds = ["ddp", "accelerate", "fabric", "duoka", "half", "alone", "memcpy"]
    lines = ["| step | " + " | ".join(kinds) + " |", "|---" * (len(kinds) + 1) + "|"]
    lines += [f"| {case} | " + " | ".join(f"{row[kind]:.1f}" for kind in kinds) + " |" for case, row in cases.items()]
    return "\n".join(lines)


def _checkpoint_table(cases: dict) -> str:
    lines = [
        "| state | MB | training stands still | memcpy | the first time | until it is on the disk |",
        "|---" * 6 + "|",
    ]
    kinds = ("megabytes", "stall", "memcpy", "first", "write")
    lines += [f"| {case} | " + " | ".join(f"{row[kind]:.0f}" for kind in kinds) + " |" for case, row in cases.items()]
    return "\n".join(lines)


def _times(row: dict, kind: str) -> float:
    return row["gloo"] / row[kind]


def _all_reduce_table(reduce: dict) -> str:
    kinds = ["gloo", "shared", "private", "array", "memcpy", "copy_"]
    lines = ["| size | " + " | ".join(kinds) + " |", "|---" * (len(kinds) + 1) + "|"]
    lines += [f"| {size} | " + " | ".join(f"{row[kind]:,.0f}" for kind in kinds) + " |" for size, row in reduce.items()]
    return "\n".join(lines)


def _say_machines(known: dict) -> str:
    """Which machine measured what: all of it one, unless some was measured again elsewhere."""
    by_machine: dict[str, list[str]] = {}
    for name, found in known.items():
        by_machine.setdefault(found["machine"], []).append(name)
    if len(by_machine) == 1:
        return f"{next(iter(by_machine))}."
    return " ".join(f"{machine}: {', '.join(names)}." for machine, names in by_machine.items())


def _machine() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    return (
        f"{model}, {os.cpu_count()} cores, Linux {platform.release().split('-')[0]}, Python {platform.python_version()}"
    )


if __name__ == "__main__":
    main()
