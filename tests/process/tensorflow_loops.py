"""Small TensorFlow loops, run as a script on some number of workers; prints one JSON line of digests and numbers.

    duoka run --devices W --replicas R tests/process/tensorflow_loops.py [name ...]

With --plain each scenario is also trained in the ordinary way, on one device. With --struck worker 1 dies in one.
"""

from __future__ import annotations

import os
import signal
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")

import keras
import numpy as np
import tensorflow as tf
from results import print_result
from tensorflow.nn import compute_average_loss
from tensorflow_loop_parts import Plain, batches, describe, each_loss, network, train

import duoka
import duoka.tensorflow

SCENARIOS = {}
bound_early = tf.distribute.get_replica_context


def scenario(function):
    SCENARIOS[function.__name__] = function
    return function


@scenario
def everything_at_once(strategy):
    """BatchNorm, dropout, embedding, Adam with clipping, an uneven last batch."""
    with strategy.scope():
        model, optimizer = network(is_noisy=True), keras.optimizers.Adam(1e-2, global_clipnorm=0.5)
    return train(strategy, model, optimizer, lambda y, logits: tf.reduce_mean(each_loss(y, logits)))


@scenario
def everything_eagerly(strategy):
    with strategy.scope():
        model, optimizer = network(is_noisy=True), keras.optimizers.Adam(1e-2, global_clipnorm=0.5)
    return train(strategy, model, optimizer, lambda y, logits: tf.reduce_mean(each_loss(y, logits)), is_eager=True)


@scenario
def two_hundred_steps(strategy):
    model, optimizer = network(), keras.optimizers.SGD(0.05, momentum=0.9)
    return train(strategy, model, optimizer, lambda y, logits: strategy.average_loss(each_loss(y, logits)), epochs=26)


@scenario
def losses_of_all_kinds(strategy):
    """Each says the same on one device: means, parts of means, with and without a size, and regularisers."""

    def train_with(loss, is_regular=False):
        model = network(is_regular=is_regular)
        return train(strategy, model, keras.optimizers.SGD(0.1), lambda y, logits: loss(model, y, logits), epochs=1)

    keras_mean = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    kinds = {
        "average_loss": train_with(lambda model, y, z: strategy.average_loss(each_loss(y, z))),
        "average_of_12": train_with(lambda model, y, z: strategy.average_loss(each_loss(y, z), 12)),
        "tf.nn": train_with(lambda model, y, z: average(strategy, each_loss(y, z))),
        "tf.nn of 12": train_with(lambda model, y, z: average(strategy, each_loss(y, z), 12)),
        "compat.v2": train_with(
            lambda model, y, z: average(strategy, each_loss(y, z), function=tf.compat.v2.nn.compute_average_loss)
        ),
        "bound early": train_with(lambda model, y, z: average(strategy, each_loss(y, z), 12, compute_average_loss)),
        "keras": train_with(lambda model, y, z: keras_mean(y, z)),
        "raw regulariser": train_with(lambda model, y, z: keras_mean(y, z) + sum(model.losses), is_regular=True),
        "scaled regulariser": train_with(
            lambda model, y, z: average(strategy, each_loss(y, z)) + scaled(strategy, model.losses), is_regular=True
        ),
    }
    return {
        "sha256": [kind["sha256"] for kind in kinds.values()],
        "numbers": [number for kind in kinds.values() for number in kind["numbers"]],
        "weights": [weight for kind in kinds.values() for weight in kind["weights"]],
    }


@scenario
def weights_of_rows(strategy):
    """One for each row, as (n) or as (n, 1)."""
    weights = np.linspace(0.5, 2, 13, dtype="float32")
    dataset = tf.data.Dataset.from_tensor_slices((np.arange(13.0, dtype="float32"), weights)).batch(5)

    def losses(batch):
        x, weight = batch
        if isinstance(strategy, Plain):
            return [strategy.average_loss(x * weight)] * 2
        functions = tf.compat.v2.nn.compute_average_loss, compute_average_loss
        columns = weight, weight[:, tf.newaxis]
        return [function(x, sample_weight=column) for function, column in zip(functions, columns, strict=True)]

    results = [strategy.run(losses, args=(batch,)) for batch in strategy.distribute_dataset(dataset)]
    return describe([], [float(strategy.reduce("sum", loss)) for result in results for loss in result])


