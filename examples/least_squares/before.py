"""Fit a linear model with NumPy, on one device.

python examples/least_squares/before.py
"""

import hashlib

import numpy as np

print("data: synthetic, 1001 samples")
rng = np.random.default_rng(0)
features = rng.normal(size=(1001, 50)).astype(np.float32)
targets = features @ rng.normal(size=50).astype(np.float32) + rng.normal(size=1001).astype(np.float32)

weights = np.zeros(50, np.float32)
for _ in range(200):
    errors = features @ weights - targets
    gradient = features.T @ errors / np.float32(1001)
    weights -= np.float32(0.1) * gradient

loss = float(np.mean((features @ weights - targets) ** 2))
print(f"loss {loss:.6f}  weights {hashlib.sha256(weights.tobytes()).hexdigest()}")
