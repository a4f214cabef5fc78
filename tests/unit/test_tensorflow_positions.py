"""Where a loop is in its datasets, and the variables that it trains: taken apart in one process, found in the next."""

from __future__ import annotations

import itertools

import pytest

pytestmark = [pytest.mark.tensorflow]
tf = pytest.importorskip("tensorflow")
import keras  # noqa: E402
import numpy as np  # noqa: E402

from duoka.errors import CheckpointError, MismatchError  # noqa: E402
from duoka.frameworks.keras.draws import draw_in_turn  # noqa: E402
from duoka.frameworks.tensorflow.given import describe_optimizers, name_changes  # noqa: E402
from duoka.frameworks.tensorflow.loader import Distributed, Source  # noqa: E402
from duoka.frameworks.tensorflow.roster import Roster  # noqa: E402


class Hooks:
    def __init__(self):
        self.lost = []

    def begin_loop(self, source):
        return True

    def begin_step(self, walk):
        pass

    gave = leave = begin_step

    def leave_out(self):
        pass

    def lose(self, why):
        self.lost.append(why)


def numbers():
    return tf.data.Dataset.range(20)


def draw(number):
    return tf.cast(number, tf.float32) + tf.random.normal([])


def draw_deep(number):
    return tf.cond(number % 2 == 0, lambda: tf.function(draw)(number), lambda: 0.0)


class Noise:
    """Keeps the state of a generator in a variable."""

    def __init__(self):
        self.layer = keras.layers.GaussianNoise(0.1, seed=1)

    def __call__(self, number):
        return self.layer(tf.cast([number], tf.float32), training=True)


KINDS = {
    "shuffled": lambda: numbers().shuffle(20).batch(3),
    "shuffled twice": lambda: numbers().shuffle(20, seed=4).map(lambda x: x + 1).shuffle(5).batch(3).prefetch(2),
    "cached": lambda: numbers().shuffle(20).cache().batch(3),
    "repeated": lambda: numbers().shuffle(20).repeat(2).batch(3),
    "for ever": lambda: numbers().shuffle(20).repeat().batch(3).take(9),
    "side by side": lambda: tf.data.Dataset.zip(numbers().shuffle(20), numbers().shuffle(9)).batch(3),
    "random": lambda: numbers().map(lambda x: tf.random.uniform([])).batch(3),
    "random in parallel": lambda: numbers().shuffle(20).map(draw, num_parallel_calls=4).batch(3).prefetch(2),
    "behind each other": lambda: numbers().shuffle(20).concatenate(numbers().shuffle(20)).batch(4),
}


def distribute(make):
    tf.random.set_seed(11)
    return Distributed(draw_in_turn(make(), lambda line: None), Source(), Hooks())


def walk(dataset, num_batches=None):
    return [np.array(part).tolist() for part in itertools.islice(dataset, num_batches)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("left_after", [None, 2])
def test_a_pass_goes_on_with_the_batches_that_it_would_have_had(kind, left_after):
    calm = distribute(KINDS[kind])
    passes = [walk(calm, left_after) for _ in range(2)]
    third = iter(calm)
    passes.append(walk(third, 4))
    saved = calm.source.capture()
    assert (saved["passes"], saved["batches"]) == (2, 4)
    rest = walk(third)

    later = distribute(KINDS[kind])
    later.source.resume(saved)
    assert [walk(later), walk(later)] == [[], []], "finished passes give nothing"
    assert walk(later) == rest and rest
    assert walk(later, left_after) == walk(calm, left_after)


def test_other_batches_than_in_the_run_that_is_resumed_are_refused():
    calm = distribute(KINDS["shuffled"])
    under_way = iter(calm)
    walk(under_way, 3)
    tf.random.set_seed(12)
    other = Distributed(KINDS["shuffled"](), Source(), Hooks())
    other.source.resume(calm.source.capture())
    with pytest.raises(MismatchError, match="gives other batches than in the run that is resumed"):
        iter(other)


def many(function, stage="map", **how):
    """Seeded, so that they draw the same whenever each row draws in its turn."""
    tf.random.set_seed(11)
    numbers = tf.data.Dataset.range(800).shuffle(100, seed=2)
    return getattr(numbers, stage)(function(), **how).batch(50).prefetch(2)


def draw_inside(**how):
    return lambda number: tf.data.Dataset.range(3).map(draw, **how)


PARALLEL = {"num_parallel_calls": 4}
DRAWING = {
    "map": lambda how: many(lambda: draw, **how),
    "by itself": lambda how: many(lambda: draw, **(how and {"num_parallel_calls": tf.data.AUTOTUNE})),
    "deep": lambda how: many(lambda: draw_deep, **how),
    "layer": lambda how: many(Noise, **how),
    "interleave": lambda how: many(draw_inside, "interleave", cycle_length=4, **how),
    "inside": lambda how: many(lambda: draw_inside(**how), "flat_map"),
}


@pytest.mark.parametrize("kind", DRAWING)
def test_what_is_drawn_in_parallel_calls_is_drawn_as_in_one_after_the_other(kind):
    said = []
    drawn = draw_in_turn(DRAWING[kind](PARALLEL), said.append)
    alone = DRAWING[kind]({})
    assert draw_in_turn(alone, said.append) is alone
    assert [walk(drawn), walk(drawn)] == [walk(alone), walk(alone)]
    (line,) = said
    assert "a dataset draws random numbers, or counts, in parallel calls" in line
    assert ("AssignVariableOp" if kind == "layer" else "RandomStandardNormal") in line
    assert draw_in_turn(drawn, said.append) is drawn


def test_parallel_calls_that_draw_nothing_or_draw_without_state_are_left_alone():
    def stateless(number):
        return tf.random.stateless_normal([], [number, 1])

    def in_python(number):
        return tf.numpy_function(lambda number: number + 1, [number], tf.int64)

    for function in (stateless, in_python, lambda number: number + 1):
        dataset = many(lambda function=function: function, **PARALLEL)
        assert draw_in_turn(dataset, pytest.fail) is dataset
    assert draw_in_turn([1, 2], pytest.fail) == [1, 2]


def test_an_iterator_that_a_graph_draws_from_is_known_to_be_lost():
    dataset = distribute(KINDS["shuffled"])
    iterator = iter(dataset)
    tf.function(lambda iterator: next(iterator))(iterator)
    assert "given to a tf.function" in dataset._hooks.lost[0]


def model_and_optimizer(width=4):
    keras.utils.clear_session()
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(width)])
    return model, keras.optimizers.Adam()


