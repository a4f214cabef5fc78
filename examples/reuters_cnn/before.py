"""Classify Reuters newswires with Keras, on one device. KERAS_BACKEND selects the backend.

python examples/reuters_cnn/before.py
python examples/reuters_cnn/before.py --data ~/.keras/datasets --epochs 10
"""

import argparse

import keras

from data import load_sets, make_dataset
from model import compile_model, create_model

parser = argparse.ArgumentParser()
parser.add_argument("--data", help="a directory with reuters.npz or reuters_flat.npz")
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--batch-size", type=int, default=32)
parser.add_argument("--steps", type=int, help="per epoch (default: the whole dataset)")
options = parser.parse_args()
print(f"data: {options.data or 'synthetic newswires; pass --data for real files'}")

keras.utils.set_random_seed(0)
train, test = load_sets(options.data)
train_set = make_dataset(train, options.batch_size, shuffle=True)
test_set = make_dataset(test, options.batch_size, shuffle=False)

model = create_model(num_words=int(train[0].max()) + 1, num_topics=46)
model = compile_model(model)

history = model.fit(
    train_set, validation_data=test_set, epochs=options.epochs, steps_per_epoch=options.steps, verbose=2
)
