"""A script of the old days, with one import changed; prints one JSON line.

    python tests/process/keras_borrowed.py MODEL_FILE [--plain | --names | --compile]

With --plain it trains on one device, and also says what a model that was saved before predicts.
"""

from __future__ import annotations

import json
import os
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import duoka.keras

is_lazy = "keras" not in sys.modules

import keras  # noqa: E402
import numpy as np  # noqa: E402
from keras import layers  # noqa: E402


class Watch(layers.Layer):
    """Notes how many rows come by, where they can be seen; adds a sum over them to the loss."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.rows: set[int] = set()

    def call(self, x):
        if isinstance(x.shape[0], int):
            self.rows.add(x.shape[0])
        self.add_loss(duoka.keras.sum_loss(1e-3 * keras.ops.sum(keras.ops.square(x))))
        return x


generator = np.random.default_rng(0)
x = generator.standard_normal((96, 6)).astype("float32")
y = (x.sum(1) > 0).astype("int32")
keras.utils.set_random_seed(3)
watch = Watch()
model = keras.Sequential([keras.Input((6,)), layers.Dense(8, activation="relu"), watch, layers.Dense(2)])
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
optimizer = keras.optimizers.SGD(0.2, momentum=0.9)
if "--plain" in sys.argv:
    parallel_model = model
elif "--names" in sys.argv:
    parallel_model = duoka.keras.multi_gpu_model(model, gpus=["gpu(0)", "gpu(1)"], cpu_merge=False)
elif "--compile" in sys.argv:
    parallel_model = duoka.keras.compile(model, loss, optimizer, ["accuracy"], num_gpus=2)
else:
    parallel_model = duoka.keras.multi_gpu_model(model, gpus=2)
if "--compile" not in sys.argv:
    parallel_model.compile(loss=loss, optimizer=optimizer, metrics=["accuracy"])
watch.rows.clear()
history = parallel_model.fit(x, y, epochs=3, batch_size=32, verbose=0)
rows = sorted(watch.rows)
if "--plain" in sys.argv:
    saved = keras.models.load_model(sys.argv[1], custom_objects={"Watch": Watch})
else:
    model.save(sys.argv[1])
    saved = model
print(
    json.dumps(
        {
            "saved": saved.predict(x, verbose=0).astype(float).tolist(),
            "is_lazy": is_lazy,
            "is_the_original": parallel_model is model,
            "rows": rows,
            "history": {name: [float(value) for value in values] for name, values in history.history.items()},
            "weights": [weight.astype(float).tolist() for weight in model.get_weights()],
            "predicted": parallel_model.predict(x, verbose=0).astype(float).tolist(),
            "evaluated": [float(value) for value in parallel_model.evaluate(x, y, verbose=0)],
        }
    ),
    flush=True,
)
