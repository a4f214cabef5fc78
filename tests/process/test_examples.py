"""The examples as users run them: the plain script, and the converted one on several workers."""

from __future__ import annotations

import gzip
import importlib.util
import re
import shutil
import sys
from functools import partial
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import load_file

from tests.limits import START_S
from tests.process.at_once import at_once
from tests.process.scripts import DUOKA_RUN, PYTHON, Run

pytestmark = [pytest.mark.torch, pytest.mark.timeout(3 * START_S)]
EXAMPLES = Path(__file__).parents[2] / "examples"
LEAVES = ["torchinductor_"]  # PyTorch's own, made by its optimizers
ONE_THREAD = {"OMP_NUM_THREADS": "1"}  # so small, they are not faster with more, and tests may run side by side


def run(directory: Path, command: tuple[str, ...], script: str, *options: str, timeout_s: float = START_S) -> str:
    """What a script printed. It has ended well, in time, and left nothing behind but its logs."""
    going = Run(directory, [*command, str(EXAMPLES / script), *options], ONE_THREAD)
    ended = going.finish(timeout_s, leaves=LEAVES)
    assert ended.code == 0, ended.out + ended.err
    return ended.out


def on_workers(num_workers: int, num_replicas: int) -> tuple[str, ...]:
    return (*DUOKA_RUN, "--devices", str(num_workers), "--replicas", str(num_replicas))


def numbers_after(word: str, text: str) -> list[float]:
    return [float(number) for number in re.findall(rf"{word} ([\d.]+)", text)]


# Digits.


@pytest.mark.slow
def test_digits_on_one_two_and_four_workers_end_with_equal_weights(tmp_path):
    runs = at_once(*(partial(train_digits, tmp_path / str(n), on_workers(n, 4), "after") for n in (1, 2, 4)))
    (text, weights), *others = runs
    assert re.fullmatch(r"data: .*\nloss [\d.]+  accuracy [\d.]+%\n", text)
    assert [other_text for other_text, _ in others] == [text, text]
    for _, other in others:
        assert {name: array.tobytes() for name, array in other.items()} == {
            name: array.tobytes() for name, array in weights.items()
        }


@pytest.mark.slow
def test_digits_without_dropout_has_the_numbers_of_the_plain_script_to_rounding(tmp_path):
    (plain_text, plain), (text, weights) = at_once(
        partial(train_digits, tmp_path / "plain", PYTHON, "before", "--dropout", "0"),
        partial(train_digits, tmp_path / "replicated", on_workers(2, 3), "after", "--dropout", "0"),
    )
    assert numbers_after("loss", text) == pytest.approx(numbers_after("loss", plain_text), rel=1e-5)
    assert numbers_after("accuracy", text) == numbers_after("accuracy", plain_text)
    for name, array in plain.items():
        np.testing.assert_allclose(weights[name], array, atol=1e-5 * abs(array).max(), rtol=0)


def train_digits(directory: Path, command: tuple[str, ...], script: str, *options: str) -> tuple[str, dict]:
    """Train two epochs: in the second one, the order of samples depends on what was drawn in the first."""
    file = directory / "weights.safetensors"
    directory.mkdir()
    text = run(directory, command, f"digits/{script}.py", "--epochs", "2", "--weights", str(file), *options)
    return text, load_file(file)


def test_the_demo_shows_equal_bits_and_that_all_of_its_trainings_learn(tmp_path):
    text = run(tmp_path, PYTHON, "demo.py", "--epochs", "3", "--workers", "1", "2", timeout_s=2 * START_S)
    rows = re.findall(r"^(\S.*?)  +([\d.]+) +([\d.]+) % +[\d.]+   ([0-9a-f]{12})$", text, re.MULTILINE)
    assert min(float(accuracy) for _, _, accuracy, _ in rows) > 30
    losses = [float(loss) for _, loss, _, _ in rows]
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-4)  # of the plain script
    hashes = {name: sha256 for name, _, _, sha256 in rows}
    plain = hashes.pop("plain script, no Duoka")
    assert list(hashes) == ["4 replicas on 1 worker", "4 replicas on 2 workers"]
    assert len(set(hashes.values())) == 1
    assert plain not in hashes.values()
    assert "Equal: every bit of the weights on 1 and 2 workers" in text


@pytest.mark.slow
def test_the_demo_fails_when_the_weights_depend_on_the_number_of_workers(tmp_path):
    shutil.copytree(EXAMPLES, tmp_path / "examples")
    script = tmp_path / "examples" / "digits" / "after.py"
    script.write_text(script.read_text().replace("torch.manual_seed(0)", "torch.manual_seed(strategy.num_workers)"))
    words = [*PYTHON, str(tmp_path / "examples" / "demo.py"), "--epochs", "1", "--workers", "1", "2"]
    ended = Run(tmp_path, words, ONE_THREAD).finish(2 * START_S, leaves=LEAVES)
    assert ended.code == 1
    assert "The weights depend on the number of workers" in ended.err


# GPT.


GPT = ("--steps", "40", "--width", "32", "--layers", "1", "--context", "48")


