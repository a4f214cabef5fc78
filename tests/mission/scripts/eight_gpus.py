"""Articles 0 and 3, Keras: `multi_gpu_model` for eight GPUs."""

from __future__ import annotations

import duoka
from duoka.runtime.worker import attachment

if __name__ == "__main__" and attachment() is None:
    duoka.Mirrored(devices=8)  # becomes the supervisor, which needs no Keras

from facts import difference, print_facts, scenario
from keras_parts import make_data, make_model

from duoka.keras import multi_gpu_model

strategy = duoka.Mirrored(devices=8)


@scenario
def replicated() -> dict:
    model, (x, y) = make_model(), make_data(256)
    parallel_model = multi_gpu_model(model, gpus=8)
    parallel_model.compile(loss="categorical_crossentropy", optimizer="rmsprop")
    model.layers[0].counts.clear()
    parallel_model.fit(x, y, epochs=20, batch_size=256, verbose=0)
    counts = sorted(model.layers[0].counts)

    plain = make_model()
    if strategy.is_main:  # eight workers would take eight times as long
        plain.compile(loss="categorical_crossentropy", optimizer="rmsprop")
        plain.fit(x, y, epochs=20, batch_size=256, verbose=0)
    return {
        "is_the_original": parallel_model is model,
        "replicas": strategy.num_replicas_in_sync,
        "workers": strategy.num_workers,
        "counts": counts,
        "difference": difference(parallel_model.get_weights(), plain.get_weights()),
        "updates": int(parallel_model.optimizer.iterations),
    }


if __name__ == "__main__":
    print_facts(strategy.worker)