def average(strategy, losses, size=None, function=None):
    if isinstance(strategy, Plain):
        return strategy.average_loss(losses, size)
    return (function or tf.nn.compute_average_loss)(losses, global_batch_size=size)


def scaled(strategy, losses):
    return sum(losses) if isinstance(strategy, Plain) else tf.nn.scale_regularization_loss(sum(losses))


@scenario
def an_optimizer_of_v1(strategy):
    model, optimizer = network(), tf.compat.v1.train.MomentumOptimizer(0.05, 0.9)
    return train(strategy, model, optimizer, lambda y, logits: tf.reduce_mean(each_loss(y, logits)))


@scenario
def an_optimizer_that_xla_cannot_compile(strategy):
    """Its update runs as it is."""

    class Counting(keras.optimizers.SGD):
        num_steps = 0

        def update_step(self, gradient, variable, learning_rate):
            tf.py_function(self.count, [], [])
            super().update_step(gradient, variable, learning_rate)

        def count(self):
            self.num_steps += 1

    model, optimizer = network(), Counting(0.05, momentum=0.9)
    results = train(strategy, model, optimizer, lambda y, logits: tf.reduce_mean(each_loss(y, logits)), epochs=1)
    return results | {"numbers": [*results["numbers"], optimizer.num_steps]}


@scenario
def optimizers_that_xla_would_change(strategy):
    """One that draws numbers, which XLA makes in another way; one that has nothing to train; and one that scales losses
    by a variable, which it has only once it is built.
    """

    class Noisy(keras.optimizers.SGD):
        def update_step(self, gradient, variable, learning_rate):
            noise = keras.random.normal(gradient.shape, seed=seeds)
            super().update_step(gradient + noise, variable, learning_rate)

    seeds, weight = keras.random.SeedGenerator(5), keras.Variable(np.ones((6, 1), "float32"))
    noisy, idle, other = Noisy(0.1), keras.optimizers.SGD(0.1), keras.Variable(np.ones((6, 1), "float32"))
    scaling = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=4, dynamic_growth_steps=2)

    def train_step(batch):
        x, _, _ = batch
        with tf.GradientTape(persistent=True) as tape:
            loss = tf.reduce_mean((x @ weight.value - 1) ** 2)
            scaled = scaling.scale_loss(tf.reduce_mean((x @ other.value - 1) ** 2))
        gradients = tape.gradient(loss, weight.value), tape.gradient(scaled, other.value)
        noisy.apply([gradients[0]], [weight])
        idle.apply([], [])
        scaling.apply([gradients[1]], [other])
        return loss

    @tf.function(reduce_retracing=True)
    def step(batch):
        return strategy.reduce("mean", strategy.run(train_step, args=(batch,)))

    losses = [float(step(batch)) for batch in strategy.distribute_dataset(batches(rows=41))]
    return describe([weight, seeds.state, other, scaling.dynamic_scale], losses)


@scenario
def functions_that_run_eagerly(strategy):
    """As people do to look for a mistake."""
    weight, optimizer = tf.Variable(tf.ones((6, 1))), keras.optimizers.SGD(0.1)

    @tf.function
    def loss_of(x):
        return tf.reduce_mean((x @ weight - 1) ** 2)

    @tf.function
    def train_step(batch):
        with tf.GradientTape() as tape:
            loss = loss_of(batch[0])
        optimizer.apply([tape.gradient(loss, weight)], [weight])
        return loss

    tf.config.run_functions_eagerly(True)
    try:
        dataset = strategy.distribute_dataset(batches(rows=41))
        losses = [float(strategy.reduce("mean", strategy.run(train_step, args=(batch,)))) for batch in dataset]
    finally:
        tf.config.run_functions_eagerly(False)
    return describe([weight], losses)


