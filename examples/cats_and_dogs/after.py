"""Cats or dogs at 224 pixels, on one device or on many. KERAS_BACKEND chooses the backend; TensorFlow reads the files.

python examples/cats_and_dogs/after.py --synthetic                      every card here; without one, one CPU
duoka run --devices 2 examples/cats_and_dogs/after.py --synthetic       2 cards; without them, 2 virtual CPU devices
duoka run --devices 2 examples/cats_and_dogs/after.py --data pictures --save model.keras
"""

import argparse

import keras

import duoka
from data import load_sets

parser = argparse.ArgumentParser()
source = parser.add_mutually_exclusive_group(required=True)
source.add_argument("--data", help="a directory with two folders of pictures")
source.add_argument("--synthetic", action="store_true", help="make pictures up")
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--batch-size", type=int, default=32)
parser.add_argument("--steps", type=int, help="of an epoch; all of them otherwise")
parser.add_argument("--size", type=int, default=224, help="pixels")
parser.add_argument("--width", type=float, default=1.0, help="of the layers; 1 is MobileNetV2 as published")
parser.add_argument("--save", help="write the trained model to this .keras file")
options = parser.parse_args()

keras.utils.set_random_seed(0)
train_set, validation_set = load_sets(options.data, options.batch_size, options.size)

strategy = duoka.Mirrored()
with strategy.scope():
    inputs = keras.Input((options.size, options.size, 3))
    scaled = keras.layers.Rescaling(1 / 127.5, offset=-1)(inputs)
    outputs = keras.applications.MobileNetV2(input_tensor=scaled, alpha=options.width, weights=None, classes=2).output
    model = keras.Model(inputs, outputs)
    model.compile(optimizer=keras.optimizers.Adam(1e-3), loss="sparse_categorical_crossentropy", metrics=["accuracy"])

model.fit(train_set, validation_data=validation_set, epochs=options.epochs, steps_per_epoch=options.steps, verbose=2)
if options.save:
    model.save(options.save)
