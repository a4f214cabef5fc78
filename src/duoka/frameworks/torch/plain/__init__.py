"""Plain style: the user's loop as it is, with one replica per worker.

Here belong the loop over a prepared loader (`loop.py`), the exchange at the end of a backward (`exchange.py`), and the
loader itself. Batches, memory and notes are those of the function style. Nothing of PyTorch is patched here.
"""
