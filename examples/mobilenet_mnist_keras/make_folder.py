"""Write MNIST's four files out as pictures: train/0..9 and test/0..9.

python examples/mobilenet_mnist_keras/make_folder.py mnist pictures --rows 6000
"""

import argparse
import gzip
from pathlib import Path

import numpy as np
from PIL import Image

parser = argparse.ArgumentParser()
parser.add_argument("source", type=Path, help="a directory with train-images-idx3-ubyte.gz and the other three")
parser.add_argument("target", type=Path, help="the folder to make")
parser.add_argument("--rows", type=int, help="of each part; all of them otherwise")
options = parser.parse_args()


def read(name: str, header: int) -> np.ndarray:
    file = options.source / name
    data = gzip.decompress(file.read_bytes())
    return np.frombuffer(data, np.uint8, offset=header)


for part, target in (("train", "train"), ("t10k", "test")):
    images = read(f"{part}-images-idx3-ubyte.gz", header=16).reshape(-1, 28, 28)
    labels = read(f"{part}-labels-idx1-ubyte.gz", header=8)
    for number, (image, label) in enumerate(zip(images[: options.rows], labels, strict=False)):
        directory = options.target / target / str(label)
        directory.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(directory / f"{number:05}.png")
