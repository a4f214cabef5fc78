"""Measure every claim of the README again: `make bench`. Writes benchmarks/RESULTS.md and the table of README.md.

    python benchmarks/run.py                    everything
    python benchmarks/run.py keras_step.py      only these; numbers.json keeps the numbers of the rest
    python benchmarks/run.py "keras_reuters_course.py --data ~/.keras/datasets"
    python benchmarks/run.py --quick            ten rows in at most 6 minutes, printed only
    python benchmarks/run.py --write            measure nothing, write the tables of numbers.json again

Ratios are medians of at least 15 paired rounds (paired.py), with the range of the middle 80 % in brackets. A/A is the
peer against itself in the same rounds. A row whose A/A is outside of 0.97 to 1.03 carries the word "noise".
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import paired

HERE = Path(__file__).parent
NUMBERS = HERE / "numbers.json"
RESULTS = HERE / "RESULTS.md"
README = HERE.parent / "README.md"
BENCHMARKS = (
    "all_reduce.py",
    "torch_step.py",
    "torch_overhead.py",
    "calls.py",
    "first_batch.py",
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
MLP_16 = "MLP 784-2048-2048-2048-10, global batch 16"
MLP_128 = "the same MLP, global batch 128"
RESNET = "ResNet-18 at 32x32, global batch 64"
REUTERS_32, REUTERS_128 = "Reuters CNN, global batch 32", "Reuters CNN, global batch 128"
MOBILENET = "MobileNetV2 at 32x32, global batch 64"
STARTUP = "start-up to the first barrier, `duoka run`, against torchrun"
RECOVERY = "a worker dies while it waits: time until the next committed step"
# The rows of the README: the questions an engineer asks first, whether the bar is met or missed.
HEADLINES = (
    f"{MLP_16}, against ddp",
    f"{MLP_128}, against ddp",
    f"{RESNET}, against ddp",
    f"{MOBILENET}, against the better MirroredStrategy",
    f"{REUTERS_32}, against the better MirroredStrategy",
    f"{REUTERS_32}, against plain `fit`",
    f"{REUTERS_32}, against DataParallel on JAX",
    STARTUP,
    "`import duoka`",
    RECOVERY,
)
BOTH = ("mirrored", "hierarchical")


class Row(NamedTuple):
    """One claim: the bar, the measured value, whether it is met, and the A/A of its rounds."""

    what: str
    asked: str
    measured: str
    is_met: bool
    control: str = ""


def measure(names: list[str]) -> dict:
    """Run these one after the other, and save the numbers of each at once: the next one may be interrupted."""
    known = json.loads(NUMBERS.read_text()) if NUMBERS.exists() else {}
    for name, *words in map(str.split, names):
        known[name] = {"on": time.strftime("%Y-%m-%d"), "machine": _machine(), "numbers": run(name, words)}
        NUMBERS.write_text(to_json(known) + "\n")
    return known


def to_json(known: dict) -> str:
    """With each list of round times on one line."""
    return re.sub(r"\[[^\[\]{}]*\]", lambda found: " ".join(found[0].split()), json.dumps(known, indent=1))


def run(name: str, words: list[str]) -> dict:
    """Run one benchmark by itself, show its output, and return its numbers."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "numbers.json"
        environ = os.environ | {"DUOKA_BENCH_JSON": str(path)}
        subprocess.run([sys.executable, str(HERE / name), *words], env=environ, cwd=folder, check=True)
        return json.loads(path.read_text())


def table(rows: Sequence[Row]) -> str:
    lines = ["| claim | bar | measured (10-90 %) | A/A | met |", "|---|---|---|---|---|"]
    lines += [
        f"| {row.what} | {row.asked} | {row.measured} | {row.control} | {'yes' if row.is_met else '**no**'} |"
        for row in rows
    ]
    return "\n".join(lines)


def at_least(what: str, asked: float, found: paired.Spread, control: paired.Spread | None = None) -> Row:
    return Row(what, f">= {asked:g}x", _times(found), found.median >= asked, _say_control(control))


def at_most(what: str, asked: float, found: paired.Spread, control: paired.Spread | None = None) -> Row:
    return Row(what, f"<= {asked:g}x", _times(found), found.median <= asked, _say_control(control))


