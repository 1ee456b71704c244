"""Memory of ranks that only send messages: the same checks as those of symmetric memory."""

import numpy as np
import pytest

from pycoll.errors import ArgumentError
from pycoll.runtime.arrays.symmetric_memory import PlainMemory


@pytest.mark.parametrize(
    ("shape", "dtype", "text"),
    [
        (3, object, r"dtype=object holds Python objects"),
        (-3, "f4", r"shape=-3: dimensions must not be negative"),
        ((2, -3), "f4", r"shape=\(2, -3\)"),
        ((2, 1.5), "f4", r"shape=\(2, 1.5\)"),
        ("ab", "f4", r"shape='ab'"),
        (3, "no such type", r"dtype='no such type'"),
    ],
)
@pytest.mark.parametrize("zero", [False, True])
def test_arrays_that_cannot_be(shape, dtype, text, zero):
    with pytest.raises(ArgumentError, match=text):
        PlainMemory().empty(shape, dtype, zero)


@pytest.mark.parametrize("shape", [1 << 50, (1 << 40, 1 << 40)])
def test_more_than_there_is_memory_for(shape):
    with pytest.raises(MemoryError):
        PlainMemory().empty(shape, "f8")


@pytest.mark.parametrize("shape", [0, 3, np.int64(3), (), (2, 3), [4, 0]])
def test_an_ordinary_array(shape):
    made, zeros = PlainMemory().empty(shape, "i2"), PlainMemory().empty(shape, "i2", True)
    assert made.shape == zeros.shape == np.zeros(shape).shape
    assert made.dtype == zeros.dtype == np.int16
    assert not zeros.any()
    assert made.flags.writeable
    assert PlainMemory().heap is None
