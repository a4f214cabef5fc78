"""MobileNetV2 on a folder of small pictures that have to be decoded: two workers with one thread against plain `fit`.

    python benchmarks/keras_folder.py [--rounds 15] [--pictures 512 | --folder pictures/train]

The pictures are made up, or those of a folder: examples/mobilenet_mnist_keras/make_folder.py writes MNIST's.
TensorFlow, keras.utils.image_dataset_from_directory, batch 64. Contestants take turns with one epoch each, in paired
rounds. Plain `fit` runs with one and with two threads, twice each in a round, and the better of the two counts.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import tempfile
from pathlib import Path

import numpy as np
import paired
from keras_contest import Contest, serve

BATCH = 64


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=paired.MIN_ROUNDS)
    parser.add_argument("--pictures", type=int, default=512)
    parser.add_argument("--folder", help="with a folder of pictures for each class")
    parser.add_argument("--serve", choices=("plain", "duoka"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        Contestant(is_ours=options.serve == "duoka")
        return
    with tempfile.TemporaryDirectory() as directory, Contest() as contest:
        if options.folder is None:
            write_pictures(Path(directory), options.pictures)
        folder = os.path.abspath(options.folder or directory)
        found = measure(contest, folder, options.rounds)
        num_pictures = sum(1 for _ in Path(folder).rglob("*.png"))
    for name in found.times:
        print(f"{name:>14}: {1e3 * num_pictures / found.typical(name):.0f} images/s")
    better = found.better(["plain"])
    assert better is not None
    print(f"a folder of pictures, two workers: {better}/duoka {found.against(better)}, A/A {found.control(better)}")
    if "DUOKA_BENCH_JSON" in os.environ:
        Path(os.environ["DUOKA_BENCH_JSON"]).write_text(json.dumps({"keras_folder_ms": found.write()}))


def write_pictures(directory: Path, num_pictures: int) -> None:
    """Like MNIST's as PNG files: 28 x 28 grey pixels, ten folders."""
    from PIL import Image

    rng = np.random.default_rng(0)
    for number in range(num_pictures):
        folder = directory / str(number % 10)
        folder.mkdir(exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (28, 28), np.uint8)).save(folder / f"{number:05}.png")


def measure(contest: Contest, directory: str, num_rounds: int) -> paired.Contest:
    script = os.path.abspath(__file__)
    ours = ("-m", "duoka", "run", "--devices", "2", "--threads", "1")
    contest.start("duoka", [*ours, script, "--serve", "duoka"], {"KERAS_BACKEND": "tensorflow"}, num_workers=2)
    for threads in ("1", "2"):
        environ = {"KERAS_BACKEND": "tensorflow", "TF_NUM_INTEROP_THREADS": "2", "CUDA_VISIBLE_DEVICES": ""}
        environ |= dict.fromkeys(("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS"), threads)
        contest.start(f"plain {threads}", [script, "--serve", "plain"], environ)
    contest.wait_until_ready()
    contest.ask(["duoka", "plain 1", "plain 2"], directory=directory)  # compiles
    return paired.Contest.of(
        paired.run_rounds(
            paired.arrange(["plain 1", "plain 2"], []),
            lambda name: [max(contest.ask([name], directory=directory)[name])],
            num_rounds,
        )
    )


class Contestant:
    def __init__(self, *, is_ours: bool) -> None:
        from duoka.devices.heap import keep_freed_memory

        keep_freed_memory()  # as Duoka does in its workers
        self._scope = contextlib.nullcontext
        if is_ours:
            import duoka

            self._scope = duoka.Mirrored(devices=2, threads=1, deadline_s=200).scope
        self._run: tuple | None = None
        serve(self.time_epoch)

    def time_epoch(self, directory: str) -> float:
        import keras
        import keras_models

        if self._run is None:
            with self._scope():
                model = keras_models.make_mobilenet()
            dataset = keras.utils.image_dataset_from_directory(
                directory, image_size=(32, 32), batch_size=BATCH, seed=0, verbose=False
            )
            self._run = model, {"x": dataset.map(lambda pixels, label: (pixels / 127.5 - 1, label))}
        return keras_models.time_epoch(*self._run).seconds


if __name__ == "__main__":
    main()
