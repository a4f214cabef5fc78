"""What the user's code raises is the user's: told with replica and step, never tried again on another worker."""

from __future__ import annotations

import pytest

from tests.limits import START_S
from tests.process.scripts import Ended, run, start


def check(ended: Ended, line: str, *shown: str, code: int = 1) -> None:
    """All stopped because of this; the error's own traceback is shown last. TensorFlow says its own before that."""
    assert ended.code == code, ended.err
    assert [text for text in ended.said() if " stopped because " in text] == [line], ended.err
    traceback = ended.err.split(line)[1]
    assert "duoka: " not in traceback, ended.err
    assert all(text in traceback for text in shown), traceback
    assert " go on" not in ended.err  # nobody was lost, and nothing was computed again


NUMPY = """
import os, sys
import duoka
import numpy
strategy = duoka.Mirrored(devices=2, replicas=4)

def compute(replica):
    if (strategy.step, replica) == (5, 3):
        {raises}
    print("computed", strategy.step, replica, flush=True)
    return numpy.ones(3)

for step in range(9):
    strategy.sum_over_replicas(compute)
"""


@pytest.mark.parametrize(
    "raises, shown",
    [
        ("raise ValueError('bad rows')", "ValueError: bad rows"),
        pytest.param("raise MemoryError('no room')", "MemoryError: no room", marks=pytest.mark.slow),
    ],
    ids=["ValueError", "MemoryError"],
)
def test_an_error_in_a_replica_names_replica_and_step_and_is_not_tried_again(tmp_path, raises, shown):
    ended = run(tmp_path, NUMPY.format(raises=raises))
    check(ended, "1 worker stopped because worker 1 (cpu:0/v1) failed in replica 3 at step 5:", "in compute", shown)
    assert ended.err.endswith(f"{shown}\n")
    computed = [line for worker in (0, 1) for line in ended.log(worker).splitlines() if line.startswith("computed 5")]
    assert "computed 5 3" not in computed and "computed 5 2" in computed


def test_what_a_worker_writes_to_stderr_while_it_is_stopped_for_another_is_in_its_log_only(tmp_path):
    source = """
        import sys
        import duoka
        import numpy
        strategy = duoka.Mirrored(devices=2)
        try:
            for step in range(9):
                strategy.sum_over_replicas(lambda replica: numpy.ones(3))
                if step == 4 and strategy.worker == 1:
                    raise KeyError("mine")
        except BaseException:
            print("a long story of worker", strategy.worker, file=sys.stderr, flush=True)
            print("cleaned up", strategy.worker, flush=True)
            raise
    """
    ended = run(tmp_path, source)
    check(ended, "1 worker stopped because worker 1 (cpu:0/v1) failed after step 4:", "KeyError: 'mine'")
    assert "a long story of worker 0" in ended.log(0) and "a long story of worker 0" not in ended.err
    assert "a long story of worker 1" in ended.err and "cleaned up 0" in ended.out


def test_an_error_between_two_steps_names_the_last_one(tmp_path):
    source = NUMPY.format(raises="pass") + "    if step == 4 and strategy.worker == 0: raise KeyError('between')\n"
    ended = run(tmp_path, source)
    check(ended, "1 worker stopped because worker 0 (cpu:0/v0) failed after step 4:", "KeyError: 'between'")


@pytest.mark.slow
def test_errors_of_duoka_itself_say_where_they_are_in_their_own_words(tmp_path):
    source = NUMPY.format(raises="return numpy.ones(4)")
    ended = run(tmp_path, source)
    assert ended.code == 1 and "failed:" in ended.err and "failed in replica" not in ended.err


TORCH = """
import os, sys
import duoka
strategy = duoka.Mirrored(devices=2, replicas=4)
import torch


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, index):
        if sys.argv[1] == "dataset" and index == 61:
            raise OSError("row 61 cannot be read")
        return torch.full([3], float(index)), torch.tensor([1.0])

model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
model, optimizer, loader = strategy.prepare(model, optimizer, torch.utils.data.DataLoader(Rows(), batch_size=16))

def loss_of(x, y):
    if sys.argv[1] == "forward" and float(x[0, 0]) == 40:
        raise ValueError("row 40 is bad")
    return (model(x) - y).square().mean()

for batch in strategy.batches(loader):
    optimizer.zero_grad()
    strategy.backward(loss_of, batch)
    optimizer.step()
    if sys.argv[1] == "after" and batch.index == 1 and strategy.worker == 1:
        raise ValueError("batch 1 is bad")

def count(x, y):
    if sys.argv[1] == "evaluate" and float(x[0, 0]) >= 48:
        raise ValueError("cannot count this")
    if sys.argv[1] == "memory" and float(x[0, 0]) >= 48:
        torch.empty(1 << 50)
    return y.sum(), len(y)

strategy.evaluate(count, loader)
"""