def _times(found: paired.Spread) -> str:
    return f"{found.median:.2f}x ({found.range()})" if found.range() else f"{found.median:.2f}x"


def _say_control(control: paired.Spread | None) -> str:
    if control is None:
        return ""
    return f"{control.median:.2f}" if control.is_quiet else f"{control.median:.2f} noise"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("benchmarks", nargs="*", help="only these")
    parser.add_argument("--quick", action="store_true", help="ten rows in at most 6 minutes, printed only")
    parser.add_argument("--write", action="store_true", help="measure nothing, write the tables again")
    parser.add_argument("--rounds", type=int, default=paired.MIN_ROUNDS, help="of --quick")
    options = parser.parse_args()
    if options.quick:
        run_quick(options.rounds)
        return
    known = json.loads(NUMBERS.read_text()) if options.write else measure(options.benchmarks or list(BENCHMARKS))
    if missing := [name for name in BENCHMARKS if name not in known]:
        raise SystemExit(f"not measured yet: {', '.join(missing)}")
    write_table(known)


def run_quick(num_rounds: int) -> None:
    """Measure ten rows and print their table."""
    begin = time.monotonic()
    words = ["--quick", "--rounds", str(num_rounds)]
    numbers = run("torch_step.py", words) | run("keras_step.py", words)
    lines = quick_lines(numbers)
    num_noisy = sum("noise" in line for line in lines)
    print(f"\n{_machine()}. {num_rounds} rounds, {time.monotonic() - begin:.0f} s in all.")
    print(f"A/A within {paired.QUIET[0]} to {paired.QUIET[1]}: {len(lines) - num_noisy} of {len(lines)} rows.\n")
    print("\n".join([paired.QUICK_HEADER, *lines]))


def quick_lines(numbers: dict) -> list[str]:
    """The rows of the quick table. A peer that hung has no row."""
    lines = []
    for title, found in numbers["torch_step_ms"].items():
        lines.append(paired.quick_row(title, paired.Contest.read(found), "ddp"))
    for title, backends in numbers["keras_step_ms"].items():
        for backend, found in backends.items():
            contest = paired.Contest.read(found)
            peers = [contest.better(kinds) for kinds in (("plain",), BOTH, ("dataparallel",))]
            where = "" if title.startswith("a loop") else "fit, "
            name = f"{title.replace('a loop, ', 'a TensorFlow loop, ')}, {where}{backend}".removesuffix(", tensorflow")
            lines += [paired.quick_row(name, contest, peer) for peer in peers if peer is not None]
    return lines


def make_rows(numbers: dict) -> list[Row]:
    """All claims."""
    rows = _all_reduce_rows({size: paired.Contest.read(found) for size, found in numbers["all_reduce_us"].items()})
    startup = _read_startup(numbers)
    rows.append(at_most(STARTUP, 0.75, startup.in_times_of("torchrun"), startup.control("torchrun")))
    for what, most, found in (
        ("`import duoka`", 100, numbers["import_ms"]),
        ("`duoka devices`, whole command", 300, numbers["devices_ms"]),
    ):
        rows.append(Row(what, f"< {most} ms", f"{found:.0f} ms", found < most))
    rows += _torch_rows(_read(numbers["torch_step_ms"]), paired.Contest.read(numbers["torch_overhead_ms"]))
    rows += _call_rows(numbers["calls"]["function style"]) if "calls" in numbers else []
    if "first_batch_s" in numbers:
        first = paired.Contest.read(numbers["first_batch_s"])
        late = first.typical("duoka") - first.typical("plain")
        rows.append(
            Row("first batch of 1,281,167 samples, seconds above PyTorch", "<= 0.1", f"{late:.3f}", late <= 0.1)
        )
    rows += _keras_rows(numbers)
    rows += _course_rows(numbers["keras_course"]) if "keras_course" in numbers else []
    rows += _loop_rows(_read(numbers["tensorflow_step_ms"]))
    for case, found in _read(numbers["checkpoint_stall_ms"]).items():
        what = f"a save, {case}: time the training thread is blocked, in libc memcpys"
        rows.append(at_most(what, 2, found.in_times_of("memcpy", "stall"), found.control("memcpy")))
    rows += _equality_rows(numbers["equality_check"])
    rows.append(_recovery_row(numbers["recovery_pause_ms"]))
    return rows


