"""Train a small GPT on a text, on one device or on several. It makes its own batches, as nanoGPT does.

python examples/gpt/after.py                   all GPUs, or one CPU worker
duoka run --devices 2 examples/gpt/after.py    2 GPUs, or 2 virtual CPU devices
duoka run --devices 2 examples/gpt/after.py --text novel.txt --steps 1000 --width 128 --checkpoints saved

There is no DataLoader. `get_batch` draws the same global batch on every worker, from a generator with a fixed seed.
`strategy.backward` cuts the batch by sequences: each replica computes its share.
"""

import argparse

import torch
from torch.nn import functional

import duoka
from data import LICENSE, Text
from model import GPT

parser = argparse.ArgumentParser()
parser.add_argument("--text", default=LICENSE, help="a file of UTF-8 text")
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--batch-size", type=int, default=16, help="in sequences")
parser.add_argument("--context", type=int, default=64, help="characters per sequence")
parser.add_argument("--width", type=int, default=64)
parser.add_argument("--layers", type=int, default=2)
parser.add_argument("--dropout", type=float, default=0.0)
parser.add_argument("--checkpoints", help="a directory: a run that is started again continues from there")
options = parser.parse_args()

strategy = duoka.Mirrored()
strategy.print(f"data: {options.text}")
torch.manual_seed(0)
text = Text(options.text, options.context)
model = GPT(len(text.characters), options.context, options.width, 4, options.layers, options.dropout)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
model, optimizer = strategy.prepare(model, optimizer)
generator = torch.Generator().manual_seed(0)
strategy.register(generator=generator)  # a resumed run draws the batches that follow
if options.checkpoints:
    strategy.checkpoint(options.checkpoints, every_steps=100)


def get_batch():
    starts = torch.randint(len(text.tokens) - options.context, (options.batch_size,), generator=generator)
    tokens = torch.stack([text.tokens[start : start + options.context] for start in starts])
    targets = torch.stack([text.tokens[start + 1 : start + 1 + options.context] for start in starts])
    return tokens, targets


def loss_of(tokens, targets):
    return functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


for step in strategy.steps(options.steps):
    tokens, targets = get_batch()
    optimizer.zero_grad()
    loss = strategy.backward(loss_of, tokens, targets)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    if step % 20 == 19:
        strategy.print(f"step {step + 1}  loss {loss.item():.6f}")

model.eval()
first_word = text.encode(text.text.split()[0])
strategy.print(text.decode(model.write(first_word, 80)))
