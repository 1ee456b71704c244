"""Every kind of CPU array goes in and out; nothing but NumPy is needed for it."""

import array
import ctypes
import mmap

import ml_dtypes
import numpy as np
import pytest

import oracle
from pycoll.errors import ArgumentError


class Interface:
    """An array that speaks ``__array_interface__`` only."""

    def __init__(self, values):
        self._keep = values
        self.__array_interface__ = values.__array_interface__


class Exporter:
    """An array that speaks DLPack only."""

    def __init__(self, values, device=None):
        self.values, self._device = values, device

    def __dlpack__(self, **options):
        return self.values.__dlpack__(**options)

    def __dlpack_device__(self):
        return self._device or self.values.__dlpack_device__()

    def new_empty(self, shape):
        return Exporter(np.empty(shape, self.values.dtype))


class EarlyExporter(Exporter):
    """From before DLPack 1.0: its capsules do not tell whether memory may be written to."""

    def __dlpack__(self, *, stream=None):
        return self.values.__dlpack__(stream=stream)


# Makes an array of four 16-bit integers, and reads it back.
KINDS = {
    "ndarray": (np.array, np.asarray),
    "buffer of array": (lambda v: array.array("h", v.tolist()), np.asarray),
    "memoryview": (lambda v: memoryview(np.array(v)), np.asarray),
    "ctypes": (lambda v: (ctypes.c_int16 * len(v))(*v.tolist()), np.ctypeslib.as_array),
    "array interface": (lambda v: Interface(np.array(v)), lambda x: x._keep),
    "dlpack": (lambda v: Exporter(np.array(v)), lambda x: x.values),
    "early dlpack": (lambda v: EarlyExporter(np.array(v)), lambda x: x.values),
    "subclass": (lambda v: np.array(v).view(np.recarray), np.asarray),
}
VALUES = np.array([1, -2, 300, 4], np.int16)


def test_memory_that_dlpack_calls_read_only(run):
    """As that of libraries whose arrays never change."""

    def rank(comm):
        values = VALUES.copy()
        values.flags.writeable = False
        x = Exporter(values)
        total = comm.all_reduce(x)
        with pytest.raises(ArgumentError, match="out is read-only"):
            comm.all_reduce(VALUES, out=x)
        return total.values.tolist(), values.tolist()

    assert run(2, rank) == [((2 * VALUES).tolist(), VALUES.tolist())] * 2


@pytest.mark.parametrize("kind", KINDS)
def test_in_and_out(run, kind):
    make, read = KINDS[kind]

    def rank(comm):
        x, out = make(VALUES), make(VALUES * 0)
        result = comm.all_reduce(x)
        assert comm.all_reduce(x, out=out) is out
        comm.all_reduce(x, out=x)
        return [np.asarray(read(a)).tolist() for a in (out, x)] + [len(read_any(result))]

    def read_any(result):
        return result.values if isinstance(result, Exporter) else result

    double = (2 * VALUES).tolist()
    assert run(2, rank) == [[double, double, 4]] * 2


def test_bytes_are_unsigned_integers(run):
    def rank(comm):
        out = bytearray(3)
        comm.all_reduce(b"\x01\x02\x03", out=out)
        return bytes(out), comm.all_gather(bytearray(b"ab")).tobytes()

    assert run(2, rank) == [(b"\x02\x04\x06", b"abab")] * 2


def test_a_result_is_of_the_kind_of_the_input(run):
    def rank(comm):
        x = Exporter(np.arange(3.0))
        return [type(comm.all_reduce(a)).__name__ for a in (x, np.arange(3.0), b"abc")]

    assert run(2, rank) == [["Exporter", "ndarray", "ndarray"]] * 2


def test_torch_tensors(run):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")

    def rank(comm):
        x = torch.full((2, 3), float(comm.rank), dtype=torch.bfloat16)
        result = comm.all_reduce(x + 1)
        comm.all_reduce(x, out=x)
        return isinstance(result, torch.Tensor), result.sum().item(), x.sum().item()

    assert run(2, rank) == [(True, 18.0, 6.0)] * 2


def test_a_message_of_a_type_that_numpy_lacks(run):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")

    def rank(comm):
        pairs = [(torch.ones(2, dtype=torch.bfloat16), np.ones(2, np.uint16))] * 2
        for x in (x for pair in pairs for x in pair):  # NumPy sees the first as uint16 too
            comm.send(x, 1 - comm.rank)
            comm.recv(x, 1 - comm.rank)
        return pairs[0][1].tolist()

    assert run(2, rank) == [[1, 1]] * 2