def headlines(rows: Sequence[Row]) -> list[Row]:
    """The rows of the README, in the order of HEADLINES."""
    by_name = {row.what: row for row in rows}
    return [by_name[what] for what in HEADLINES]


def merge(known: dict) -> dict:
    """All numbers, of whichever benchmark and day."""
    numbers: dict = {}
    for found in known.values():
        numbers |= found["numbers"]
    return numbers


def write_table(known: dict) -> None:
    numbers = merge(known)
    rows = make_rows(numbers)
    RESULTS.write_text(make_results(known, numbers, rows) + "\n")
    _put_into_readme(table(headlines(rows)))
    print(f"\n{table(rows)}\n\nwritten to benchmarks/RESULTS.md and README.md")


def make_results(known: dict, numbers: dict, rows: Sequence[Row]) -> str:
    """The text of RESULTS.md."""
    days = sorted({found["on"] for found in known.values()})
    startup = _read_startup(numbers)
    seconds = (f"| {who} | {startup.typical(who):.2f} |" for who in _singles(startup))
    return "\n\n".join([
        "# Measured by `make bench`",
        f"{_say_machines(known)} CPU only: there was no GPU. Two workers with one thread each."
        f" Measured on {' and '.join(days)}.",
        f"A ratio is the median of at least {paired.MIN_ROUNDS} paired rounds, with the range of the middle 80 % in"
        " brackets. A/A is the peer against itself in the same rounds. Rows without a range were measured before the"
        " rounds, as ratios of two medians.",
        table(rows),
        "## All-reduce of float32, two workers, microseconds",
        _all_reduce_table(_read(numbers["all_reduce_us"])),
        f"Barrier: {numbers['barrier_us']['duoka']:.0f} us, Gloo {numbers['barrier_us']['gloo']:.0f} us.",
        "## One training step of PyTorch, two workers with one thread each, milliseconds",
        _torch_table(_read(numbers["torch_step_ms"])),
        "## One step of Keras's `fit`, milliseconds; the number after a peer is its number of threads",
        _keras_table(numbers["keras_step_ms"]),
        "## One step of a TensorFlow loop (`strategy.run` in a tf.function), milliseconds",
        _keras_table({case: {"tensorflow": times} for case, times in numbers["tensorflow_step_ms"].items()}),
        "## A checkpoint, milliseconds",
        _checkpoint_table(_read(numbers["checkpoint_stall_ms"])),
        "## Start-up: two workers, PyTorch imported, first barrier passed",
        "\n".join(["| launcher | seconds |", "|---|---|", *seconds]),
        NOTES,
    ])  # fmt: skip


def _read(cases: dict) -> dict[str, paired.Contest]:
    return {case: paired.Contest.read(found) for case, found in cases.items()}


def _read_startup(numbers: dict) -> paired.Contest:
    found = {"duoka" if who == "duoka run" else who: values for who, values in numbers["startup_s"].items()}
    return paired.Contest.read(found)


def _singles(contest: paired.Contest) -> list[str]:
    return [name for name in contest.times if not name.endswith(" again")]


def _put_into_readme(rows: str) -> None:
    """Between its two marks, so that no number in it is copied by hand."""
    begin, end = "<!-- written by make bench -->\n\n", "\n\n<!-- up to here -->"
    before, _, rest = README.read_text().partition(begin)
    _, _, after = rest.partition(end)
    README.write_text(before + begin + rows + end + after)


