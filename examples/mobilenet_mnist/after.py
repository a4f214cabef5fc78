"""MobileNetV2 on MNIST, on one device or on many.

python examples/mobilenet_mnist/after.py                             every card here; without one, one CPU
duoka run --devices 4 examples/mobilenet_mnist/after.py              4 cards; without them, 4 virtual CPU devices
duoka run --devices 4 examples/mobilenet_mnist/after.py --data mnist --batch-size 128

BatchNorm takes its statistics from each replica's rows. With duoka.Mirrored(sync_batchnorm=True) it takes them from the
whole batch, as on one device.
"""

import argparse

import torch
from torch.nn import functional
from torch.utils.data import DataLoader

import duoka
from data import load_sets
from model import MobileNetV2

parser = argparse.ArgumentParser()
parser.add_argument("--data", help="a directory of idx files, or of pictures")
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--batch-size", type=int, default=32)
parser.add_argument("--width", type=float, default=0.5, help="of the layers; 1 is MobileNetV2 as published")
options = parser.parse_args()

strategy = duoka.Mirrored()
torch.manual_seed(0)
train_set, test_set, num_classes = load_sets(options.data)
train_loader = DataLoader(train_set, options.batch_size, shuffle=True, drop_last=True)
test_loader = DataLoader(test_set, options.batch_size)
model = MobileNetV2(num_classes, options.width)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
model, optimizer, train_loader = strategy.prepare(model, optimizer, train_loader)


def count_correct(batch):
    images, labels = batch
    return (model(images).argmax(1) == labels).sum(), len(labels)


for epoch in strategy.epochs(options.epochs):
    bar = strategy.progress(train_loader, desc=f"epoch {epoch}")
    for images, labels in bar:
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        mean_loss = bar.loss = strategy.mean(loss)  # over all replicas: known once they all have run
    accuracy = strategy.evaluate(count_correct, test_loader)
    strategy.print(f"epoch {epoch}  loss {mean_loss:.4f}  accuracy {accuracy:.2%}")
