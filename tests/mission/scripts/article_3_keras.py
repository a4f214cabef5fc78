"""Article 3, Keras: `multi_gpu_model` without a number takes every GPU of this machine."""

from __future__ import annotations

import keras
import numpy as np
from facts import print_facts, scenario

import duoka
from duoka.keras import multi_gpu_model


@scenario
def every_gpu_here() -> dict:
    """Without a number there are as many replicas as GPUs; here one CPU, and Keras's own `fit`."""
    x, y = np.ones((8, 3), "float32"), np.ones((8, 1), "float32")
    weights = []
    for choice in ("plain", "without a number", "None"):
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        if choice == "without a number":
            try:
                model = multi_gpu_model(model)
            except Exception:
                pass
        elif choice == "None":
            model = multi_gpu_model(model, gpus=None)
        model.compile("sgd", "mse", run_eagerly=True)
        model.fit(x, y, batch_size=4, verbose=0)
        weights.append(model.get_weights()[0].tolist())
    gpus = [device for device in duoka.devices() if device.kind == "gpu"]
    strategy = duoka.Mirrored()
    return {"replicas": strategy.num_replicas_in_sync, "gpus": len(gpus), "weights": weights}


if __name__ == "__main__":
    print_facts()
