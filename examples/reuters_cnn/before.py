"""Topics of Reuters newswires, on one device. KERAS_BACKEND chooses between tensorflow, jax and torch.

python examples/reuters_cnn/before.py --synthetic                  a small made-up set: runs anywhere
python examples/reuters_cnn/before.py --data ~/.keras/datasets     where Keras has put reuters.npz
"""

import argparse

import keras

from data import load_sets, make_dataset
from model import compile_model, create_model

parser = argparse.ArgumentParser()
source = parser.add_mutually_exclusive_group(required=True)
source.add_argument("--data", help="a directory with reuters.npz or reuters_flat.npz")
source.add_argument("--synthetic", action="store_true", help="make rows up")
parser.add_argument("--epochs", type=int, default=10)
parser.add_argument("--batch-size", type=int, default=32)
parser.add_argument("--steps", type=int, help="of an epoch; all of them otherwise")
options = parser.parse_args()

keras.utils.set_random_seed(0)
train, test = load_sets(options.data)
train_set = make_dataset(train, options.batch_size, shuffle=True)
test_set = make_dataset(test, options.batch_size, shuffle=False)

model = create_model(num_words=int(train[0].max()) + 1, num_topics=46)
model = compile_model(model)

history = model.fit(
    train_set, validation_data=test_set, epochs=options.epochs, steps_per_epoch=options.steps, verbose=2
)
