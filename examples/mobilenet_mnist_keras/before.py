"""MobileNetV2 on a folder of MNIST pictures, on one device. KERAS_BACKEND chooses tensorflow, jax or torch.

python examples/mobilenet_mnist_keras/before.py --synthetic           a small made-up set: runs anywhere
python examples/mobilenet_mnist_keras/before.py --data pictures       train/0..9 and test/0..9 (see make_folder.py)
"""

import argparse

import keras

from data import SIZE, load_sets

parser = argparse.ArgumentParser()
source = parser.add_mutually_exclusive_group(required=True)
source.add_argument("--data", help="a directory with train/<class>/*.png and test/<class>/*.png")
source.add_argument("--synthetic", action="store_true", help="make pictures up")
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--batch-size", type=int, default=64)
parser.add_argument("--steps", type=int, help="of an epoch; all of them otherwise")
parser.add_argument("--width", type=float, default=1.0, help="of the layers; 1 is MobileNetV2 as published")
options = parser.parse_args()

keras.utils.set_random_seed(0)
train_set, test_set, num_classes = load_sets(options.data, options.batch_size)

model = keras.applications.MobileNetV2(
    input_shape=(SIZE, SIZE, 3), alpha=options.width, weights=None, classes=num_classes
)
model.compile(optimizer=keras.optimizers.Adam(1e-3), loss="sparse_categorical_crossentropy", metrics=["accuracy"])

model.fit(train_set, validation_data=test_set, epochs=options.epochs, steps_per_epoch=options.steps, verbose=2)
