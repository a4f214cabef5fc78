"""Train a CNN on CIFAR-10, on one device: learning-rate schedule, checkpoints, images per second.

python examples/cifar10_cnn/before.py
python examples/cifar10_cnn/before.py --data cifar-10-batches-bin --checkpoints saved --epochs 20
"""

import argparse
import time
from pathlib import Path

import torch
from torch.nn import functional
from torch.utils.data import DataLoader

from data import load_sets
from model import make_model

parser = argparse.ArgumentParser()
parser.add_argument("--data", help="a directory of data_batch_*.bin and test_batch*.bin, gzipped or not")
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--batch-size", type=int, default=64)
parser.add_argument("--width", type=int, default=32, help="channels of the first layer")
parser.add_argument("--decay-epochs", type=int, default=2, help="halve the learning rate after this many epochs")
parser.add_argument("--checkpoints", type=Path, help="a directory for one checkpoint per epoch")
options = parser.parse_args()
print(f"data: {options.data or 'synthetic images; pass --data for real files'}")

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
train_set, test_set = load_sets(options.data)
train_loader = DataLoader(train_set, options.batch_size, shuffle=True)
test_loader = DataLoader(test_set, options.batch_size)
model = make_model(options.width).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, options.decay_epochs * len(train_loader), gamma=0.5)

first_epoch = 0
if options.checkpoints and (newest := max(options.checkpoints.glob("epoch-????"), default=None)):
    saved = torch.load(newest, weights_only=True)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    scheduler.load_state_dict(saved["scheduler"])
    first_epoch = saved["epochs"]
    print(f"resuming from {newest}")

for epoch in range(first_epoch, options.epochs):
    model.train()
    begin = time.perf_counter()
    for step, (images, labels) in enumerate(train_loader):
        images, labels = images.to(device), labels.to(device)
        optimizer.zero_grad()
        functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
        scheduler.step()
        if step % 10 == 9:
            speed = f"{10 * options.batch_size / (time.perf_counter() - begin):.0f} images/s"
            print(f"epoch {epoch}  step {step + 1}  learning rate {scheduler.get_last_lr()[0]:.4f}  {speed}")
            begin = time.perf_counter()
    model.eval()
    loss = correct = 0.0
    with torch.no_grad():
        for images, labels in test_loader:
            images, labels = images.to(device), labels.to(device)
            scores = model(images)
            loss += functional.cross_entropy(scores, labels, reduction="sum").item() / len(test_set)
            correct += (scores.argmax(1) == labels).sum().item() / len(test_set)
    print(f"epoch {epoch}  loss {loss:.4f}  accuracy {correct:.2%}")
    if options.checkpoints:
        options.checkpoints.mkdir(parents=True, exist_ok=True)
        saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}
        torch.save(saved | {"epochs": epoch + 1}, options.checkpoints / f"epoch-{epoch + 1:04}")
