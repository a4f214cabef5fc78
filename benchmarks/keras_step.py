"""One step of Keras's `fit`: two workers with one thread each, against plain `fit` and the frameworks' own strategies.

    python benchmarks/keras_step.py [--rounds 15] [--steps 1.0] [--case "..."] [--backend jax] [--quick]

Contestants live in processes of their own and take turns with one short epoch each, in paired rounds (paired.py). A
round counts the median step of the epoch; on JAX, which returns before a step is done, it counts the mean step. Peers
run with one and with two threads (DataParallel also with four). A few rounds choose the best number of threads for
each peer; the paired rounds then run the chosen ones, twice each. `--quick` leaves the choice out. All
contestants have the same model, data, optimizer and allocator settings. Duoka's workers keep to one core each, as
its launcher arranges; peers run on both. "plain" is `fit` without a strategy. "mirrored" is
tf.distribute.MirroredStrategy on two logical CPUs with its default collective, "hierarchical" the same with
HierarchicalCopyAllReduce. "dataparallel" is keras.distribution.DataParallel on JAX with two host devices. "floor" is
plain `fit` on half of each batch in Duoka's two workers, with one barrier per step and no exchange (Duoka's own
barrier in shared memory).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import paired
from keras_contest import Contest, NoAnswer, read_steal, say_steal, serve

HERE = Path(__file__).resolve()


@dataclass(frozen=True)
class Case:
    """`peers` by backend: each group of contestants sends its fastest one into the paired rounds."""

    model: str
    batch_size: int
    num_steps: int
    peers: Mapping[str, Mapping[str, tuple[str, ...]]]
    style: str = "fit"  # or "loop": tensorflow_step.py


FEW = {kind: (f"{kind} 1", f"{kind} 2") for kind in ("plain", "mirrored", "hierarchical")}
DATA_PARALLEL = ("dataparallel 1", "dataparallel 2", "dataparallel 4")  # XLA takes the threads of both from one pool
EVERYTHING = {"tensorflow": FEW, "jax": {"plain": FEW["plain"], "dataparallel": DATA_PARALLEL}}
CASES = {
    "Reuters CNN, global batch 32": Case("reuters", 32, 40, EVERYTHING),
    "Reuters CNN, global batch 128": Case("reuters", 128, 20, EVERYTHING),
    "MobileNetV2 at 32x32, global batch 64": Case("mobilenet", 64, 6, {"tensorflow": FEW}),
    "a loop, Reuters CNN, global batch 32": Case("reuters", 32, 40, {"tensorflow": FEW}, "loop"),
    "a loop, MobileNetV2 at 32x32, global batch 64": Case("mobilenet", 64, 6, {"tensorflow": FEW}, "loop"),
}
# With the number of threads that was the best one in RESULTS.md.
# The faster one of MirroredStrategy's two in every full run so far: choosing it anew takes a minute.
_MIRRORED = {"MirroredStrategy": ("hierarchical 1",)}
_REUTERS = {"tensorflow": {"plain": ("plain 2",), **_MIRRORED}, "jax": {"dataparallel": ("dataparallel 1",)}}
QUICK_CASES = {
    "Reuters CNN, global batch 32": Case("reuters", 32, 12, _REUTERS),
    "MobileNetV2 at 32x32, global batch 64": Case("mobilenet", 64, 3, {"tensorflow": _MIRRORED}),
    "a loop, Reuters CNN, global batch 32": Case("reuters", 32, 12, {"tensorflow": _MIRRORED}, "loop"),
}
CHOOSING_ROUNDS = 3


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=paired.MIN_ROUNDS)
    parser.add_argument("--steps", type=float, default=1.0, help="how many times the usual number of steps")
    parser.add_argument("--case", action="append", choices=list(CASES), help="only these")
    parser.add_argument("--backend", action="append", choices=list(EVERYTHING), help="only these")
    parser.add_argument("--quick", action="store_true", help="fewer peers, shorter epochs, and a loop")
    parser.add_argument("--serve", nargs=2, metavar=("KIND", "BACKEND"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        Contestant(*options.serve)
        return
    cases = QUICK_CASES if options.quick else {name: case for name, case in CASES.items() if case.style == "fit"}
    chosen = {title: case for title, case in cases.items() if not options.case or title in options.case}
    numbers: dict[str, dict[str, Any]] = {}
    for backend in options.backend or EVERYTHING:  # one after the other: fewer processes at a time
        for title, contest in hold(chosen, backend, options.rounds, options.steps).items():
            numbers.setdefault(title, {})[backend] = contest.write()
    if "DUOKA_BENCH_JSON" in os.environ:
        Path(os.environ["DUOKA_BENCH_JSON"]).write_text(json.dumps({"keras_step_ms": numbers}))


def hold(cases: Mapping[str, Case], backend: str, num_rounds: int, steps: float = 1.0) -> dict[str, paired.Contest]:
    """Start the contestants of these cases on one backend, measure case by case, and end them."""
    here = {title: case for title, case in cases.items() if backend in case.peers}
    peers = {name for case in here.values() for group in case.peers[backend].values() for name in group}
    found: dict[str, paired.Contest] = {}
    if not here:
        return found
    with Contest() as contest:
        _start(contest, backend, sorted(peers))
        for title, case in here.items():
            num_steps = max(2, round(case.num_steps * steps))
            found[title] = measure(contest, title, case.style, case.peers[backend], num_rounds, num_steps)
            print_case(f"{title}, {backend}", found[title])
    return found


def _start(contest: Contest, backend: str, peers: Sequence[str]) -> None:
    words = ["-m", "duoka", "run", "--devices", "2", "--threads", "1", str(HERE), "--serve", "duoka", backend]
    contest.start("duoka", words, {"KERAS_BACKEND": backend}, num_workers=2)
    for name in peers:
        kind, threads = name.split()
        environ = {"KERAS_BACKEND": backend, "TF_NUM_INTEROP_THREADS": "2", "CUDA_VISIBLE_DEVICES": ""}
        environ |= dict.fromkeys(("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "NPROC"), threads)
        if kind == "dataparallel":
            environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
        contest.start(name, [str(HERE), "--serve", kind, backend], environ)
    contest.wait_until_ready()


def measure(
    contest: Contest, title: str, style: str, groups: Mapping[str, Sequence[str]], num_rounds: int, num_steps: int
) -> paired.Contest:
    """Choose one peer of each group, then run the paired rounds.

    A peer that hangs is left out with a line that tells which: XLA's own all-reduce sometimes waits for ever if two
    devices share two threads.
    """

    def run_burst(name: str) -> list[float] | None:
        """One epoch: milliseconds of its steps, each that of the slower worker. The first is left out here."""
        process = "duoka" if name == "floor" else name
        try:
            answers = contest.ask([process], title=title, style=style, is_floor=name == "floor", num_steps=num_steps)[
                process
            ]
        except NoAnswer as error:
            if process == "duoka":
                raise SystemExit(str(error)) from None
            print(f"{name} is left out of {title}: {str(error).splitlines()[1][:200]}", flush=True)
            return None
        return [max(each) for each in zip(*(answer["steps"] for answer in answers), strict=True)]

    begin = read_steal()
    everyone = [name for group in groups.values() for name in group]
    with contextlib.suppress(NoAnswer):  # all compile at the same time; a contestant that fails is left out below
        contest.ask([*everyone, "duoka"], title=title, style=style, is_floor=False, num_steps=num_steps)
    # With one contestant in a group there is nothing to choose, and one round shows that all of them work.
    num_choosing = CHOOSING_ROUNDS if any(len(group) > 1 for group in groups.values()) else 1
    trial = paired.Contest.of(paired.run_rounds([*everyone, "duoka", "floor"], run_burst, num_choosing))
    best = [name for group in groups.values() if (name := trial.better(group)) is not None]
    found = paired.Contest.of(paired.run_rounds(paired.arrange(best), run_burst, num_rounds))
    print(f"{title}: {say_steal(begin)}")
    return found


class Contestant:
    """One process: builds a model at the first request for it, and times epochs."""

    def __init__(self, kind: str, backend: str) -> None:
        from duoka.devices.heap import keep_freed_memory

        keep_freed_memory()  # as Duoka does in its workers
        if kind == "dataparallel":
            _distribute_over_two_devices()
        self._strategy = make_strategy(kind)
        self._barrier = self._strategy._session.collective.barrier if kind == "duoka" else None
        self._title = ""
        self._runs: dict[bool, Callable[[], list[float]]] = {}
        serve(self.time_epoch)

    def time_epoch(self, title: str, style: str, is_floor: bool, num_steps: int) -> dict[str, list[float]]:
        if title != self._title:
            self._title = title
            self._runs.clear()  # one case at a time
        if is_floor not in self._runs:
            case = CASES[title]
            strategy = None if is_floor else self._strategy
            barrier = self._barrier if is_floor else None
            batch_size = case.batch_size // 2 if is_floor else case.batch_size
            make = make_fit
            if style == "loop":
                from tensorflow_step import make_loop as make
            self._runs[is_floor] = make(strategy, case.model, batch_size, num_steps, barrier)
        return {"steps": self._runs[is_floor]()}


def make_fit(
    strategy: Any, model_name: str, batch_size: int, num_steps: int, barrier: Callable[[], None] | None
) -> Callable[[], list[float]]:
    """A function that runs one epoch of `fit` and returns the seconds of its steps."""
    import keras
    import keras_models

    make, rows = keras_models.MODELS[model_name]
    with strategy.scope() if strategy is not None else contextlib.nullcontext():
        model = make()
    batches = keras_models.batches_of(rows(num_steps * batch_size), batch_size)

    def run_epoch() -> list[float]:
        times = keras_models.time_epoch(model, batches, barrier)
        # JAX returns before a step is done: only the epoch as a whole can be timed.
        return times.steps if keras.backend.backend() == "tensorflow" else [times.mean]

    return run_epoch


def _distribute_over_two_devices() -> None:
    import keras

    devices = keras.distribution.list_devices("cpu")
    assert len(devices) == 2, devices
    keras.distribution.set_distribution(keras.distribution.DataParallel(devices=devices))


def make_strategy(kind: str) -> Any:
    """Duoka's or TensorFlow's; None for contestants without one."""
    if kind == "duoka":
        import duoka

        return duoka.Mirrored(devices=2, threads=1, deadline_s=200)
    if kind not in ("mirrored", "hierarchical"):
        return None
    import tensorflow as tf

    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    collective = None if kind == "mirrored" else tf.distribute.HierarchicalCopyAllReduce()
    return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"], collective)


def print_case(title: str, contest: paired.Contest) -> None:
    print(f"{title}: " + ", ".join(f"{name} {contest.typical(name):.2f} ms" for name in contest.times))
    for name in contest.times:
        if (control := contest.control(name)) is not None:
            print(f"   {name}/duoka {contest.against(name)}, A/A {control};", end="")
    print(f" duoka/floor {contest.in_times_of('floor')}", flush=True)


if __name__ == "__main__":
    main()
