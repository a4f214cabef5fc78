"""One step of Keras's `fit`: two workers with one thread each, against plain `fit` and the frameworks' own ways.

    python benchmarks/keras_step.py [--rounds 4] [--steps 1.0]

Contestants live in processes of their own, and take turns with one epoch each; the first round is not counted. What
counts is the median of all single steps (on JAX, which returns before a step is done, of epochs): a machine that is
shared takes its cores away for many steps at a time, and more of them are hit where two cores have to work together.
Their mean, with all of that in it, is printed beside. Peers run with one and with two threads (DataParallel with four,
too), and are judged by the best. All have the same model, data, optimizer and allocator settings. Duoka's workers keep
to a core each, as its launcher has it; peers run on both. "plain" is `fit` as it comes; "mirrored" is
tf.distribute.MirroredStrategy on two logical CPUs, with its default collective,
"hierarchical" with HierarchicalCopyAllReduce; "dataparallel" is keras.distribution.DataParallel on JAX with two host
devices. "half" is plain `fit` on half of each batch in the processes of Duoka's workers, without any exchange.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
from dataclasses import dataclass
from pathlib import Path

from keras_contest import Contest, NoAnswer, read_steal, say_steal, serve

HERE = Path(__file__)


@dataclass(frozen=True)
class Case:
    model: str
    batch_size: int
    num_steps: int
    peers: dict[str, tuple[str, ...]]  # kinds by backend


EVERYTHING = {"tensorflow": ("plain", "mirrored", "hierarchical"), "jax": ("plain", "dataparallel")}
CASES = {
    "Reuters CNN, global batch 32": Case("reuters", 32, 100, EVERYTHING),
    "Reuters CNN, global batch 128": Case("reuters", 128, 30, EVERYTHING),
    "MobileNetV2 at 32x32, global batch 64": Case(
        "mobilenet", 64, 12, {"tensorflow": ("plain", "mirrored", "hierarchical")}
    ),
}
THREADS = {"dataparallel": (1, 2, 4)}  # of peers; XLA takes those of two devices from one pool
FEW = (1, 2)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", type=float, default=1.0, help="how many times the usual number of steps")
    parser.add_argument("--case", action="append", choices=list(CASES), help="only these")
    parser.add_argument("--backend", action="append", choices=list(EVERYTHING), help="only these")
    parser.add_argument("--serve", nargs=2, metavar=("KIND", "BACKEND"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        Contestant(*options.serve)
        return
    numbers: dict[str, dict[str, dict[str, float]]] = {}
    means: dict[str, dict[str, dict[str, float]]] = {}
    for backend in options.backend or EVERYTHING:  # one after the other: fewer processes at a time
        cases = {name: CASES[name] for name in options.case or CASES if backend in CASES[name].peers}
        with Contest() as contest:
            names = _start(contest, backend, {kind for case in cases.values() for kind in case.peers[backend]})
            for title, case in cases.items():
                num_steps = max(1, round(case.num_steps * options.steps))
                times, mean_times = measure(contest, names, title, options.rounds, num_steps)
                numbers.setdefault(title, {})[backend] = times
                means.setdefault(title, {})[backend] = mean_times
                print_case(f"{title}, {backend}", times, mean_times)
    if "DUOKA_BENCH_JSON" in os.environ:
        Path(os.environ["DUOKA_BENCH_JSON"]).write_text(
            json.dumps({"keras_step_ms": numbers, "keras_step_mean_ms": means})
        )


def _start(contest: Contest, backend: str, kinds: set[str]) -> list[str]:
    names = ["duoka", "half"]
    for name in names:
        words = ["-m", "duoka", "run", "--devices", "2", "--threads", "1", str(HERE), "--serve", name, backend]
        contest.start(name, words, {"KERAS_BACKEND": backend}, num_workers=2)
    for kind in sorted(kinds):
        for threads in THREADS.get(kind, FEW):
            names.append(f"{kind} {threads}")
            environ = {"KERAS_BACKEND": backend, "TF_NUM_INTEROP_THREADS": "2", "CUDA_VISIBLE_DEVICES": ""}
            environ |= dict.fromkeys(("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "NPROC"), str(threads))
            if kind == "dataparallel":
                environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
            contest.start(names[-1], [str(HERE), "--serve", kind, backend], environ)
    contest.wait_until_ready()
    return names


def measure(
    contest: Contest, names: list[str], title: str, num_rounds: int, num_steps: int
) -> tuple[dict[str, float], dict[str, float]]:
    """Medians of single steps, and their means, in milliseconds. Compiling happens before, for each by itself.

    A peer that hangs is left out, and named: XLA's own all-reduce waits for ever now and then where two devices share
    two threads.
    """
    times: dict[str, list[float]] = {name: [] for name in names}
    begin = read_steal()
    for number in range(-1, num_rounds + 1):
        for name in list(times) if number % 2 else list(times)[::-1]:
            try:
                answers = contest.ask([name], title=title, num_steps=num_steps)[name]
            except NoAnswer as error:
                if name == "duoka":
                    raise SystemExit(str(error)) from None
                print(f"{name} is left out of {title}: {str(error).splitlines()[1][:200]}", flush=True)
                del times[name]
                names.remove(name)
                continue
            if number > 0:
                times[name] += [max(each) * 1e3 for each in zip(*(answer["steps"] for answer in answers), strict=True)]
    print(f"{title}: {say_steal(begin)}")
    return tuple(
        {name: find(values) for name, values in times.items()} for find in (statistics.median, statistics.mean)
    )


def say_times(times: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.2f} ms" for name, value in times.items())


class Contestant:
    """One process: makes a model when it is asked for it the first time, and times epochs of it."""

    def __init__(self, kind: str, backend: str) -> None:
        from duoka.devices.heap import keep_freed_memory

        keep_freed_memory()  # as Duoka does in its workers
        self._scope = _scope_of(kind)
        self._part = 2 if kind == "half" else 1
        self._models: dict = {}
        serve(self.time_epoch)

    def time_epoch(self, title: str, num_steps: int) -> dict:
        import keras
        import keras_models

        case = CASES[title]
        if title not in self._models:
            self._models.clear()  # one at a time
            make, rows = {
                "reuters": (keras_models.make_reuters, keras_models.reuters_rows),
                "mobilenet": (keras_models.make_mobilenet, keras_models.picture_rows),
            }[case.model]
            with self._scope():
                model = make()
            batch_size = case.batch_size // self._part
            self._models[title] = model, keras_models.batches_of(rows(num_steps * batch_size), batch_size)
        times = keras_models.time_epoch(*self._models[title])
        # JAX returns before a step is done: there it is the epoch that can be timed.
        return {"steps": times.steps if keras.backend.backend() == "tensorflow" else [times.mean], "mean": times.mean}


def _scope_of(kind: str):
    """What goes around the making of a model."""
    if kind == "dataparallel":
        import keras

        devices = keras.distribution.list_devices("cpu")
        assert len(devices) == 2, devices
        keras.distribution.set_distribution(keras.distribution.DataParallel(devices=devices))
    strategy = make_strategy(kind)
    return strategy.scope if strategy and kind != "half" else contextlib.nullcontext


def make_strategy(kind: str):
    """Of Duoka or of TensorFlow; None where there is none."""
    if kind in ("duoka", "half"):
        import duoka

        return duoka.Mirrored(devices=2, threads=1, deadline_s=200)
    if kind not in ("mirrored", "hierarchical"):
        return None
    import tensorflow as tf

    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    collective = None if kind == "mirrored" else tf.distribute.HierarchicalCopyAllReduce()
    return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"], collective)


def better(times: dict[str, float], kind: str) -> float:
    return min(times[name] for threads in THREADS.get(kind, FEW) if (name := f"{kind} {threads}") in times)


def print_case(title: str, times: dict[str, float], means: dict[str, float]) -> None:
    print(f"{title}: {say_times(times)}; means: {say_times(means)}")
    kinds = dict.fromkeys(name.rpartition(" ")[0] for name in times if " " in name)
    print(
        "   duoka is " + ", ".join(f"{better(times, kind) / times['duoka']:.2f}x {kind}" for kind in kinds), flush=True
    )


if __name__ == "__main__":
    main()
