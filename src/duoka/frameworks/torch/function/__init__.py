"""Function style: `strategy.backward(fn, ...)` runs `fn` once per replica, on any worker, as often as needed.

Here belong the call itself, what goes into it (arguments, batches) and what comes out (losses, metrics, gradients).
Nothing of PyTorch is patched here.
"""