@pytest.mark.slow
def test_gpt_with_batches_of_its_own_has_the_losses_of_the_plain_script(tmp_path):
    plain = run(tmp_path, PYTHON, "gpt/before.py", *GPT, "--dropout", "0")
    replicated = run(tmp_path, on_workers(2, 3), "gpt/after.py", *GPT, "--dropout", "0")
    assert len(numbers_after("loss", plain)) == 2
    assert numbers_after("loss", replicated) == pytest.approx(numbers_after("loss", plain), rel=1e-5)


@pytest.mark.slow
def test_gpt_prints_the_same_on_one_and_two_workers_with_dropout_too(tmp_path):
    options = (*GPT, "--dropout", "0.1")
    first, second = at_once(
        *(partial(run, tmp_path / str(n), on_workers(n, 2), "gpt/after.py", *options) for n in (1, 2))
    )
    assert len(numbers_after("loss", first)) == 2
    assert first == second


def test_a_text_that_is_shorter_than_the_context_is_refused(tmp_path):
    (tmp_path / "short.txt").write_text("too short")
    with pytest.raises(SystemExit, match="9 characters"):
        load_module("gpt/data").Text(tmp_path / "short.txt", 64)


# CIFAR-10.


@pytest.mark.parametrize(
    ("script", "command"), [pytest.param("before", PYTHON, marks=pytest.mark.slow), ("after", on_workers(2, 4))]
)
@pytest.mark.slow
def test_cifar_resumes_from_its_newest_checkpoint(tmp_path, script, command):
    options = ("--width", "16", "--decay-epochs", "1", "--checkpoints", str(tmp_path / "saved"))
    first = run(tmp_path, command, f"cifar10_cnn/{script}.py", "--epochs", "1", *options)
    second = run(tmp_path, command, f"cifar10_cnn/{script}.py", "--epochs", "2", *options)
    assert numbers_after("learning rate", first) == [0.02]
    assert re.findall(r"step 10 .* \d+ images/s\n", first)
    assert len(list((tmp_path / "saved").iterdir())) >= 2
    assert re.findall(r"epoch (\d)  loss", second) == ["1"]
    assert numbers_after("learning rate", second) == [0.01]
    # A model that started anew at this learning rate would end where the first one did.
    assert numbers_after("loss", second)[0] < numbers_after("loss", first)[0] - 0.01


# MobileNetV2.


@pytest.mark.slow
def test_mobilenet_learns_from_idx_files_and_from_folders_of_pictures(tmp_path):
    write_idx_files(tmp_path / "idx")
    write_pictures(tmp_path / "pictures")
    small = ("--epochs", "1", "--width", "0.1", "--batch-size", "16")
    plain = run(tmp_path, PYTHON, "mobilenet_mnist/before.py", "--data", str(tmp_path / "idx"), *small)
    replicated = run(
        tmp_path, on_workers(2, 2), "mobilenet_mnist/after.py", "--data", str(tmp_path / "pictures"), *small
    )
    for text in (plain, replicated):
        assert re.fullmatch(r"data: .*\nepoch 0  loss [\d.]+  accuracy [\d.]+%\n", text)


def write_idx_files(path: Path) -> None:
    """64 images to train with, 16 to test with; one file of each kind packed, the other not."""
    path.mkdir()
    rng = np.random.default_rng(0)
    for part, num_rows in (("train", 64), ("t10k", 16)):
        images = rng.integers(0, 256, (num_rows, 28, 28), np.uint8)
        header = bytes([0, 0, 8, 3]) + np.array(images.shape, ">i4").tobytes()
        (path / f"{part}-images-idx3-ubyte.gz").write_bytes(gzip.compress(header + images.tobytes()))
        header = bytes([0, 0, 8, 1]) + np.array([num_rows], ">i4").tobytes()
        (path / f"{part}-labels-idx1-ubyte").write_bytes(header + bytes(row % 10 for row in range(num_rows)))


def write_pictures(path: Path) -> None:
    """Two classes of colours: 20 pictures each to train with, 5 to test with, of different kinds and sizes."""
    for part, num_rows in (("train", 20), ("test", 5)):
        for name, colour in (("dark", (20, 30, 40)), ("light", (200, 220, 240))):
            directory = path / part / name
            directory.mkdir(parents=True)
            for row in range(num_rows):
                Image.new("RGB", (20 + row, 30), colour).save(directory / f"{row}.{'png' if row % 2 else 'jpg'}")


# Keras.

ON_TORCH = {"KERAS_BACKEND": "torch", "TF_CPP_MIN_LOG_LEVEL": "3"}  # the backend that starts fastest


def run_keras(directory: Path, command: tuple[str, ...], script: str, *options: str, backend: str = "torch") -> str:
    one_thread = dict.fromkeys(("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS"), "1")
    environ = one_thread | ON_TORCH | {"KERAS_BACKEND": backend}
    ended = Run(directory, [*command, str(EXAMPLES / script), *options], environ).finish(280, leaves=LEAVES)
    assert ended.code == 0, ended.out + ended.err
    return ended.out


