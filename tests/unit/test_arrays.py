import gc
import math
import subprocess
import sys
import textwrap
import weakref

import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from duoka.collectives.arrays import as_array, sum_dtype, weigh
from duoka.collectives.values import decode, encode
from duoka.errors import MismatchError
from tests.limits import START_S


def address(array):
    return array.__array_interface__["data"][0]


@pytest.mark.torch
def test_a_torch_tensor_lends_its_memory_even_when_it_tracks_gradients():
    import torch

    for tensor in (torch.zeros(5), torch.nn.Parameter(torch.zeros(5))):
        array = as_array(tensor)
        assert address(array) == tensor.data_ptr()
        array[2] = 7
        assert tensor[2] == 7


@pytest.mark.torch
def test_a_bfloat16_tensor_of_torch_lends_its_memory_too():
    import torch

    tensor = torch.tensor([1.5, -2.0], dtype=torch.bfloat16)
    array = as_array(tensor)
    assert array.dtype == ml_dtypes.bfloat16 and array.tolist() == [1.5, -2.0]
    assert address(array) == tensor.data_ptr()


def run_apart(code: str) -> None:
    """In a process of its own: a runtime of TensorFlow or JAX that has started would forbid other tests to fork."""
    head = "import ml_dtypes, numpy as np\nfrom duoka.collectives.arrays import as_array\n"
    subprocess.run([sys.executable, "-c", head + textwrap.dedent(code)], check=True, timeout=START_S)


@pytest.mark.tensorflow
def test_a_tensorflow_tensor_lends_its_memory():
    run_apart("""
        import tensorflow as tf
        tensor = tf.constant([1.0, 2.0])
        address = lambda array: array.__array_interface__["data"][0]
        assert address(as_array(tensor)) == address(np.asarray(memoryview(tensor)))
        assert as_array(tf.constant([1.5], tf.bfloat16)).dtype == ml_dtypes.bfloat16
    """)


@pytest.mark.jax
def test_a_jax_array_is_read_in_every_float_type():
    run_apart("""
        import jax.numpy as jnp
        for dtype in (jnp.float32, jnp.bfloat16, jnp.float16):
            assert as_array(jnp.ones(3, dtype)).tolist() == [1, 1, 1]
    """)


def test_numbers_are_arrays_without_dimensions():
    assert as_array(3).shape == () and as_array(2.5).dtype == np.float64


def test_sixteen_bit_floats_are_added_in_thirty_two():
    assert sum_dtype(np.dtype("f2")) == np.float32
    assert sum_dtype(np.dtype(ml_dtypes.bfloat16)) == np.float32
    assert sum_dtype(np.dtype("i8")) == np.int64


@pytest.mark.parametrize("dtype", ["?", "O", "S4", "M8[s]"])
def test_what_has_no_sum_is_refused(dtype):
    with pytest.raises(MismatchError, match="cannot be added up"):
        sum_dtype(np.dtype(dtype))


def test_weight_zero_leaves_out_even_nan():
    out = np.ones(2, np.float32)
    weigh(np.array([np.nan, np.inf], np.float32), 0.0, out)
    assert out.tolist() == [0, 0]


plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.text() | st.floats(allow_nan=False),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(plain)
@example({"__array__": None})
@example({"__dictionary__": {"__array__": [{"__dictionary__": 1.0}]}})
def test_plain_values_come_back_as_they_were(value):
    assert decode(encode(value)) == value


def test_arrays_and_odd_numbers_come_back_in_type_shape_and_bits():
    value = {
        "a": np.arange(6, dtype="f4").reshape(2, 3),
        "b": [np.int16(3), float("nan"), math.inf],
        "c": np.array(True),
    }
    back = decode(encode(value))
    assert back["a"].dtype == np.float32 and back["a"].tolist() == value["a"].tolist()
    assert back["b"][0] == 3 and math.isnan(back["b"][1]) and back["b"][2] == math.inf
    assert back["c"].dtype == bool


@pytest.mark.parametrize("value", [object(), {1: 2}, np.array([object()]), "x" and {"k": lambda: 0}])
def test_what_would_need_pickle_is_refused(value):
    with pytest.raises(MismatchError):
        encode(value)


def test_reading_a_number_keeps_nothing_of_whoever_asked():
    class Batch:
        pass

    def train() -> weakref.ref[Batch]:
        batch = Batch()
        as_array(0.5)  # two ways of reading it fail first
        return weakref.ref(batch)

    gc.disable()
    try:
        assert train()() is None
    finally:
        gc.enable()
