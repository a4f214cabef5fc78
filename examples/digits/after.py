"""Train a small CNN on scikit-learn's digits, on one device or on several.

python examples/digits/after.py                   all GPUs, or one CPU worker
duoka run --devices 2 examples/digits/after.py    2 GPUs, or 2 virtual CPU devices

With `--dropout 0` it prints the numbers of `before.py --dropout 0`.
With `--devices 1 --replicas 4` and `--devices 4` the weights are bitwise identical on CPU.
"""

import argparse

import torch
from torch.nn import functional
from torch.utils.data import DataLoader

import duoka
from data import load_sets
from model import make_model

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--dropout", type=float, default=0.25)
parser.add_argument("--checkpoints", help="a directory: a run that is started again continues from there")
parser.add_argument("--weights", help="write the trained weights to this safetensors file")
options = parser.parse_args()

strategy = duoka.Mirrored()
strategy.print("data: scikit-learn's digits")
torch.manual_seed(0)
model = make_model(options.dropout)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
train_set, test_set = load_sets()
train_loader = DataLoader(train_set, batch_size=64, shuffle=True)
test_loader = DataLoader(test_set, batch_size=100)
model, optimizer, train_loader = strategy.prepare(model, optimizer, train_loader)
if options.checkpoints:
    strategy.checkpoint(options.checkpoints, every_steps=10)


def loss_of(images, labels):
    return functional.cross_entropy(model(images), labels)


for _ in strategy.epochs(options.epochs):
    for batch in strategy.batches(train_loader):
        optimizer.zero_grad()
        strategy.backward(loss_of, batch)
        optimizer.step()


def measure(images, labels):
    """Return sums over the samples of a batch, each with its count."""
    scores = model(images)
    loss = functional.cross_entropy(scores, labels, reduction="sum")
    return {"loss": (loss, len(labels)), "accuracy": ((scores.argmax(1) == labels).sum(), len(labels))}


means = strategy.evaluate(measure, test_loader)
strategy.print(f"loss {means['loss']:.6f}  accuracy {means['accuracy']:.2%}")
if options.weights:
    strategy.save(options.weights, model.state_dict())
