"""Element types as ranks compare them, and outputs that have to be of the type of the input."""

import itertools

import numpy as np
import pytest

from pycoll.errors import ArgumentError
from pycoll.runtime.arrays.host_arrays import as_reducible, check_output, view
from pycoll.types import DType, type_name

PARTS = ["i4", "f4", "u1", "c8", "U3", "(2,)i4", "(2,1)i4", "2i4,f4"]
TYPES = [
    *("bool", "int8", "uint8", "int64", "float16", "float32", "float64", "complex64", "complex128"),
    *("V8", "V16", "M8[s]", "M8[ms]", "m8[s]", "clongdouble", "longdouble"),
    *(f"{kind}{size}" for kind in "SU" for size in range(1, 65)),
    *([("a", one), ("b", two)] for one, two in itertools.product(PARTS, PARTS)),
    [("b", "i4"), ("a", "f4")],
    {"names": ["a", "b"], "formats": ["i4", "f4"], "itemsize": 12},
    {"names": ["a", "b"], "formats": ["i4", "f4"], "offsets": [4, 0]},
    {"names": ["a", "b"], "formats": ["i4", "f4"], "offsets": [0, 0]},
]


def told(dtype):
    return view(np.zeros(1, dtype), "x").caller_code


def test_every_type_has_a_code_of_its_own():
    dtypes = {np.dtype(t): told(t) for t in TYPES}
    assert len(dtypes) == len({str(d) for d in dtypes}) == len(TYPES)
    assert len(set(dtypes.values())) == len(dtypes)  # but for chance: see `type_code`


def test_equal_types_have_equal_codes():
    packed = np.dtype({"names": ["a", "b"], "formats": ["i1", "i4"], "offsets": [0, 4]})
    aligned = np.dtype([("a", "i1"), ("b", "i4")], align=True)
    assert packed == aligned
    assert told(packed) == told(aligned)
    assert told("i8") == told(np.longlong) == DType.INT64


@pytest.mark.parametrize(
    ("name", "op", "folded"),
    [
        ("complex64", "sum", DType.FLOAT32),
        ("complex128", "avg", DType.FLOAT64),
        ("bool", "max", DType.BOOL),
        ("float32", "sum", DType.FLOAT32),
    ],
)
def test_what_is_folded_as_something_else_keeps_its_name(name, op, folded):
    given = view(np.zeros(4, name), "x")
    reducible = as_reducible(given, op, "x")
    assert reducible.code == reducible.dtype == folded
    assert type_name(reducible.caller_code) == type_name(given.caller_code) == name


@pytest.mark.parametrize("name", [str(d) for d in ("int32", "bool", "complex64", "M8[s]", "U5")])
def test_an_output_of_the_same_type(name):
    given = view(np.zeros(4, name), "x")
    check_output(view(np.zeros(4, name), "out"), (4,), given)
    for other in ("uint32", "uint8", "float64", "M8[ms]", "U6", "V8"):
        with pytest.raises(ArgumentError, match=r"out has dtype .*but x has dtype"):
            check_output(view(np.zeros(4, other), "out"), (4,), given)


def test_an_output_is_called_what_the_caller_calls_it():
    with pytest.raises(ArgumentError, match=r"^x is not C-contiguous"):
        check_output(view(np.zeros(4)[::2], "x"), (2,), None, "x")


class Lent:
    """An array of another library, seen through ``__array_interface__``."""

    def __init__(self, array):
        self.array = array
        self.__array_interface__ = array.__array_interface__


@pytest.mark.parametrize("array", [np.zeros(0), np.zeros(3), np.zeros(()), bytearray(3)])
def test_memory_that_is_lent_is_no_copy(array):
    check_output(view(array, "out"), np.shape(np.asarray(array)), None)
    if isinstance(array, np.ndarray):
        check_output(view(Lent(array), "out"), array.shape, None)


@pytest.mark.parametrize("scalar", [np.float32(1), np.int8(1), np.bool_(1), np.datetime64("2000")])
def test_a_scalar_is_a_copy(scalar):
    with pytest.raises(ArgumentError, match=r"out is an? \w+ whose memory cannot be written to"):
        check_output(view(scalar, "out"), (), None)


def test_a_record_of_an_array_is_a_part_of_it():
    records = np.zeros(2, "i4,f4")
    target = view(records[1], "out")
    check_output(target, (), None)
    target.array["f0"] = 7
    assert records["f0"].tolist() == [0, 7]


def test_arrays_of_jax_are_read_only():
    """Their capsules cannot say so, and nothing may write to what never changes."""

    def show(self):
        return self.data.__dlpack__()

    shown = {"__module__": "jaxlib._jax", "data": np.zeros(3), "__dlpack__": show}
    shown["__dlpack_device__"] = lambda self: (1, 0)
    array = type("ArrayImpl", (), shown)()
    assert not view(array, "x").array.flags.writeable
    assert view(type("Other", (), shown | {"__module__": "other"})(), "x").array.flags.writeable


def test_a_tracer_of_jax_has_no_memory():
    """Inside ``jax.jit`` arrays have the method, and nothing to show."""
    tracer = type("Tracer", (), {"__dlpack__": lambda self: None})()
    with pytest.raises(ArgumentError, match=r"x is a Tracer, which has no memory.*io_callback"):
        view(tracer, "x")


def test_what_has_to_numpy_is_told_to_use_it():
    frame = type("DataFrame", (), {"to_numpy": lambda self: np.zeros(3)})()
    with pytest.raises(ArgumentError, match=r"pass x\.to_numpy\(\)"):
        view(frame, "x")
