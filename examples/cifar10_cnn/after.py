"""Train a CNN on CIFAR-10, on one device or on several: learning-rate schedule, checkpoints, images per second.

python examples/cifar10_cnn/after.py                   all GPUs, or one CPU worker
duoka run --devices 2 examples/cifar10_cnn/after.py    2 GPUs, or 2 virtual CPU devices
duoka run --devices 2 examples/cifar10_cnn/after.py --data cifar-10-batches-bin --checkpoints saved --epochs 20
"""

import argparse
import time

import torch
from torch.nn import functional
from torch.utils.data import DataLoader

import duoka
from data import load_sets
from model import make_model

parser = argparse.ArgumentParser()
parser.add_argument("--data", help="a directory of data_batch_*.bin and test_batch*.bin, gzipped or not")
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--batch-size", type=int, default=64)
parser.add_argument("--width", type=int, default=32, help="channels of the first layer")
parser.add_argument("--decay-epochs", type=int, default=2, help="halve the learning rate after this many epochs")
parser.add_argument("--checkpoints", help="a directory: a run that is started again continues from there")
options = parser.parse_args()

strategy = duoka.Mirrored()
strategy.print(f"data: {options.data or 'synthetic images; pass --data for real files'}")
torch.manual_seed(0)
train_set, test_set = load_sets(options.data)
train_loader = DataLoader(train_set, options.batch_size, shuffle=True)
test_loader = DataLoader(test_set, options.batch_size)
model = make_model(options.width)
optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, options.decay_epochs * len(train_loader), gamma=0.5)
model, optimizer, scheduler, train_loader = strategy.prepare(model, optimizer, scheduler, train_loader)

if options.checkpoints:
    strategy.checkpoint(options.checkpoints, every_steps=len(train_loader))


def loss_of(images, labels):
    return functional.cross_entropy(model(images), labels)


def measure(images, labels):
    """Return sums over the samples of a batch, each with its count."""
    scores = model(images)
    loss = functional.cross_entropy(scores, labels, reduction="sum")
    return {"loss": (loss, len(labels)), "accuracy": ((scores.argmax(1) == labels).sum(), len(labels))}


for epoch in strategy.epochs(options.epochs):
    begin = time.perf_counter()
    for batch in strategy.batches(train_loader):
        optimizer.zero_grad()
        strategy.backward(loss_of, batch)
        optimizer.step()
        scheduler.step()
        step = batch.index
        if step % 10 == 9:
            speed = f"{10 * options.batch_size / (time.perf_counter() - begin):.0f} images/s"
            strategy.print(f"epoch {epoch}  step {step + 1}  learning rate {scheduler.get_last_lr()[0]:.4f}  {speed}")
            begin = time.perf_counter()
    means = strategy.evaluate(measure, test_loader)
    strategy.print(f"epoch {epoch}  loss {means['loss']:.4f}  accuracy {means['accuracy']:.2%}")
