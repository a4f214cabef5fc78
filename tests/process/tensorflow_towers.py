"""Runs what test_tensorflow_towers.py looks at, and prints it: TensorFlow is not started inside pytest."""

from __future__ import annotations

import hashlib
import json
import math
from contextlib import redirect_stderr
from io import StringIO
from unittest.mock import patch

import numpy as np
import tensorflow as tf

from duoka.errors import DuokaError
from duoka.tensorflow import average_gradients, tower_devices


def error_of(action) -> str:
    try:
        action()
    except DuokaError as error:
        return str(error)
    return "nothing"


def worst_error(num_towers: int) -> float:
    """Against a mean in float64, in units of what the tree may err."""
    rng = np.random.default_rng(num_towers)
    # Of both signs and many sizes: sums that cancel.
    grads = (rng.standard_normal((num_towers, 4000)) * 10.0 ** rng.integers(-6, 6, (num_towers, 4000))).astype(
        "float32"
    )
    variable = tf.Variable(np.zeros(4000, "float32"))
    ((mean, _),) = average_gradients([[(tf.constant(grad), variable)] for grad in grads])
    exact = grads.astype("float64").mean(0)
    allowed = (math.ceil(math.log2(num_towers)) + 1) * np.finfo("float32").eps * np.abs(grads.astype("float64")).mean(0)
    return float((np.abs(mean.numpy() - exact) / allowed).max())


def digest(num_towers: int) -> str:
    rng = np.random.default_rng(0)
    variables = [tf.Variable(np.zeros(shape, "float32")) for shape in ((3, 5), (7,), ())]
    towers = [
        [(tf.constant(rng.standard_normal(v.shape).astype("float32")), v) for v in variables] for _ in range(num_towers)
    ]
    eager = average_gradients(towers)
    graph = tf.function(lambda: [mean for mean, _ in average_gradients(towers)])()
    for (mean, variable), traced, expected in zip(eager, graph, variables, strict=True):
        assert variable is expected
        assert mean.numpy().tobytes() == traced.numpy().tobytes()
    return hashlib.sha256(b"".join(mean.numpy().tobytes() for mean, _ in eager)).hexdigest()


def sparse_and_missing() -> dict:
    table, weight, unused = (tf.Variable(np.zeros(shape, "float32")) for shape in ((6, 2), (3,), (2,)))

    def slices(indices):
        return tf.IndexedSlices(tf.ones((len(indices), 2)), tf.constant(indices), tf.constant([6, 2]))

    one, three = tf.constant([1.0, 2.0, 3.0]), tf.constant([3.0, 2.0, 1.0])
    mean, dense, none = average_gradients(
        [
            [(slices([0, 1, 1]), table), (one, weight), (None, unused)],
            [(slices([1, 5]), table), (None, weight), (None, unused)],
            [(None, table), (three, weight), (None, unused)],
        ]
    )
    ((mixed, _),) = average_gradients([[(slices([0]), table)], [(tf.ones((6, 2)), table)]])
    half = tf.constant(np.full(4, 40000), tf.float16)  # two of them are more than 16 bits hold
    ((wide, _),) = average_gradients([[(half, weight)], [(half, weight)]])
    return {
        "indices": mean[0].indices.numpy().tolist(),
        "summed": tf.convert_to_tensor(mean[0]).numpy()[:, 0].tolist(),
        "dense": dense[0].numpy().tolist(),
        "none": none[0] is None,
        "mixed": mixed.numpy()[:, 1].tolist(),
        "wide": wide.numpy().tolist(),
    }


def one_device() -> float:
    """Two towers train as one device does."""
    rng = np.random.default_rng(1)
    x, y = rng.standard_normal((8, 3)).astype("float32"), rng.standard_normal((8, 1)).astype("float32")

    def loss(weight, rows):
        return tf.reduce_mean((x[rows] @ weight - y[rows]) ** 2)

    def gradient(weight, rows):
        with tf.GradientTape() as tape:
            value = loss(weight, rows)
        return tape.gradient(value, weight)

    towers, alone = tf.Variable(tf.zeros((3, 1))), tf.Variable(tf.zeros((3, 1)))
    for _ in range(50):
        grads = []
        for device, rows in zip(tower_devices(2), (slice(0, 4), slice(4, 8)), strict=True):
            with tf.device(device):
                grads.append([(gradient(towers, rows), towers)])
        ((mean, _),) = average_gradients(grads)
        towers.assign_sub(0.1 * mean)
        alone.assign_sub(0.1 * gradient(alone, slice(0, 8)))
    return float(tf.reduce_max(tf.abs(towers - alone)) / tf.reduce_max(tf.abs(alone)))


def old_graph() -> list[float]:
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        variable = tf.compat.v1.get_variable("w", initializer=tf.constant([4.0, 2.0]), use_resource=False)
        optimizer = tf.compat.v1.train.GradientDescentOptimizer(1.0)
        towers = []
        for scale in (1.0, 2.0):
            towers.append(optimizer.compute_gradients(scale * tf.reduce_sum(variable), [variable]))
        step = optimizer.apply_gradients(average_gradients(towers))
        session.run(tf.compat.v1.global_variables_initializer())
        session.run(step)
        return session.run(variable).tolist()


def said_with(num_gpus: int, *numbers: int) -> list:
    """Where TensorFlow sees so many cards: names of devices, and what is said beside them."""
    list_all = tf.config.list_physical_devices

    def list_some(kind=None):
        return list_all("CPU")[:1] * num_gpus if kind == "GPU" else list_all(kind)

    with patch.object(tf.config, "list_physical_devices", list_some), redirect_stderr(StringIO()) as said:
        return [tower_devices(*numbers), said.getvalue()]


def main() -> None:
    bad_number = error_of(lambda: tower_devices(0))
    devices, said = said_with(1, 2)
    with tf.device(devices[1]):
        placed = tf.constant(1.0).device
    weight = tf.Variable(tf.zeros(2))
    errors = {
        "number": bad_number,
        "late": error_of(lambda: tower_devices(5)),
        "empty": error_of(lambda: average_gradients([])),
        "lengths": error_of(lambda: average_gradients([[(tf.zeros(2), weight)], []])),
        "pairs": error_of(lambda: average_gradients([[tf.zeros(2)], [tf.zeros(2)]])),
        "shapes": error_of(lambda: average_gradients([[(tf.zeros(2), weight)], [(tf.zeros(3), weight)]])),
    }
    facts = {
        "devices": devices,
        "said": said,
        "with two cards": [said_with(2, 2), said_with(2), said_with(0)],
        "placed": placed,
        "errors": errors,
        "worst": {n: worst_error(n) for n in (1, 2, 3, 5, 8, 13)},
        "digests": [digest(n) for n in (3, 3, 4, 7, 8)],
        "sparse": sparse_and_missing(),
        "one_device": one_device(),
        "old_graph": old_graph(),
    }
    print("FACTS", json.dumps(facts))


if __name__ == "__main__":
    main()