NOTES = """## Notes

- PyTorch: all contestants run in the same two processes in paired rounds, with one thread each and the same model,
  data, optimizer and allocator settings. `floor` is the plain step on half of the batch with one barrier in place of
  the exchange (Duoka's own barrier in shared memory). `alone` is the plain step on the whole batch on one worker
  while the other worker waits. `memcpy` copies the gradient in both workers at once. Older numbers have `half`:
  `floor` without the barrier.
- Keras and TensorFlow loops: contestants live in processes of their own and sleep until their turn. They have the
  same model, data, optimizer and allocator settings. Duoka runs two workers with one thread each. Peers run with one
  and with two threads, and the better number of threads takes part in the paired rounds. A round counts the median
  step of a short epoch: the hypervisor of this machine takes a core away for up to 130 ms at a time (steal in
  /proc/stat, up to a quarter of the time). JAX returns before a step is done, so a round there counts the mean step
  of an epoch.
- `floor` in Keras is plain `fit` on half of each batch in two workers, with one barrier per step (older numbers:
  `half`, without it). It is not a bound: XLA compiles Duoka's update there, and not that of `floor`. It shows where
  the time goes, because half of a batch costs more than half of the time. The gradients of MobileNetV2 take 212 ms
  for 64 samples on one core and 120 ms for 32. They take 132 to 148 ms if both cores compute 32 samples at once, and
  184 ms if TensorFlow itself spreads 64 samples over both cores. The update takes another 20 to 29 ms in both
  workers, while TensorFlow alone does parts of it during backward.
- Tried, and kept: graphs called by flat lists of tensors, sums in few flat arrays, XLA for the update of models with
  few variables (4.8 to 1.6 ms for the small CNN in `fit`; a step of a loop 19.8 to 15.4 ms), rows cut by NumPy, not
  by TensorFlow (twenty times as fast), workers kept to cores of their own (16 to 12 ms), no cycles that keep tf.data
  iterators alive (stalls of 0.5 to 2 s), places in flat arrays computed once (0.3 ms), one call out of a loop's graph
  less (0.4 ms), functions that stand in for Keras's put there once for a `fit` and not for every replica (on PyTorch,
  one worker with two replicas 1.10 to 1.00), seeds looked for once (on JAX 1.12 to 1.06). Tried, and no gain: XLA for
  the update of MobileNetV2 (29 to 20 ms by itself, and nothing in a step: 183 against 190 ms), TensorFlow's
  single-threaded executor (its update 21 to 18 ms, nothing elsewhere).
- Bars above `half` on this machine, and Duoka's own cost: MobileNetV2 at 1.4 times the better
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
- The ResNet step takes seconds, so a round has one step of each contestant.
- The exchange costs more than 3 memcpys here: writing a layer's gradient into shared memory (16 MB at a time) goes
  through the cache and takes about two memcpys, adding up one, copying out one. Tried, and no faster: weighing in
  pieces of the size of the cache and copying those; weighing in place and copying at once; pages lent to `p.grad` by
  copy-on-write (the others then wait for them at their next backward). What helped: saying at once that the result
  was taken (65 to 56 ms a step), one generator for all bodies, memory that malloc keeps, and a worker's own slice that
  stays in autograd's gradients (see collectives/kept.py). 40 MB, two workers that only exchange, in rounds on a quiet
  AMD EPYC: 8.5 ms before, 6.9 with the own slice kept. There, each worker adding both sums straight into its own
  memory, with one meeting less, took 7.6 ms; on the same machine some minutes later 6.5 ms, as long as before.
  Floor plus 4.4 ms would be needed for 1.35 times DDP at batch 128.
- A checkpoint: `memcpy` copies the same number of bytes in one piece, into memory that was touched before. A save
  counts from the call of `state_dict` until training continues. The first save also allocates the memory of the copy.
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


def _all_reduce_rows(sizes: dict[str, paired.Contest]) -> list[Row]:
    rows = []
    large = ("1 MB", "4 MB", "25 MB", "100 MB")
    for kind, title, bars in (
        ("shared", "buffer of the collective", {"4 KB": 3} | dict.fromkeys(large, 4)),
        ("array", "any array (copied in and out)", dict.fromkeys(large, 2)),
    ):
        for size, asked in bars.items():
            found = sizes[size]
            what = f"all_reduce, {size}, {title}, against Gloo"
            rows.append(at_least(what, asked, found.in_times_of(kind, "gloo"), found.control("gloo")))
    for size in ("25 MB", "100 MB"):
        found = sizes[size]
        rows.append(
            at_most(f"{size}, result stays shared, in libc memcpys", 1.0, found.in_times_of("memcpy", "shared"))
        )
        rows.append(at_most(f"{size}, private result, in libc memcpys", 1.4, found.in_times_of("memcpy", "private")))
        what = f"{size}, private result, in PyTorch copies (copy_)"
        rows.append(at_most(what, 1.4, found.in_times_of("copy_", "private")))
    return rows


def _torch_rows(cases: dict[str, paired.Contest], overhead: paired.Contest) -> list[Row]:
    """Steps that exchange much, a step that computes much, and the cost on one worker."""
    rows = []
    for case, found in cases.items():
        asked = {MLP_16: 1.5, MLP_128: 1.35}.get(case, 1.0)
        for peer in ("ddp", "accelerate", "fabric"):
            rows.append(at_least(f"{case}, against {peer}", asked, found.against(peer), found.control(peer)))
        if "floor" in found.times:
            rows.append(at_most(f"{case}, in times of floor", 1.02, found.in_times_of("floor")))
            share = found.above_floor() / (found.typical("ddp") - found.typical("floor"))
            rows.append(Row(f"{case}, step less floor, in DDP's", "<= 0.5", f"{share:.2f}", share <= 0.5))
    mlp, resnet = cases[MLP_16], cases[RESNET]
    floor = "floor" if "floor" in mlp.times else "half"
    cost = (mlp.typical("duoka") - mlp.typical(floor)) / mlp.typical("memcpy")
    what = f"cost of the exchange in {MLP_16}, in memcpys of the gradient"
    rows.append(Row(what, "<= 3", f"{cost:.1f}", cost <= 3))
    rows.append(at_least("ResNet-18, two workers against one, one thread each", 1.8, resnet.against("alone")))
    what = "ResNet-18, one worker with one replica, time against the plain loop"
    rows.append(at_most(what, 1.02, overhead.in_times_of("plain"), overhead.control("plain")))
    return rows


def _call_rows(found: dict[str, float]) -> list[Row]:
    """Two replicas on one worker."""
    calls = found["calls per global batch"]
    rows = [Row("Python calls into Duoka per global batch, function style", "<= 260", f"{calls:.0f}", calls <= 260)]
    for count in (4, 160, 1200):
        spent, most = found[f"call CPU ms at {count} parameters"], 0.5 + 0.004 * count
        what = f"main-thread CPU of a call without function and backward, {count:,} parameters"
        rows.append(Row(what, f"<= {most:.2f} ms", f"{spent:.2f} ms", spent <= most))
    return rows


def _keras_rows(numbers: dict) -> list[Row]:
    """Peers at their better number of threads. "The better MirroredStrategy" is the better of two collectives, too."""
    asked = [
        (MOBILENET, "tensorflow", "plain `fit`", 1.2, ("plain",)),
        (MOBILENET, "tensorflow", "the better MirroredStrategy", 1.4, BOTH),
        (REUTERS_32, "tensorflow", "plain `fit`", 1.0, ("plain",)),
        (REUTERS_32, "tensorflow", "the better MirroredStrategy", 1.2, BOTH),
        (REUTERS_32, "tensorflow", "the default MirroredStrategy", 1.3, ("mirrored",)),
        (REUTERS_128, "tensorflow", "the better MirroredStrategy", 1.0, BOTH),
        (REUTERS_128, "tensorflow", "the default MirroredStrategy", 1.3, ("mirrored",)),
        (REUTERS_32, "jax", "DataParallel on JAX", 1.0, ("dataparallel",)),
        (REUTERS_128, "jax", "DataParallel on JAX", 1.0, ("dataparallel",)),
    ]
    cases = numbers["keras_step_ms"]
    rows = [
        _against(f"{case}, against {peer}", least, paired.Contest.read(cases[case][backend]), kinds)
        for case, backend, peer, least, kinds in asked
    ]
    for backend, most in (("tensorflow", 1.10), ("jax", 1.10), ("torch", 1.05)):
        found = paired.Contest.read(numbers["keras_overhead_ms"][backend])
        what = f"Reuters CNN, one worker with two replicas, time against two plain steps, {backend}"
        rows.append(at_most(what, most, found.in_times_of("plain"), found.control("plain")))
    if "keras_folder_ms" in numbers:
        folder = paired.Contest.read(numbers["keras_folder_ms"])
    else:  # measured before the rounds, in pictures per second
        folder = paired.Contest.read({who: 1e3 / speed for who, speed in numbers["keras_folder_images_s"].items()})
    rows.append(_against("a folder of pictures, MobileNetV2, against plain `fit`", 1.3, folder, ("plain",)))
    return rows


def _against(what: str, least: float, contest: paired.Contest, kinds: tuple[str, ...]) -> Row:
    """A peer that hung was left out, and the row says so."""
    peer = contest.better(kinds)
    if peer is None:
        return Row(what, f">= {least:g}x", "the peer hung", False)
    return at_least(what, least, contest.against(peer), contest.control(peer))


def _course_rows(found: dict) -> list[Row]:
    """Of benchmarks/keras_reuters_course.py, which needs data that is not in the repository."""
    what = "Reuters newswires, two replicas against plain `fit`, 10 epochs:"
    first, last, peak = found["first_loss_percent"], found["last_loss_percent"], found["peak_points"]
    return [
        Row(f"{what} loss of the first epoch", "<= 0.5 %", f"{first:.2f} %", first <= 0.5),
        Row(f"{what} loss of the last epoch", "<= 5 %", f"{last:.2f} %", last <= 5),
        Row(f"{what} best validation accuracy", "<= 1 point", f"{peak:.2f} points", peak <= 1),
    ]


def _loop_rows(cases: dict[str, paired.Contest]) -> list[Row]:
    asked = (
        (MOBILENET, "the plain loop", 1.2, ("plain",)),
        (MOBILENET, "the better MirroredStrategy", 1.4, BOTH),
        (REUTERS_32, "the better MirroredStrategy", 1.2, BOTH),
    )
    return [_against(f"a loop, {case}, against {peer}", bar, cases[case], kinds) for case, peer, bar, kinds in asked]


def _equality_rows(cases: dict) -> list[Row]:
    return [
        Row(f"comparing replicas every 100 steps, {case}", "<= 1 %", f"{row['percent']:.2f} %", row["percent"] <= 1)
        for case, row in cases.items()
    ]


def _recovery_row(found: dict) -> Row:
    most = 3 * found["step"] + 500
    measured = f"{found['pause']:.0f} ms, median of {found['kills']} (step: {found['step']:.1f} ms)"
    return Row(RECOVERY, f"<= 3 steps + 0.5 s = {most:.0f} ms", measured, found["pause"] <= most)


def _keras_table(cases: dict) -> str:
    lines = ["| step | backend | contestants |", "|---|---|---|"]
    for case, backends in cases.items():
        for backend, found in backends.items():
            contest = paired.Contest.read(found)
            each = (f"{who} {contest.typical(who):.2f}" for who in _singles(contest))
            lines.append(f"| {case} | {backend} | {', '.join(each)} |")
    return "\n".join(lines)


def _torch_table(cases: dict[str, paired.Contest]) -> str:
    kinds = ["ddp", "accelerate", "fabric", "duoka", "floor", "half", "alone", "memcpy"]
    kinds = [kind for kind in kinds if any(kind in found.times for found in cases.values())]
    return _table_of_times("step", cases, kinds, ".1f")


def _checkpoint_table(cases: dict[str, paired.Contest]) -> str:
    kinds = ["megabytes", "stall", "memcpy", "first", "write"]
    titles = ["MB", "thread is blocked", "memcpy", "the first time", "until it is on the disk"]
    return _table_of_times("state", cases, kinds, ".0f", titles)


def _all_reduce_table(sizes: dict[str, paired.Contest]) -> str:
    return _table_of_times("size", sizes, ["gloo", "shared", "private", "array", "memcpy", "copy_"], ",.0f")


def _table_of_times(
    corner: str, cases: dict[str, paired.Contest], kinds: list[str], form: str, titles: list[str] | None = None
) -> str:
    lines = [f"| {corner} | " + " | ".join(titles or kinds) + " |", "|---" * (len(kinds) + 1) + "|"]
    for case, found in cases.items():
        cells = (f"{found.typical(kind):{form}}" if kind in found.times else "" for kind in kinds)
        lines.append(f"| {case} | " + " | ".join(cells) + " |")
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
