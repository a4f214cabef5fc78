"""Train a small CNN on scikit-learn's digits, on one device.

python examples/digits/before.py
"""

import argparse

import torch
from safetensors.torch import save_file
from torch.nn import functional
from torch.utils.data import DataLoader

from data import load_sets
from model import make_model

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--dropout", type=float, default=0.25)
parser.add_argument("--weights", help="write the trained weights to this safetensors file")
options = parser.parse_args()
print("data: scikit-learn's digits")

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
model = make_model(options.dropout).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
train_set, test_set = load_sets()
train_loader = DataLoader(train_set, batch_size=64, shuffle=True)
test_loader = DataLoader(test_set, batch_size=100)

for _ in range(options.epochs):
    for images, labels in train_loader:
        images, labels = images.to(device), labels.to(device)
        optimizer.zero_grad()
        functional.cross_entropy(model(images), labels).backward()
        optimizer.step()

model.eval()
loss = correct = 0.0
with torch.no_grad():
    for images, labels in test_loader:
        images, labels = images.to(device), labels.to(device)
        scores = model(images)
        loss += functional.cross_entropy(scores, labels, reduction="sum").item() / len(test_set)
        correct += (scores.argmax(1) == labels).sum().item() / len(test_set)
print(f"loss {loss:.6f}  accuracy {correct:.2%}")
if options.weights:
    save_file(model.state_dict(), options.weights)
