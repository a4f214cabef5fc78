"""A small CNN on scikit-learn's digits, on one device or on many.

python examples/digits/after.py                                     every card here; without one, one CPU
duoka run --devices 4 examples/digits/after.py                      4 cards; without them, 4 virtual CPU devices
duoka run --devices 1 --replicas 4 examples/digits/after.py         4 replicas on 1 worker: the same bits as on 4
duoka run --devices 4 examples/digits/after.py --checkpoints saved  ended in the middle, it goes on when started again
"""

import argparse
import hashlib

import torch
from torch.nn import functional
from torch.utils.data import DataLoader

import duoka
from data import load_sets
from model import make_model

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=12)
parser.add_argument("--dropout", type=float, default=0.25)
parser.add_argument("--in-order", action="store_true", help="do not shuffle the training set")
parser.add_argument("--checkpoints", help="a directory to save the run in, and to go on from")
parser.add_argument("--weights", help="write the trained weights to this safetensors file")
options = parser.parse_args()

strategy = duoka.Mirrored()
torch.manual_seed(0)
model = make_model(options.dropout)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
train_set, test_set = load_sets()
train_loader = DataLoader(train_set, batch_size=64, shuffle=not options.in_order)
test_loader = DataLoader(test_set, batch_size=100)
model, optimizer, train_loader = strategy.prepare(model, optimizer, train_loader)
if options.checkpoints:
    strategy.checkpoint(options.checkpoints, every_steps=50)

for _ in strategy.epochs(options.epochs):
    for images, labels in train_loader:
        optimizer.zero_grad()
        functional.cross_entropy(model(images), labels).backward()
        optimizer.step()


def measure(batch):
    """Sums over the rows of a batch, each with its count."""
    images, labels = batch
    scores = model(images)
    loss = functional.cross_entropy(scores, labels, reduction="sum")
    return {"loss": (loss, len(labels)), "accuracy": ((scores.argmax(1) == labels).sum(), len(labels))}


found = strategy.evaluate(measure, test_loader)
digest = hashlib.sha256()
for _, weights in sorted(model.state_dict().items()):
    digest.update(weights.cpu().numpy().tobytes())
strategy.print(f"loss {found['loss']:.6f}  accuracy {found['accuracy']:.2%}  weights {digest.hexdigest()}")
if options.weights:
    strategy.save(options.weights, model.state_dict())
