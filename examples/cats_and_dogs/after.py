"""Classify cats and dogs with Keras, on one device or on several.

KERAS_BACKEND selects the backend. TensorFlow reads the files on every backend.

python examples/cats_and_dogs/after.py                   all GPUs, or one CPU worker
duoka run --devices 2 examples/cats_and_dogs/after.py    2 GPUs, or 2 virtual CPU devices
duoka run --devices 2 examples/cats_and_dogs/after.py --data images --save model.keras
"""

import argparse

import keras

import duoka
from data import load_sets

parser = argparse.ArgumentParser()
parser.add_argument("--data", help="a directory with two folders of images")
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--batch-size", type=int, default=32)
parser.add_argument("--steps", type=int, help="per epoch (default: the whole dataset)")
parser.add_argument("--size", type=int, help="in pixels (default: 224, or 64 with synthetic images)")
parser.add_argument("--width", type=float, default=1.0, help="of the layers; 1 is the published MobileNetV2")
parser.add_argument("--save", help="write the trained model to this .keras file")
options = parser.parse_args()
size = options.size or (224 if options.data else 64)

keras.utils.set_random_seed(0)
train_set, validation_set = load_sets(options.data, options.batch_size, size)

strategy = duoka.Mirrored()
strategy.print(f"data: {options.data or 'synthetic images; pass --data for real files'}")
with strategy.scope():
    inputs = keras.Input((size, size, 3))
    scaled = keras.layers.Rescaling(1 / 127.5, offset=-1)(inputs)
    outputs = keras.applications.MobileNetV2(input_tensor=scaled, alpha=options.width, weights=None, classes=2).output
    model = keras.Model(inputs, outputs)
    model.compile(optimizer=keras.optimizers.Adam(1e-3), loss="sparse_categorical_crossentropy", metrics=["accuracy"])

model.fit(train_set, validation_data=validation_set, epochs=options.epochs, steps_per_epoch=options.steps, verbose=2)
if options.save:
    model.save(options.save)
