"""CIFAR-10 from its binary version, or synthetic images; and which samples a step trains on."""

import gzip
from pathlib import Path

import numpy as np

RECORD = 1 + 3 * 32 * 32  # a label, then the red, green and blue plane


def load(directory: str | None) -> tuple[np.ndarray, np.ndarray]:
    """Return images, 32 x 32 x 3 from -1 to 1, and labels. Without a directory, they are synthetic.

    The directory holds CIFAR-10's binary version: `data_batch_1.bin` and so on, as many as there are, gzipped
    or not.
    """
    if directory is None:
        return make_up(num_rows=512)
    files = sorted([*Path(directory).glob("data_batch*.bin"), *Path(directory).glob("data_batch*.bin.gz")])
    if not files:
        raise SystemExit(
            f"{directory} has no data_batch*.bin or data_batch*.bin.gz; these are CIFAR-10's binary version."
        )
    records = np.concatenate([read_records(file) for file in files])
    planes = records[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    return planes.astype("float32") / 128 - 1, records[:, 0].astype("int32")


def read_records(file: Path) -> np.ndarray:
    data = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
    if not data or len(data) % RECORD:
        raise SystemExit(f"{file} has {len(data)} bytes, which is no whole number of records of {RECORD}.")
    return np.frombuffer(data, np.uint8).reshape(-1, RECORD)


def make_up(num_rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Ten fixed patterns of 8 x 8 patches, each row one of them under noise."""
    rng = np.random.default_rng(0)
    patterns = rng.uniform(-0.5, 0.5, (10, 4, 4, 3)).repeat(8, axis=1).repeat(8, axis=2)
    labels = rng.integers(0, 10, num_rows)
    return (patterns[labels] + rng.uniform(-0.5, 0.5, (num_rows, 32, 32, 3))).astype("float32"), labels.astype("int32")


def rows_of_step(step: int, batch_size: int, num_rows: int) -> np.ndarray:
    """Shuffle each epoch differently. The order depends only on the step, so a resumed run reads the next batch."""
    epoch, place = divmod(step, num_rows // batch_size)
    order = np.random.default_rng(epoch).permutation(num_rows)
    return order[place * batch_size : (place + 1) * batch_size]