@scenario
def learning_rates_that_a_step_moves(strategy):
    """After the update, so that the next one sees it: a counter of v1, and an assignment; eager and in a graph."""
    weights, numbers = [], []
    for is_eager in (True, False):
        weight, count = tf.Variable(tf.ones((6, 1))), tf.Variable(0, trainable=False, dtype=tf.int64)
        of_v1 = tf.compat.v1.train.GradientDescentOptimizer(lambda count=count: 0.1 * 0.5 ** tf.cast(count, tf.float32))
        of_keras = keras.optimizers.SGD(0.1)

        def train_step(batch, weight=weight, count=count, of_v1=of_v1, of_keras=of_keras):
            x, _, _ = batch
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((x @ weight - 1) ** 2)
            gradient = tape.gradient(loss, weight)
            of_v1.apply_gradients([(gradient, weight)], global_step=count)
            of_keras.apply([gradient], [weight])
            of_keras.learning_rate.assign(of_keras.learning_rate * 0.5)
            return loss, count.value()

        def step(batch, train_step=train_step):
            return strategy.reduce("mean", strategy.run(train_step, args=(batch,)))

        step = step if is_eager else tf.function(step, reduce_retracing=True)
        for batch in strategy.distribute_dataset(batches(rows=41)):
            numbers += map(float, step(batch))
        weights += [weight, count, of_keras.learning_rate]
    return describe(weights, numbers)


@scenario
def a_batch_of_one(strategy):
    """Fewer rows than replicas: some have none."""
    model, optimizer = network(), keras.optimizers.SGD(0.1)

    @tf.function(reduce_retracing=True)
    def step(batch):
        return strategy.reduce("mean", strategy.run(train_step, args=(batch,)))

    def train_step(batch):
        x, tokens, y = batch
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(each_loss(y, model([x, tokens])))
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        return loss

    losses = [float(step(batch)) for batch in strategy.distribute_dataset(batches(size=3, rows=13))]
    return describe(model.variables, losses)


@scenario
def variables_of_ones_own(strategy):
    """Sums, means, counters, a generator, weights that are written to without an optimizer."""
    with strategy.scope():
        weight = tf.Variable([1.0, -1.0, 0.5, 0.0, 2.0, 1.0])
        seen = tf.Variable(0, aggregation=tf.VariableAggregation.SUM, trainable=False, dtype=tf.int64)
        mean = tf.Variable(tf.zeros(6), trainable=False)
        steps = tf.Variable(0, trainable=False)
        first = tf.Variable(0.0, trainable=False, aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA)
        generator = tf.random.Generator.from_seed(7)

    @tf.function(reduce_retracing=True)
    def step(batch):
        return strategy.reduce("mean", strategy.run(train_step, args=(batch,)))

    def train_step(batch):
        x, _, _ = batch
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((tf.linalg.matvec(x, weight) - 1) ** 2)
        weight.assign_sub(0.1 * tape.gradient(loss, weight))
        seen.assign_add(tf.shape(x, tf.int64)[0])
        mean.assign(0.9 * mean + 0.1 * tf.reduce_mean(x, 0))
        steps.assign_add(1)
        first.assign(first + 1)
        noise.append(generator.normal([2]))
        return loss

    noise = []
    losses = [float(step(batch)) for batch in strategy.distribute_dataset(batches())]
    found = describe([weight, mean, seen, steps, first, generator.state], losses)
    return found | {"seen": int(seen), "steps": int(steps), "first": float(first)}


@scenario
def a_generator_in_a_function(strategy):
    """That was traced before a step called it: still other numbers for each replica, and one device's for the first."""
    numbers, states = [], []
    for wrapped in (lambda run: run, tf.function):
        generator = tf.random.Generator.from_seed(7)

        @tf.function
        def draw(generator=generator):
            return generator.normal([])

        draw()
        run = wrapped(lambda draw=draw: strategy.run(lambda: draw()))
        for _ in range(2):
            drawn = run()
            values = [drawn] if isinstance(strategy, Plain) else strategy.gather(drawn)
            values = [float(value) for value in values]
            assert len(set(values)) == strategy.replicas
            numbers.append(values[0])
        states.append(generator.state)
    return describe(states, numbers)


