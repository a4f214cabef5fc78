"""Article 3, Keras: one compile function with a list of GPUs, then `fit` with validation data, on two workers."""

from __future__ import annotations

import argparse

import duoka
from duoka.runtime.worker import attachment

if __name__ == "__main__" and attachment() is None:
    duoka.Mirrored(devices=["gpu(0)", "gpu(1)"])  # becomes the supervisor, which needs no Keras

from facts import difference, print_facts, scenario
from keras_parts import make_data, make_model

import duoka.keras

args = argparse.Namespace(num_gpus=2)
(x_train, y_train), (x_test, y_test) = make_data(90), make_data(40)
epochs = 2


def backend_agnostic_compile(model, loss, optimizer, metrics, args):
    gpu_list = ["gpu(%d)" % i for i in range(args.num_gpus)]  # noqa: UP031
    model = duoka.keras.compile(model, loss, optimizer, metrics=["accuracy"], num_gpus=gpu_list)
    return model


@scenario
def compiled_for_a_list() -> dict:
    model = backend_agnostic_compile(make_model(), "categorical_crossentropy", "rmsprop", ["accuracy"], args)
    history = model.fit(x_train, y_train, epochs=epochs, validation_data=(x_test, y_test), verbose=0)
    plain = make_model()
    plain.compile(loss="categorical_crossentropy", optimizer="rmsprop", metrics=["accuracy"])
    expected = plain.fit(x_train, y_train, epochs=epochs, validation_data=(x_test, y_test), verbose=0)
    names = sorted(history.history)
    return {
        "names": names,
        "weights": difference(model.get_weights(), plain.get_weights()),
        "numbers": difference(*([each.history[name] for name in names] for each in (history, expected))),
    }


if __name__ == "__main__":
    print_facts(duoka.Mirrored(devices=["gpu(0)", "gpu(1)"]).worker)
