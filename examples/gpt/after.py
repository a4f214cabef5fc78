"""Train a small GPT on a text, on one device or on several.

python examples/gpt/after.py                   all GPUs, or one CPU worker
duoka run --devices 2 examples/gpt/after.py    2 GPUs, or 2 virtual CPU devices
duoka run --devices 2 examples/gpt/after.py --text novel.txt --epochs 20 --width 128

The loss is a mean over characters, and replicas hold different numbers of them: `strategy.weigh` takes the number.
"""

import argparse

import torch
from torch.nn import functional
from torch.utils.data import DataLoader

import duoka
from data import IGNORED, LICENSE, Text
from model import GPT

parser = argparse.ArgumentParser()
parser.add_argument("--text", default=LICENSE, help="a file of UTF-8 text")
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--batch-size", type=int, default=16, help="in sequences")
parser.add_argument("--context", type=int, default=64, help="characters per sequence")
parser.add_argument("--width", type=int, default=64)
parser.add_argument("--layers", type=int, default=2)
parser.add_argument("--dropout", type=float, default=0.1)
parser.add_argument("--in-order", action="store_true", help="do not shuffle the sequences")
options = parser.parse_args()

strategy = duoka.Mirrored()
strategy.print(f"data: {options.text}")
torch.manual_seed(0)
text = Text(options.text)
loader = DataLoader(text.cut(options.context), options.batch_size, shuffle=not options.in_order)
model = GPT(len(text.characters), options.context, options.width, 4, options.layers, options.dropout)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
model, optimizer, loader = strategy.prepare(model, optimizer, loader)

for epoch in strategy.epochs(options.epochs):
    losses = []
    for tokens, targets in loader:
        optimizer.zero_grad()
        scores = model(tokens)
        loss = functional.cross_entropy(scores.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)
        count = (targets != IGNORED).sum()
        strategy.weigh(loss, count).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        mean_loss = strategy.mean(loss, count)  # over all replicas; loss.item() is one replica's
        if strategy.stepped:
            losses.append(mean_loss)
    losses = [float(loss) for loss in losses]
    strategy.print(f"epoch {epoch}  loss {sum(losses) / len(losses):.6f}")  # of the average batch

model.eval()
first_word = text.encode(text.text.split()[0])
if strategy.is_main:
    print(text.decode(model.write(first_word, 80)))