@scenario
def results_of_all_kinds(strategy):
    """Without an optimizer: predictions come back in the order of rows."""
    model = network()
    dataset = batches().take(8)

    @tf.function(reduce_retracing=True)
    def predict(batch):
        return strategy.run(forward, args=(batch,))

    def forward(batch):
        x, tokens, _ = batch
        logits = model([x, tokens])
        sums = tf.reduce_sum(logits, 0)[tf.newaxis]
        wave = tf.reduce_mean(tf.complex(logits[:, 0], logits[:, 1]))
        return {"logits": logits, "rows": tf.shape(x)[0], "sums": sums, "is_positive": logits[:, 0] > 0, "wave": wave}

    numbers = []
    for batch in strategy.distribute_dataset(dataset):
        result = predict(batch)
        if isinstance(strategy, Plain):
            logits, rows = result["logits"], result["rows"]
            total, mean = tf.reduce_sum(logits, 0), tf.reduce_mean(logits, 0)
            together = result["sums"]
            positive = tf.cast(result["is_positive"], tf.float32)
            truths = [tf.reduce_sum(positive), tf.reduce_mean(positive)]
        else:
            logits, rows = strategy.gather(result["logits"], axis=0), strategy.reduce("sum", result["rows"])
            total, mean = (strategy.reduce(op, result["logits"], axis=0) for op in ("sum", "mean"))
            together = strategy.reduce(tf.distribute.ReduceOp.SUM, result["sums"])
            truths = [strategy.reduce(op, result["is_positive"], axis=0) for op in ("sum", "mean")]
            local = strategy.experimental_local_results(result["logits"])
            assert len(local) == len(strategy.local_replicas)
        for tensor in (logits, total, mean, together):
            numbers += np.ravel(tensor).tolist()
        wave = complex(result["wave"] if isinstance(strategy, Plain) else strategy.reduce("mean", result["wave"]))
        numbers += [float(rows), *map(float, truths), wave.real, wave.imag]
    return describe(model.variables, numbers)


@scenario
def text_beside_numbers(strategy):
    """In batches and in results, eager and in a graph."""
    words = [f"word {number}" for number in range(13)]
    dataset = tf.data.Dataset.from_tensor_slices((np.arange(13.0, dtype="float32"), words)).batch(5)

    def count_letters(batch):
        x, text = batch
        return tf.reduce_mean(x), tf.strings.length(text)

    numbers = []
    for run in (strategy.run, tf.function(strategy.run, reduce_retracing=True)):
        for batch in strategy.distribute_dataset(dataset):
            mean, letters = run(count_letters, args=(batch,))
            numbers.append(float(strategy.reduce("mean", mean)))
            numbers += np.ravel(letters if isinstance(strategy, Plain) else strategy.gather(letters, axis=0)).tolist()
    return describe([], numbers)


@scenario
def a_plain_batch_and_a_function_of_tensorflow(strategy):
    """As the articles do it: a raw batch to `experimental_run_v2`, and a tf.function that is run outside of graphs."""
    model, optimizer = network(), keras.optimizers.SGD(0.1)

    @tf.function(reduce_retracing=True)
    def train_step(x, tokens, y, rate=1.0):
        with tf.GradientTape() as tape:
            loss = rate * tf.reduce_mean(each_loss(y, model([x, tokens])))
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        return loss

    losses = []
    for batch in batches():
        value = strategy.run(train_step, args=batch)
        losses.append(float(strategy.reduce("mean", value)))
    return describe(model.variables, losses)


@scenario
def a_loop_inside_the_graph(strategy):
    model, optimizer = network(), keras.optimizers.SGD(0.1)

    def train_step(batch):
        x, tokens, y = batch
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(each_loss(y, model([x, tokens])))
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        return loss

    @tf.function
    def epoch(dataset):
        total = 0.0
        for batch in dataset:
            total += strategy.reduce("mean", strategy.run(train_step, args=(batch,)))
        return total

    @tf.function
    def some_steps(iterator):
        total = 0.0
        for _ in tf.range(3):
            total += strategy.reduce("mean", strategy.run(train_step, args=(next(iterator),)))
        return total

    optimizer.build(model.trainable_variables)
    iterator = iter(strategy.distribute_dataset(batches()))
    losses = [float(epoch(strategy.distribute_dataset(batches()))) for _ in range(2)]
    return describe(model.variables, [*losses, float(some_steps(iterator)), float(epoch(iterator))])


