"""The examples with TensorFlow loops: the plain script, and the converted one on several workers."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.process.scripts import DUOKA_RUN, PYTHON, Ended, Run

pytestmark = [pytest.mark.tensorflow, pytest.mark.timeout(600)]
EXAMPLES = Path(__file__).parents[2] / "examples"
SETTINGS = dict.fromkeys(("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS"), "1") | {
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "CUDA_VISIBLE_DEVICES": "-1",
}
# Runs an example as it is, and then tells the bits of what it has trained.
DRIVER = """
import hashlib, runpy, sys
from pathlib import Path

script = sys.argv[1]
sys.argv = sys.argv[1:]
sys.path.insert(0, str(Path(script).parent))
left = runpy.run_path(script, run_name="__main__")
models = [value for value in left.values() if hasattr(value, "trainable_variables") and hasattr(value, "layers")]
assert models
values = [variable.numpy().tobytes() for model in models for variable in model.variables]
print("weights", hashlib.sha256(b"".join(values)).hexdigest())
"""


def run(directory: Path, command: tuple[str, ...], script: str, *options: str) -> Ended:
    driver = directory / "driver.py"
    driver.write_text(DRIVER)
    ended = Run(directory, [*command, str(driver), str(EXAMPLES / script), *options], SETTINGS).finish(290)
    assert ended.code == 0, ended.out + ended.err
    return ended


def on_workers(num_workers: int, num_replicas: int) -> tuple[str, ...]:
    return (*DUOKA_RUN, "--devices", str(num_workers), "--replicas", str(num_replicas))


def numbers_after(word: str, text: str) -> list[float]:
    return [float(number) for number in re.findall(rf"{word} ([\d.]+)", text)]


def weights(ended: Ended) -> str:
    """One line, although every worker prints it: they are equal."""
    (sha256,) = re.findall(r"weights ([0-9a-f]{64})", ended.out)
    return sha256


def compare_gans(plain: Ended, replicated: Ended, num_epochs: int) -> None:
    for word in ("generator", "discriminator"):
        losses = numbers_after(f"  {word}", plain.out)
        assert len(losses) == num_epochs
        assert numbers_after(f"  {word}", replicated.out) == pytest.approx(losses, rel=1e-5, abs=1e-6)


@pytest.mark.slow
def test_the_gan_has_the_losses_of_the_plain_script_and_one_bar(tmp_path):
    small = ("--synthetic", "--epochs", "1", "--rows", "150")  # the last batch has 22
    plain = run(tmp_path, PYTHON, "gan_tensorflow/before.py", *small)
    replicated = run(tmp_path, on_workers(2, 2), "gan_tensorflow/after.py", *small)
    compare_gans(plain, replicated, num_epochs=1)
    bars = re.findall(r"^(.*epoch 0: 3/3, .*generator \d+\.\d{4}, discriminator \d+\.\d{4}, .*)$", replicated.err, re.M)
    assert len(bars) == 1 and not bars[0].startswith("[w1]"), replicated.err


@pytest.mark.slow
def test_the_gan_on_uneven_replicas_and_on_other_numbers_of_workers(tmp_path):
    small = ("--synthetic", "--epochs", "2", "--rows", "150")
    plain = run(tmp_path, PYTHON, "gan_tensorflow/before.py", *small)
    first, second = (run(tmp_path, on_workers(n, 3), "gan_tensorflow/after.py", *small) for n in (1, 2))
    compare_gans(plain, first, num_epochs=2)
    assert weights(first) == weights(second) != weights(plain)


@pytest.mark.slow
def test_the_gan_reads_the_pictures_of_mnist(tmp_path):
    (tmp_path / "mnist").mkdir()
    pixels = np.random.default_rng(0).integers(0, 256, 40 * 784, np.uint8)
    header = bytes([0, 0, 8, 3]) + np.array([40, 28, 28], ">i4").tobytes()
    file = tmp_path / "mnist" / "train-images-idx3-ubyte"
    file.write_bytes(header + pixels.tobytes())
    words = ("--data", str(file.parent), "--epochs", "1", "--batch-size", "20")
    assert "2/2" in run(tmp_path, PYTHON, "gan_tensorflow/before.py", *words).err
    file.write_bytes(file.read_bytes()[:-1])
    ended = Run(tmp_path, [*PYTHON, str(EXAMPLES / "gan_tensorflow/before.py"), *words], SETTINGS).finish(120)
    assert ended.code == 1 and "cut short" in ended.err


@pytest.mark.slow
def test_mobilenet_in_a_loop_has_equal_bits_on_one_and_two_workers_from_a_folder_of_pictures(tmp_path):
    for name, colour in (("dark", 30), ("light", 220)):
        directory = tmp_path / "pictures" / "train" / name
        directory.mkdir(parents=True)
        for row in range(20):
            Image.new("RGB", (20 + row, 30), (colour, colour, row)).save(directory / f"{row}.png")
    words = ("--data", str(tmp_path / "pictures"), "--epochs", "1", "--width", "0.1", "--batch-size", "16")
    plain = run(tmp_path, PYTHON, "mobilenet_mnist_loop/before.py", *words)
    first, second = (run(tmp_path, on_workers(n, 2), "mobilenet_mnist_loop/after.py", *words) for n in (1, 2))
    line = r"epoch 0  loss [\d.]+  accuracy [\d.]+%"
    assert all(re.search(line, ended.out) for ended in (plain, first, second))
    assert re.search(line, first.out)[0] == re.search(line, second.out)[0]
    assert weights(first) == weights(second)
    assert re.findall(r"^Epoch 1/1: 2/2, .*loss \d+\.\d{4}, accuracy \d\.\d{4}, ", second.err, re.M)
