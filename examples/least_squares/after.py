"""Fit a linear model with NumPy and 4 replicas, on one device or on several.

python examples/least_squares/after.py                                4 virtual CPU devices
duoka run --devices 1 --replicas 4 examples/least_squares/after.py    1 worker, bitwise identical weights
duoka run --devices 2 --replicas 4 examples/least_squares/after.py    2 workers, bitwise identical weights
"""

import hashlib

import numpy as np

import duoka

strategy = duoka.Mirrored(devices=4)
strategy.print("data: synthetic, 1001 samples")

rng = np.random.default_rng(0)
features = rng.normal(size=(1001, 50)).astype(np.float32)
targets = features @ rng.normal(size=50).astype(np.float32) + rng.normal(size=1001).astype(np.float32)
shares = np.array_split(np.arange(1001), strategy.replicas)  # 251, 250, 250 and 250 samples

weights = np.zeros(50, np.float32)


def share_of_gradient(replica):
    rows = shares[replica]
    errors = features[rows] @ weights - targets[rows]
    return features[rows].T @ errors / np.float32(1001)


for _ in range(200):
    gradient = strategy.sum_over_replicas(share_of_gradient)
    weights -= np.float32(0.1) * gradient

loss = float(np.mean((features @ weights - targets) ** 2))
strategy.print(f"loss {loss:.6f}  weights {hashlib.sha256(weights.tobytes()).hexdigest()}")
