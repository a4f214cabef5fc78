"""Train Keras's MobileNetV2 on images in folders, on one device or on several. KERAS_BACKEND selects the backend.

python examples/mobilenet_mnist_keras/after.py                   all GPUs, or one CPU worker
duoka run --devices 2 examples/mobilenet_mnist_keras/after.py    2 GPUs, or 2 virtual CPU devices
duoka run --devices 2 examples/mobilenet_mnist_keras/after.py --data images

BatchNorm uses the samples of one replica. `duoka.Mirrored(sync_batchnorm=True)` uses the whole batch.
"""

import argparse

import keras

import duoka
from data import SIZE, load_sets

parser = argparse.ArgumentParser()
parser.add_argument("--data", help="a directory with train/<class>/*.png and test/<class>/*.png")
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--batch-size", type=int, default=64)
parser.add_argument("--steps", type=int, help="per epoch (default: the whole dataset)")
parser.add_argument("--width", type=float, default=1.0, help="of the layers; 1 is the published MobileNetV2")
options = parser.parse_args()

keras.utils.set_random_seed(0)
train_set, test_set, num_classes = load_sets(options.data, options.batch_size)

strategy = duoka.Mirrored()
strategy.print(f"data: {options.data or 'synthetic images; pass --data for real files'}")
with strategy.scope():
    model = keras.applications.MobileNetV2(
        input_shape=(SIZE, SIZE, 3), alpha=options.width, weights=None, classes=num_classes
    )
    model.compile(optimizer=keras.optimizers.Adam(1e-3), loss="sparse_categorical_crossentropy", metrics=["accuracy"])

model.fit(train_set, validation_data=test_set, epochs=options.epochs, steps_per_epoch=options.steps, verbose=2)