@pytest.fixture
def watched():
    rosters = []

    def watch(*kept):
        roster = Roster()
        roster.begin()
        roster._entries.clear(), roster._by_id.clear(), roster._counts.clear()
        for variable in kept:
            roster._add(variable.value, variable.path, is_early=True)
        rosters.append(roster)
        return roster

    yield watch
    for roster in reversed(rosters):
        roster._watching.close()


def given_to(*optimizers):
    names = {id(each.iterations.value): each.iterations.path for each in optimizers if hasattr(each, "iterations")}
    return describe_optimizers(optimizers, lambda variable: names.get(id(variable)))


def test_values_that_a_script_gives_otherwise_to_its_optimizers_are_named_by_whose_count():
    def make(rate, momentum, old_rate):
        inner = keras.optimizers.SGD(rate, momentum, name="inner")
        old = tf.compat.v1.train.GradientDescentOptimizer(old_rate)
        scaling = keras.optimizers.LossScaleOptimizer(inner, name="scaling")
        return given_to(scaling, inner, keras.optimizers.Adam(rate, name="adam"), old)

    before = make(0.002, 0.9, 0.25)
    assert name_changes(make(0.002, 0.9, 0.25), before) == []
    assert name_changes(make(0.1, 0.8, 0.5), before) == [
        "the saved run goes on with its own values, not with those of this script:"
        " inner_optimizer learning_rate of inner (LossScaleOptimizer) is 0.1 here, and was 0.002;"
        " learning_rate of adam (Adam) is 0.1 here, and was 0.002",
        "the run goes on with values of this script, not with those of the saved run:"
        " inner_optimizer momentum of inner (LossScaleOptimizer) is 0.8 here, and was 0.9;"
        " learning_rate of GradientDescentOptimizer is 0.5 here, and was 0.25",
    ]


def test_slots_have_their_saved_values_from_the_first_moment(watched):
    model, optimizer = model_and_optimizer()
    roster = watched(*model.variables, *optimizer.variables)
    optimizer.build(model.trainable_variables)
    for variable in (*model.variables, *optimizer.variables):
        variable.assign(variable + 3)
    state = roster.capture()
    expected = {each.path: each.numpy() for each in (*model.variables, *optimizer.variables)}
    roster._watching.close()

    model, optimizer = model_and_optimizer()
    roster = watched(*model.variables, *optimizer.variables)
    roster.check(state)
    roster.restore(state)

    @tf.function
    def build():
        with tf.init_scope():
            optimizer.build(model.trainable_variables)
        return tf.identity(optimizer.variables[2].value)

    first = build()
    np.testing.assert_array_equal(first, expected[optimizer.variables[2].path])
    for variable in (*model.variables, *optimizer.variables):
        np.testing.assert_array_equal(variable.numpy(), expected[variable.path])


def test_the_first_variable_that_differs_is_named(watched):
    model, optimizer = model_and_optimizer()
    state = watched(*model.variables, *optimizer.variables).capture()
    other, optimizer = model_and_optimizer(width=5)
    with pytest.raises(CheckpointError, match=r"dense/kernel \(3, 5\) float32 is in this one where the saved one has"):
        watched(*other.variables, *optimizer.variables).check(state)
    with pytest.raises(CheckpointError, match="is in the saved one only"):
        watched(*model.variables).check(state)


def test_a_variable_that_is_gone_stays_in_the_list_of_those_that_were_there_at_the_start(watched):
    kept, gone = (keras.Variable([1.0], name=name) for name in ("kept", "gone"))
    roster = watched(kept, gone)
    del gone
    others = [tf.Variable([float(number)]) for number in range(50)]  # one of them may get its id
    state = roster.capture()
    assert [line.split()[0] for line in state["lines"]] == ["kept", "gone"] and list(state["variables"]) == ["kept"]
    assert len(state["later"]) == len(others)
