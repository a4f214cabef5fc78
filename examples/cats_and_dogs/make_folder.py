"""Write the cats and dogs among CIFAR-10's pictures out as files: cat/*.png and dog/*.png. They have 32 x 32 pixels.

python examples/cats_and_dogs/make_folder.py cifar10 pictures --rows 500
"""

import argparse
import gzip
from pathlib import Path

import numpy as np
from PIL import Image

CLASSES = {3: "cat", 5: "dog"}

parser = argparse.ArgumentParser()
parser.add_argument("source", type=Path, help="a directory with data_batch_1.bin, packed with gzip or not")
parser.add_argument("target", type=Path, help="the folder to make")
parser.add_argument("--rows", type=int, help="of each class; all of them otherwise")
options = parser.parse_args()

for file in sorted(options.source.glob("data_batch_*.bin*")):
    data = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
    records = np.frombuffer(data, np.uint8).reshape(-1, 3073)  # a label, then planes of red, green and blue
    for label, name in CLASSES.items():
        directory = options.target / name
        directory.mkdir(parents=True, exist_ok=True)
        for number, record in enumerate(records[records[:, 0] == label][: options.rows]):
            image = Image.fromarray(record[1:].reshape(3, 32, 32).transpose(1, 2, 0))
            image.save(directory / f"{file.name.partition('.')[0]}-{number:05}.png")
