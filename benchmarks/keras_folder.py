"""MobileNetV2 on a folder of small pictures that have to be decoded: two workers with one thread against plain `fit`.

    python benchmarks/keras_folder.py [--rounds 3] [--pictures 512 | --folder pictures/train]

The pictures are made up, or those of a folder: examples/mobilenet_mnist_keras/make_folder.py writes MNIST's.
TensorFlow, keras.utils.image_dataset_from_directory, batch 64. Contestants take turns with one epoch each; the first
round is not counted. Plain `fit` runs with one and with two threads, and is judged by the better of the two.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import tempfile
from pathlib import Path

import numpy as np
from keras_contest import Contest, serve

BATCH = 64


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
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
        speeds = measure(contest, folder, options.rounds, sum(1 for _ in Path(folder).rglob("*.png")))
    for name, speed in speeds.items():
        print(f"{name:>8}: {speed:.0f} images/s")
    ratio = speeds["duoka"] / max(speeds["plain 1"], speeds["plain 2"])
    print(f"a folder of pictures, two workers: {ratio:.2f}x plain")
    if "DUOKA_BENCH_JSON" in os.environ:
        Path(os.environ["DUOKA_BENCH_JSON"]).write_text(json.dumps({"keras_folder_images_s": speeds}))


def write_pictures(directory: Path, num_pictures: int) -> None:
    """Like MNIST's as PNG files: 28 x 28 grey pixels, ten folders."""
    from PIL import Image

    rng = np.random.default_rng(0)
    for number in range(num_pictures):
        folder = directory / str(number % 10)
        folder.mkdir(exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (28, 28), np.uint8)).save(folder / f"{number:05}.png")


def measure(contest: Contest, directory: str, num_rounds: int, num_pictures: int) -> dict[str, float]:
    script = os.path.abspath(__file__)
    ours = ("-m", "duoka", "run", "--devices", "2", "--threads", "1")
    contest.start("duoka", [*ours, script, "--serve", "duoka"], {"KERAS_BACKEND": "tensorflow"}, num_workers=2)
    for threads in ("1", "2"):
        environ = {"KERAS_BACKEND": "tensorflow", "TF_NUM_INTEROP_THREADS": "2", "CUDA_VISIBLE_DEVICES": ""}
        environ |= dict.fromkeys(("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS"), threads)
        contest.start(f"plain {threads}", [script, "--serve", "plain"], environ)
    contest.wait_until_ready()
    names = ["duoka", "plain 1", "plain 2"]
    contest.ask(names, directory=directory)  # compiles
    times: dict[str, list[float]] = {name: [] for name in names}
    for number in range(num_rounds + 1):
        for name in names if number % 2 else names[::-1]:
            answers = contest.ask([name], directory=directory)[name]
            if number:
                times[name].append(max(answers))
    return {name: num_pictures / statistics.median(values) for name, values in times.items()}


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