@scenario
def two_runs_in_one_graph(strategy):
    """The second one begins when the first one is over, also where nothing goes from one to the other, and where they
    stand in functions of their own.
    """
    with strategy.scope():
        models = [network(is_noisy=False), network(is_regular=True)]
        optimizers = [keras.optimizers.SGD(0.1), keras.optimizers.Nadam(0.01)]

    def step_of(model, optimizer, *, is_drawing):
        def train_step(batch):
            x, tokens, y = batch
            noise = keras.random.normal((1,), seed=noises) if is_drawing else 0.0
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(each_loss(y, model([x, tokens], training=True)))
            optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
            return loss + 0 * tf.reduce_sum(noise)

        return train_step

    noises = keras.random.SeedGenerator(3)
    steps = [step_of(*pair, is_drawing=not n) for n, pair in enumerate(zip(models, optimizers, strict=True))]

    runs = [lambda batch, step=step: strategy.reduce("mean", strategy.run(step, args=(batch,))) for step in steps]
    functions = [tf.function(run, reduce_retracing=True) for run in runs]

    @tf.function(reduce_retracing=True)
    def distributed(batch):
        return [run(batch) for run in (*runs, *functions)]

    losses = [float(loss) for batch in strategy.distribute_dataset(batches()) for loss in distributed(batch)]
    return describe([variable for model in models for variable in model.variables], losses)


@scenario
def models_of_many_shapes(strategy):
    """Steps of one name, trained with one after the other; a dataset of one-tuples; means of vectors."""
    weights, numbers = [], []
    for width in (4, 1, 3):
        weight = tf.Variable(tf.ones((6, width)))
        optimizer = keras.optimizers.SGD(0.1)

        def train_step(batch, weight=weight, optimizer=optimizer):
            (x,) = batch
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((x @ weight - 1) ** 2)
            optimizer.apply([tape.gradient(loss, weight)], [weight])
            return loss, tf.reduce_mean(x, 0)

        @tf.function(reduce_retracing=True)
        def step(batch, train_step=train_step):
            return strategy.run(train_step, args=(batch,))

        for batch in strategy.distribute_dataset(batches().map(lambda x, tokens, y: (x,))):
            loss, mean = strategy.reduce("mean", step(batch))
            numbers += [float(loss), *np.ravel(mean).tolist()]
        weights.append(weight)
    return describe(weights, numbers)


@scenario
def two_optimizers(strategy):
    """A GAN as in TensorFlow's own pages: both gradients first, then both updates."""
    keras.utils.set_random_seed(1)
    maker, judge = (
        # Biases that stay away from zero: of a smaller one, rounding would be more than the bound.
        keras.Sequential([keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(n, bias_initializer="ones")])
        for n in (6, 1)
    )
    maker.build((None, 2))
    judge.build((None, 6))
    optimizers = keras.optimizers.Adam(1e-2), keras.optimizers.Adam(1e-2)
    cross_entropy = keras.losses.BinaryCrossentropy(from_logits=True)

    @tf.function(reduce_retracing=True)
    def step(batch):
        return strategy.reduce("mean", strategy.run(train_step, args=(batch,)))

    def train_step(batch):
        x, _, _ = batch
        with tf.GradientTape() as first, tf.GradientTape() as second:
            made = judge(maker(x[:, :2]))
            real = judge(x)
            fooled = cross_entropy(tf.ones_like(made), made)
            caught = cross_entropy(tf.ones_like(real), real) + cross_entropy(tf.zeros_like(made), made)
        for tape, loss, model, optimizer in zip(
            (first, second), (fooled, caught), (maker, judge), optimizers, strict=True
        ):
            optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        return fooled + caught

    losses = [float(step(batch)) for batch in strategy.distribute_dataset(batches())]
    return describe([*maker.variables, *judge.variables], losses)


@scenario
def names_of_tf_distribute(strategy):
    """Datasets, losses and `minimize` of v1 in the words of scripts for tf.distribute; an uneven last batch."""
    keras.utils.set_random_seed(4)  # shuffles go by it, too
    is_plain = isinstance(strategy, Plain)
    average = strategy.average_loss if is_plain else strategy.compute_average_loss
    weight = tf.Variable(tf.ones((6, 1)))
    optimizer = tf.compat.v1.train.GradientDescentOptimizer(0.01)

    def make(context):
        assert context.num_replicas_in_sync == strategy.replicas
        return batches(size=context.get_per_replica_batch_size(12), rows=41)

    sources = [batches(rows=41), batches(rows=41)]
    if not is_plain:
        names = strategy.distribute_datasets_from_function, strategy.experimental_distribute_dataset
        sources = [name(given) for name, given in zip(names, (make, sources[1]), strict=True)]

    def train_step(batch):
        def loss_of_rows():
            return average(tf.reduce_sum((batch[0] @ weight - 1) ** 2, 1))

        loss = loss_of_rows()
        optimizer.minimize(loss_of_rows, var_list=[weight])
        return loss

    @tf.function(reduce_retracing=True)
    def step(batch):
        run = strategy.run if is_plain else strategy.experimental_run_v2
        return strategy.reduce(tf.distribute.ReduceOp.SUM, run(train_step, args=(batch,)))

    return describe([weight], [float(step(batch)) for source in sources for batch in source])


