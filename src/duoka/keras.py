"""Names of Keras's own past, for scripts that change an import and nothing else.

Importing this does not import Keras, so that a script can still choose its backend.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

from duoka.errors import DeviceError, MismatchError
from duoka.frameworks.recognise import framework_of
from duoka.session import Mirrored

__all__ = ["compile", "multi_gpu_model", "sum_loss"]


def multi_gpu_model(
    model: Any,
    gpus: int | Iterable[int | str] | None = None,
    cpu_merge: bool = True,
    cpu_relocation: bool = False,
) -> Any:
    """Stands in for `keras.utils.multi_gpu_model`: gives a model whose batches are shared between `gpus` devices.

    It is the model that was given: it has the weights, saves as it always did, and may be of any kind. The batch size
    is that of all devices together: 256 on 8 of them is 32 on each. `None` takes every GPU; a list has numbers or
    names, in any dialect. Missing GPUs become virtual CPU devices, and it says so. Every device has its own copy of
    the weights, so there is nothing that `cpu_merge` and `cpu_relocation` could change.

    >>> parallel_model = multi_gpu_model(model, gpus=8)  # doctest: +SKIP
    >>> parallel_model.compile(loss="categorical_crossentropy", optimizer="rmsprop")  # doctest: +SKIP
    >>> parallel_model.fit(x, y, epochs=20, batch_size=256)  # doctest: +SKIP
    """
    _check_model(model)  # before workers are started for it
    strategy = Mirrored(devices=_read_gpus(gpus))
    return strategy.prepare(model)


def compile(
    model: Any, loss: Any, optimizer: Any, metrics: Any = None, num_gpus: int | Iterable[int | str] | None = None
) -> Any:
    """One call for code that compiled for any number of GPUs; 0 and 1 mean one device. Gives the model to fit."""
    model = multi_gpu_model(model, 1 if num_gpus == 0 else num_gpus)
    model.compile(optimizer=optimizer, loss=loss, metrics=metrics)
    return model


def sum_loss(value: Any) -> Any:
    """For `add_loss` and steps of one's own: this is a sum over the rows, not a mean.

    Means over rows need nothing. A sum has to be told, or each replica's would be weighted by its share of the rows.
    """
    from duoka.frameworks.keras import terms  # imports Keras

    return terms.sum_loss(value)


def _check_model(model: Any) -> None:
    try:
        is_of_keras = framework_of([model]) == "keras"
    except MismatchError:
        is_of_keras = False
    if not is_of_keras or not hasattr(model, "fit"):
        raise MismatchError(
            f"multi_gpu_model was given a {type(model).__name__}.",
            why="it takes a Keras model: Sequential, functional or a class of your own.",
            do="give it the model, before or after it is compiled; for PyTorch there is duoka.torch.DataParallel.",
        )


def _read_gpus(gpus: Any) -> Any:
    """A number of devices stays one; in a list, a number is the number of a GPU."""
    return [_name(gpu) for gpu in gpus] if isinstance(gpus, Iterable) and not isinstance(gpus, str) else gpus


def _name(gpu: Any) -> Any:
    if isinstance(gpu, bool):
        raise DeviceError(f"{gpu} is not a GPU.", do="write numbers or names: gpus=[0, 1], gpus=['gpu(0)', 'gpu(1)'].")
    try:
        return f"gpu:{operator.index(gpu)}"
    except TypeError:
        return gpu