@pytest.mark.torch
@pytest.mark.parametrize(
    "where, line, shown",
    [
        ("forward", 3, "ValueError: row 40 is bad"),
        pytest.param("after", 2, "ValueError: batch 1 is bad", marks=pytest.mark.slow),
        pytest.param("dataset", 4, "OSError: row 61 cannot be read", marks=pytest.mark.slow),
        pytest.param("evaluate", 1, "ValueError: cannot count this", marks=pytest.mark.slow),
        pytest.param("memory", 1, "DefaultCPUAllocator: can't allocate memory", marks=pytest.mark.slow),
    ],
)
def test_errors_of_a_pytorch_script_name_the_worker_and_end_with_its_own_traceback(tmp_path, where, line, shown):
    ended = start(tmp_path, TORCH, where).finish(START_S, leaves=["torchinductor_"])
    check(ended, f"1 worker stopped because worker 1 (cpu:0/v1) failed after step {line}:", 'script.py", line', shown)


KERAS = """
import os, sys
os.environ["KERAS_BACKEND"] = sys.argv[1]
import duoka
import numpy
strategy = duoka.Mirrored(devices=2)
import keras

class Picky(keras.layers.Layer):
    def call(self, x):
        return self.check(x)
    def check(self, x):
        if keras.backend.backend() == "tensorflow":
            import tensorflow as tf
            def look(rows):
                if rows.max() == 40:
                    raise ValueError("row 40 is bad")
                return rows
            y = tf.numpy_function(look, [x], tf.float32)
            y.set_shape(x.shape)
            return x + 0 * tf.stop_gradient(y)
        if keras.backend.backend() == "torch" and float(x.max()) == 40:
            raise ValueError("row 40 is bad")
        return x

with strategy.scope():
    model = keras.Sequential([keras.Input([1]), Picky(), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
rows = numpy.arange(64, dtype="float32")[:, None]
rows[41:48] = 0
rows[48:] = 0
model.fit(rows, rows, batch_size=16, shuffle=False, verbose=0)
"""


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["tensorflow", "torch"])
def test_errors_inside_fit_name_replica_and_step(tmp_path, backend):
    ended = start(tmp_path, KERAS, backend).finish(START_S, leaves=["torchinductor_"])
    line = "1 worker stopped because worker 1 (cpu:0/v1) failed in replica 1 at step 2:"
    check(ended, line, 'script.py", line', "row 40 is bad")


TENSORFLOW = """
import sys
import duoka
import numpy
strategy = duoka.Mirrored(devices=2)
import tensorflow as tf

weights = tf.Variable(tf.zeros([1]))
optimizer = tf.keras.optimizers.SGD(1e-6)
rows = numpy.arange(64, dtype="float32")[:, None]
rows[41:] = 0
data = strategy.distribute_dataset(tf.data.Dataset.from_tensor_slices(rows).batch(16))

def step(x):
    tf.debugging.assert_less(x, 40.0, message="row 40 is bad")
    with tf.GradientTape() as tape:
        loss = strategy.average_loss(tf.reduce_sum(x * weights, 1))
    optimizer.apply_gradients([(tape.gradient(loss, weights), weights)])
    return loss

@tf.function
def train(x):
    return strategy.run(step, args=(x,))

for x in data:
    train(x) if sys.argv[1] == "graph" else strategy.run(step, args=(x,))
"""


@pytest.mark.slow
@pytest.mark.tensorflow
@pytest.mark.parametrize("how", ["graph", "eager"])
def test_errors_inside_run_name_replica_and_step(tmp_path, how):
    ended = run(tmp_path, TENSORFLOW, how, timeout_s=START_S)
    line = "1 worker stopped because worker 1 (cpu:0/v1) failed in replica 1 at step 2:"
    check(ended, line, 'script.py", line', "InvalidArgumentError", "row 40 is bad")