@scenario
def a_death(strategy):
    def die(number):
        if number == 5 and strategy.worker == 1 and "--struck" in sys.argv:
            os.kill(os.getpid(), signal.SIGKILL)

    with strategy.scope():
        model, optimizer = network(is_noisy=True), keras.optimizers.Adam(1e-2)
    return train(strategy, model, optimizer, lambda y, z: tf.reduce_mean(each_loss(y, z)), on_batch=die)


def in_turns(strategy):
    """The second half of the step uses what the first half has trained; and `all_reduce` is part of a loss."""
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.layers.Dense(6, activation="tanh"), keras.layers.Dense(1)])
    model.build((None, 6))
    optimizer = keras.optimizers.SGD(0.1)
    variables = model.trainable_variables

    @tf.function(reduce_retracing=True)
    def step(batch):
        return strategy.reduce("mean", strategy.run(train_step, args=(batch,)))

    def train_step(batch):
        x, _, y = batch
        target = tf.cast(y, tf.float32)[:, tf.newaxis]
        for ask in (tf.distribute.get_replica_context, tf.compat.v2.distribute.get_replica_context, bound_early):
            with tf.GradientTape() as tape:
                made = model(x)
                center = mean_of_all(made, ask)
                loss = tf.reduce_mean((made - target) ** 2) + tf.reduce_mean((made - center) ** 2)
            optimizer.apply(tape.gradient(loss, variables), variables)
        with tf.GradientTape() as tape:  # a mean over some of the rows, of which replicas have different numbers
            is_one = tf.cast(target == 1, tf.float32)
            count = tf.reduce_sum(is_one)
            some = weighed(tf.math.divide_no_nan(tf.reduce_sum(is_one * model(x) ** 2), count), count)
        optimizer.apply(tape.gradient(some, variables), variables)
        return loss

    def weighed(loss, count):
        return loss if isinstance(strategy, Plain) else strategy.weigh(loss, count)

    def mean_of_all(made, ask):
        own = tf.reduce_mean(made)
        if isinstance(strategy, Plain):
            return own
        return ask().all_reduce("mean", own)

    losses = [float(step(batch)) for batch in strategy.distribute_dataset(batches())]
    return describe(model.variables, losses)


def synchronized(strategy):
    """BatchNorm of all rows of the batch: the numbers of one device."""
    keras.utils.set_random_seed(1)
    norm, last = keras.layers.BatchNormalization(synchronized=True), keras.layers.Dense(1, bias_initializer="ones")
    model = keras.Sequential([keras.Input((6,)), norm, last])
    optimizer = keras.optimizers.SGD(0.1)

    def train_step(batch):
        x, _, y = batch
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x, training=True)[:, 0] - tf.cast(y, tf.float32)) ** 2)
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        return loss

    @tf.function(reduce_retracing=True)
    def step(batch):
        return strategy.reduce("mean", strategy.run(train_step, args=(batch,)))

    losses = [float(step(batch)) for batch in strategy.distribute_dataset(batches(rows=41))]
    return describe(model.variables, losses)


def main():
    strategy = duoka.Mirrored()
    if "--one-each" in sys.argv:
        SCENARIOS.update(in_turns=in_turns, synchronized=synchronized)
    wanted = [name for name in sys.argv[1:] if not name.startswith("--")] or list(SCENARIOS)
    results = {"ours": {name: SCENARIOS[name](strategy) for name in wanted}}
    if "--plain" in sys.argv:
        results["plain"] = {name: SCENARIOS[name](Plain()) for name in wanted}
    results["step"] = strategy.step
    print_result(results)


if __name__ == "__main__":
    main()