LAYOUTS = {
    "Fortran order": lambda x: np.asfortranarray(x),
    "transposed": lambda x: x.T,
    "every other": lambda x: x[::2, 1::3],
    "backwards": lambda x: x[::-1, ::-1],
    "repeated": lambda x: np.broadcast_to(x[0], (4, 6)),
    "read-only": lambda x: np.frombuffer(x.tobytes(), x.dtype).reshape(x.shape),
    "a scalar": lambda x: x[1, 2],
    "0-dimensional": lambda x: x[1, 2, ...],
    "misaligned": lambda x: np.frombuffer(b"?" + x.tobytes(), x.dtype, offset=1),
    "misaligned with gaps": lambda x: np.frombuffer(b"?" + x.tobytes(), x.dtype, offset=1)[::3],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_inputs_of_any_layout(run, layout):
    whole = np.arange(24.0).reshape(4, 6)

    def rank(comm):
        x = LAYOUTS[layout](whole)
        sums, joined = comm.all_reduce(x), comm.all_gather(x)
        assert sums.shape == np.shape(x)
        want = np.concatenate([np.atleast_1d(x)] * 2)
        return (sums == 2 * x).all() and (joined == want).all()

    assert run(2, rank) == [True, True]
    assert (whole == np.arange(24.0).reshape(4, 6)).all()


def test_memory_that_is_mapped(run):
    def rank(comm):
        x = np.frombuffer(mmap.mmap(-1, 8 * 1000), np.float64)
        x[:] = comm.rank + 1
        comm.all_reduce(x, out=x)
        return x.min(), x.max()

    assert run(2, rank) == [(3.0, 3.0)] * 2


@pytest.mark.parametrize("kind", [np.complex64, np.complex128])
def test_complex_numbers(run, kind):
    x = (np.arange(5) * (1 - 2j)).astype(kind)

    def rank(comm):
        total = comm.all_reduce(x, "sum")
        mean = comm.all_reduce(x * (comm.rank + 1), "avg", out=np.empty_like(x))
        shares = comm.reduce_scatter(x[1:])
        assert total.dtype == mean.dtype == shares.dtype == x.dtype
        return (total == 2 * x).all() and (mean == 1.5 * x).all() and shares.tolist()

    assert run(2, rank) == [(2 * x[1:3]).tolist(), (2 * x[3:]).tolist()]


@pytest.mark.parametrize(("op", "want"), [("or", [0, 1, 1]), ("and", [0, 0, 1]), ("xor", [0, 1, 0]),
                                          ("max", [0, 1, 1]), ("min", [0, 0, 1])])  # fmt: skip
def test_booleans(run, op, want):
    def rank(comm):
        x = np.array([False, comm.rank == 0, True])
        result = comm.all_reduce(x, op)
        assert result.dtype == np.bool_
        return result.astype(int).tolist()

    assert run(2, rank) == [want] * 2


ODD_SIZES = (1, 3, 64, 1000, 100_003)


def odd_results(comm, op):
    """Return what each collective that combines makes of odd truth values, and should make."""
    n = comm.world_size
    for size in ODD_SIZES:
        ours, theirs = zip(*(oracle.odd_booleans(r, size * n) for r in range(n)), strict=True)
        x, want = ours[comm.rank], oracle.reduce(theirs, op)
        block = slice(size * comm.rank, size * (comm.rank + 1))
        yield comm.all_reduce(x, op), want
        yield comm.all_reduce(x.copy(), op, out=x.copy()), want
        yield comm.reduce_scatter(x, op), want[block]
        yield comm.reduce_scatter_v(x, [size] * n, op), want[block]
        if (got := comm.reduce(x, op, root=n - 1)) is not None:
            yield got, want
        shared = comm.empty(x.shape, np.bool_)
        shared[:] = x
        yield comm.all_reduce(shared, op, out=shared), want
    moved = comm.all_gather(x[:5])
    yield moved, np.concatenate([part[:5] for part in ours])


def test_bytes_of_booleans_that_are_neither_0_nor_1(run):
    """Whatever is not 0 is true; a result has 0 and 1. Calls that only move keep the bytes."""

    def rank(comm):
        for op in ("and", "or", "xor", "min", "max"):
            for got, want in odd_results(comm, op):
                assert got.tobytes() == want.tobytes(), op

    for n in (2, 3, 5):
        run(n, rank)


MOVED = {
    "bool": np.array([True, False]),
    "complex64": np.array([1j, 2], np.complex64),
    "dates": np.array(["2020-01-01", "NaT"], "M8[D]"),
    "bytes": np.array([b"ab", b"cde"]),
    "text": np.array(["ab", "xyz"]),
    "records": np.array([(1, 2.5), (3, 4.5)], [("a", "i1"), ("b", "f8")]),
    "float128": np.array([1, 2], np.longdouble),
    "float8": np.array([0.5, 2], ml_dtypes.float8_e4m3b11fnuz),
    "bfloat16": np.array([0.5, 2], ml_dtypes.bfloat16),
    "raw": np.frombuffer(b"abcdef", "V3"),
}


@pytest.mark.parametrize("name", MOVED)
def test_types_that_are_only_moved(run, name):
    x = MOVED[name]

    def rank(comm):
        results = [
            comm.all_gather(x),
            comm.broadcast(x if comm.rank else np.empty_like(x), root=1),
            comm.all_to_all(x),
            comm.all_gather_v(x),
        ]
        assert all(result.dtype == x.dtype for result in results)
        return [result.tobytes() for result in results]

    twice = np.concatenate([x, x]).tobytes()
    swapped = [np.concatenate([x[r : r + 1]] * 2).tobytes() for r in range(2)]
    assert run(2, rank) == [[twice, x.tobytes(), swapped[r], twice] for r in range(2)]


def test_a_tensor_on_a_device_of_another_make(run):
    """Those of CUDA are tried in tests/cuda."""

    def rank(comm):
        with pytest.raises(ArgumentError, match=r"x lives on a device \(DLPack type 10\)"):
            comm.all_reduce(Exporter(np.ones(3), device=(10, 0)))
        return True

    assert run(2, rank) == [True, True]


@pytest.mark.parametrize("shape", [(), 0, 5, (2, 3), (0, 4), [2, 2], np.int64(3)], ids=repr)
def test_symmetric_arrays_of_any_shape(run, shape):
    want = np.empty(shape).shape

    def rank(comm):
        x = comm.empty(shape, np.float64)
        x[...] = comm.rank
        comm.all_reduce(x, out=x)
        return x.shape == want and x.flags.c_contiguous and bool((x == 1).all())

    assert run(2, rank) == [True, True]
