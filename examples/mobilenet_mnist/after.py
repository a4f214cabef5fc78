"""Train MobileNetV2 on MNIST, on one device or on several.

python examples/mobilenet_mnist/after.py                   all GPUs, or one CPU worker
duoka run --devices 2 examples/mobilenet_mnist/after.py    2 GPUs, or 2 virtual CPU devices
duoka run --devices 2 examples/mobilenet_mnist/after.py --data mnist --epochs 5

BatchNorm normalises the samples of one replica, so the numbers are close to those of `before.py`, not equal.
"""

import argparse

import torch
from torch.nn import functional
from torch.utils.data import DataLoader

import duoka
from data import load_sets
from model import MobileNetV2

parser = argparse.ArgumentParser()
parser.add_argument("--data", help="a directory of idx files, or of images in folders train and test")
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--batch-size", type=int, default=32)
parser.add_argument("--width", type=float, default=0.5, help="of the layers; 1 is the published MobileNetV2")
options = parser.parse_args()

strategy = duoka.Mirrored()
strategy.print(f"data: {options.data or 'synthetic images; pass --data for real files'}")
torch.manual_seed(0)
train_set, test_set, num_classes = load_sets(options.data)
train_loader = DataLoader(train_set, options.batch_size, shuffle=True, drop_last=True)
test_loader = DataLoader(test_set, options.batch_size)
model = MobileNetV2(num_classes, options.width)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
model, optimizer, train_loader = strategy.prepare(model, optimizer, train_loader)


def loss_of(images, labels):
    return functional.cross_entropy(model(images), labels)


def count_correct(images, labels):
    return (model(images).argmax(1) == labels).sum(), len(labels)


for epoch in strategy.epochs(options.epochs):
    bar = strategy.progress(strategy.batches(train_loader), desc=f"epoch {epoch}")
    for batch in bar:
        optimizer.zero_grad()
        loss = bar.loss = strategy.backward(loss_of, batch)
        optimizer.step()
    accuracy = strategy.evaluate(count_correct, test_loader)
    strategy.print(f"epoch {epoch}  loss {loss.item():.4f}  accuracy {accuracy:.2%}")