@pytest.mark.timeout(600)
@pytest.mark.slow
def test_reuters_has_the_losses_of_the_plain_script(tmp_path):
    small = ("--synthetic", "--epochs", "2", "--steps", "12")
    plain = run_keras(tmp_path, PYTHON, "reuters_cnn/before.py", *small)
    replicated = run_keras(tmp_path, on_workers(2, 2), "reuters_cnn/after.py", *small)
    losses = numbers_after("loss:", plain)
    assert len(losses) == 4  # of training and validation
    assert numbers_after("loss:", replicated) == pytest.approx(losses, rel=2e-3)  # Nadam, and four digits


@pytest.mark.timeout(600)
@pytest.mark.slow
@pytest.mark.parametrize("backend", ["tensorflow", "jax", "torch"])
def test_mobilenet_of_keras_learns_from_folders_of_pictures(tmp_path, backend):
    write_pictures(tmp_path / "pictures")
    words = ("--data", str(tmp_path / "pictures"), "--epochs", "1", "--width", "0.1", "--batch-size", "16")
    for command, script in ((PYTHON, "before"), (on_workers(2, 2), "after")):
        text = run_keras(tmp_path, command, f"mobilenet_mnist_keras/{script}.py", *words, backend=backend)
        assert re.findall(r"^2/2 - .* - loss: [\d.]+ - .*val_loss: [\d.]+$", text, re.MULTILINE), text


@pytest.mark.timeout(600)
@pytest.mark.slow
@pytest.mark.parametrize("backend", ["tensorflow", "torch"])
def test_cats_and_dogs_are_read_from_a_folder_trained_with_and_saved(tmp_path, backend):
    write_pictures(tmp_path / "pictures")
    words = ("--data", str(tmp_path / "pictures" / "train"), "--epochs", "1", "--width", "0.1", "--batch-size", "16")
    for command, script in ((PYTHON, "before"), (on_workers(2, 2), "after")):
        saved = tmp_path / f"{script}.keras"
        more = ("--size", "64", "--save", str(saved))
        text = run_keras(tmp_path, command, f"cats_and_dogs/{script}.py", *words, *more, backend=backend)
        assert re.findall(r"^2/2 - .* - loss: [\d.]+ - .*val_loss: [\d.]+$", text, re.MULTILINE), text
        assert saved.stat().st_size > 100_000


# What the loaders of data refuse.


def load_module(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.replace("/", "_"), EXAMPLES / f"{path}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_pictures_come_grey_small_and_with_the_label_of_their_folder(tmp_path):
    write_pictures(tmp_path)
    train_set, test_set, num_classes = load_module("mobilenet_mnist/data").load_sets(str(tmp_path))
    assert (len(train_set), len(test_set), num_classes) == (40, 10, 2)
    (dark, label), (light, other_label) = train_set[0], train_set[39]
    assert dark.shape == light.shape == (1, 28, 28)
    assert (label, other_label) == (0, 1)
    assert dark.max() < -0.3 < 0.3 < light.min()


def test_pictures_without_pillow_are_an_error_that_says_what_to_install(tmp_path, monkeypatch):
    write_pictures(tmp_path)
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(SystemExit, match="pip install pillow"):
        load_module("mobilenet_mnist/data").load_sets(str(tmp_path))


def test_an_idx_file_that_is_cut_short_is_refused(tmp_path):
    write_idx_files(tmp_path / "idx")
    file = tmp_path / "idx" / "t10k-labels-idx1-ubyte"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(SystemExit, match="should hold 16 values and holds 15"):
        load_module("mobilenet_mnist/data").load_sets(str(tmp_path / "idx"))


def test_a_directory_without_data_is_an_error_that_says_what_is_looked_for(tmp_path):
    with pytest.raises(SystemExit, match="train-images-idx3-ubyte"):
        load_module("mobilenet_mnist/data").load_sets(str(tmp_path))
    with pytest.raises(SystemExit, match=r"data_batch\*\.bin"):
        load_module("cifar10_cnn/data").load_sets(str(tmp_path))


def test_cifar_files_are_read_packed_or_not_and_in_order(tmp_path):
    records = np.random.default_rng(0).integers(0, 10, (6, 3073), np.uint8)
    (tmp_path / "data_batch_1.bin.gz").write_bytes(gzip.compress(records[:3].tobytes()))
    (tmp_path / "data_batch_2.bin").write_bytes(records[3:5].tobytes())
    (tmp_path / "test_batch.bin").write_bytes(records[5:].tobytes())
    train_set, test_set = load_module("cifar10_cnn/data").load_sets(str(tmp_path))
    assert train_set.labels.tolist() == records[:5, 0].tolist()
    image, label = test_set[0]
    assert label == records[5, 0]
    assert image.flatten().tolist() == (records[5, 1:].astype(np.float32) / 128 - 1).tolist()


def test_cifar_in_its_python_version_is_refused_because_it_is_made_of_pickles(tmp_path):
    (tmp_path / "data_batch_1").write_bytes(b"\x80\x02")
    with pytest.raises(SystemExit, match="pickles"):
        load_module("cifar10_cnn/data").load_sets(str(tmp_path))
