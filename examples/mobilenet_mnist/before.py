"""Train MobileNetV2 on MNIST, on one device.

python examples/mobilenet_mnist/before.py
python examples/mobilenet_mnist/before.py --data mnist --epochs 5
"""

import argparse

import torch
from torch.nn import functional
from torch.utils.data import DataLoader

from data import load_sets
from model import MobileNetV2

parser = argparse.ArgumentParser()
parser.add_argument("--data", help="a directory of idx files, or of images in folders train and test")
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--batch-size", type=int, default=32)
parser.add_argument("--width", type=float, default=0.5, help="of the layers; 1 is the published MobileNetV2")
options = parser.parse_args()
print(f"data: {options.data or 'synthetic images; pass --data for real files'}")

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
train_set, test_set, num_classes = load_sets(options.data)
train_loader = DataLoader(train_set, options.batch_size, shuffle=True, drop_last=True)
test_loader = DataLoader(test_set, options.batch_size)
model = MobileNetV2(num_classes, options.width).to(device)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

for epoch in range(options.epochs):
    model.train()
    for images, labels in train_loader:
        images, labels = images.to(device), labels.to(device)
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
    model.eval()
    correct = 0
    with torch.no_grad():
        for images, labels in test_loader:
            images, labels = images.to(device), labels.to(device)
            correct += (model(images).argmax(1) == labels).sum().item()
    print(f"epoch {epoch}  loss {loss.item():.4f}  accuracy {correct / len(test_set):.2%}")
