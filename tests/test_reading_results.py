"""Reading results on the host, whatever memory they lie in."""

import jax
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from jaxprefill.kernels.device import PINNED, begin_reading, read_numbers


@pytest.mark.parametrize("kind", [None, PINNED])
@pytest.mark.parametrize("dtype", ["float32", "int32", "bfloat16"])
def test_numbers_are_read_from_any_memory_and_outlive_their_array(kind, dtype):
    made = jax.numpy.arange(12, dtype=dtype).reshape(3, 4)
    array = jax.device_put(made, SingleDeviceSharding(jax.devices()[0], memory_kind=kind))
    begin_reading(array)
    found = read_numbers(array)
    array.delete()
    assert found.dtype == dtype and found.shape == (3, 4)
    np.testing.assert_array_equal(found.astype(np.int32), np.arange(12).reshape(3, 4))


def test_pinned_numbers_are_no_view():
    place = SingleDeviceSharding(jax.devices()[0], memory_kind=PINNED)
    array = jax.device_put(np.ones(4, np.float32), place)
    assert read_numbers(array).ctypes.data != array.unsafe_buffer_pointer()
