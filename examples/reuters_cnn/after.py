"""Topics of Reuters newswires, on one device or on many. KERAS_BACKEND chooses between tensorflow, jax and torch.

python examples/reuters_cnn/after.py --synthetic                        every card here; without one, one CPU
duoka run --devices 2 examples/reuters_cnn/after.py --synthetic         2 cards; without them, 2 virtual CPU devices
duoka run --devices 2 examples/reuters_cnn/after.py --data ~/.keras/datasets
"""

import argparse

import keras

import duoka
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

strategy = duoka.Mirrored()
with strategy.scope():
    model = create_model(num_words=int(train[0].max()) + 1, num_topics=46)
    model = compile_model(model)

history = model.fit(
    train_set, validation_data=test_set, epochs=options.epochs, steps_per_epoch=options.steps, verbose=2
)
