"""Reductions by a function, complex products, numbers for arrays, and who has an extreme."""

import ctypes

import numpy as np
import pytest

import oracle
from pycoll.errors import ArgumentError, MismatchError, PeerRejected
from pycoll.testing import run_processes, run_threads


def affine(a, b):
    """Compose x -> a[0] x + a[1], then b: associative, not commutative."""
    return np.array([b[0] * a[0], b[0] * a[1] + b[1]])


def maps(comm):
    x = np.array([comm.rank + 2, comm.rank - 1])
    return {
        "all_reduce": comm.all_reduce(x, affine),
        "reduce": comm.reduce(x, affine, root=1),
        "scan": comm.scan(x, affine),
        "exscan": comm.exscan(x, affine),
        "out": comm.all_reduce(x, affine, out=x),
    }


@pytest.mark.parametrize(("run", "n"), [(run_threads, 2), (run_threads, 5), (run_processes, 3)])
def test_a_function_combines_arrays_in_rank_order(run, n):
    parts = [np.array([rank + 2, rank - 1]) for rank in range(n)]
    total = oracle.serial(parts, affine).tolist()
    for rank, found in enumerate(run(n, maps)):
        assert found["all_reduce"].tolist() == found["out"].tolist() == total
        assert found["reduce"] is None if rank != 1 else found["reduce"].tolist() == total
        assert found["scan"].tolist() == oracle.serial(parts[: rank + 1], affine).tolist()
        below = oracle.serial(parts[:rank], affine).tolist() if rank else None
        assert found["exscan"] is None if rank == 0 else found["exscan"].tolist() == below


@pytest.mark.parametrize("order", [None, "tree", "rank"])
def test_the_order_is_that_of_the_engine(order):
    rows = np.random.default_rng(0).standard_normal((6, 50)).astype(np.float32)

    def ranks(comm):
        x = rows[comm.rank]
        return [comm.all_reduce(x, op, order=order).tobytes() for op in ("sum", np.add)]

    assert all(a == b for a, b in run_threads(6, ranks))


@pytest.mark.parametrize("run", [run_threads, run_processes])
def test_ranks_with_other_functions_are_a_mismatch(run):
    def ranks(comm):
        x = np.array([1 + 2j])
        first = comm.all_reduce(x, "prod").tolist()
        with pytest.raises(MismatchError, match="field 'function' differs") as caught:
            comm.all_reduce(x, np.multiply if comm.rank == 1 else np.add)
        return first, str(caught.value)

    found = run(3, ranks)
    assert found == [([(1 + 2j) ** 3], found[0][1])] * 3


def doubles(address, count):
    return np.ctypeslib.as_array(ctypes.cast(address, ctypes.POINTER(ctypes.c_double)), (count,))


@ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_ssize_t)
def affine_of_c(a, b, out, count):
    doubles(out, count)[:] = affine(doubles(a, count), doubles(b, count))


@pytest.mark.parametrize("order", ["tree", "rank"])
def test_a_function_of_c(order):
    def ranks(comm):
        x = np.array([comm.rank + 2.0, comm.rank - 1.0])
        y = comm.all_reduce(x, affine_of_c, order=order, out=np.empty(2))
        return [y.tolist(), comm.all_reduce(x, affine, order=order).tolist(), x.tolist()]

    for rank, (found, wanted, x) in enumerate(run_threads(5, ranks)):
        assert found == wanted
        assert x == [rank + 2, rank - 1]  # nothing was written into it


def test_a_function_of_numba():
    numba = pytest.importorskip("numba", reason="it needs Numba")
    pointer = numba.types.CPointer(numba.float32)

    @numba.cfunc(numba.void(pointer, pointer, pointer, numba.intp))
    def larger(a, b, out, count):
        for i in range(count):
            out[i] = a[i] if abs(a[i]) > abs(b[i]) else b[i]

    def ranks(comm):
        x = np.float32([[comm.rank, -5], [-comm.rank, 5]])
        return comm.all_reduce(x, larger).tolist()

    assert run_threads(3, ranks) == [[[2.0, -5.0], [-2.0, 5.0]]] * 3


def test_blocks_of_a_reduce_scatter():
    def ranks(comm):
        x = np.arange(6).reshape(6, 1) + comm.rank
        return comm.reduce_scatter(x, np.maximum).ravel().tolist()

    assert run_threads(3, ranks) == [[2, 3], [4, 5], [6, 7]]


def test_what_a_function_cannot_do():
    def ranks(comm):
        x, said = np.ones(3), []
        for call in (
            lambda: comm.all_reduce(x, np.add, async_op=True),
            lambda: comm.all_reduce(x, np.add, algorithm="ring"),
            lambda: comm.all_reduce(x, lambda a, b: a[:1]),
            lambda: comm.all_reduce(x, np.add, out=np.ones(2)),
        ):
            with pytest.raises((ArgumentError, PeerRejected)) as found:
                call()
            said.append(str(found.value))
        with pytest.raises(MismatchError):
            comm.all_reduce(x, np.add if comm.rank else "sum")
        return said

    for said in run_threads(2, ranks):
        assert "async_op is not for it" in said[0]
        assert "algorithm= is not for it" in said[1]
        assert "gave float64[1] for two arrays float64[3]" in said[2]
        assert "out has shape" in said[3]


@pytest.mark.parametrize("kind", [np.complex64, np.complex128])
def test_complex_products(kind):
    parts = [np.array([1 + 1j, 2 - rank * 1j, rank], kind) for rank in range(4)]

    def ranks(comm):
        return [comm.all_reduce(parts[comm.rank], "prod"), comm.scan(parts[comm.rank], "prod")]

    for rank, (total, prefix) in enumerate(run_threads(4, ranks)):
        assert total.dtype == kind
        assert np.array_equal(total, oracle.tree(parts, np.multiply))
        assert np.array_equal(prefix, oracle.serial(parts[: rank + 1], np.multiply))


def test_complex_products_of_the_ranks_below_begin_with_one():
    """`prod` is a name, though NumPy's function runs: rank 0 gets the neutral element."""
    parts = [np.array([1 + 1j, 2 - rank * 1j]) for rank in range(3)]

    def ranks(comm):
        x, out = parts[comm.rank], np.zeros(2, complex)
        assert comm.exscan(x, "prod", out=out) is out
        assert (comm.exscan(x, np.multiply) is None) == (comm.rank == 0)
        return comm.exscan(x, "prod"), out, comm.exscan(2j, "prod")

    for rank, (new, out, number) in enumerate(run_threads(3, ranks)):
        want = oracle.serial([np.ones(2, complex), *parts[:rank]], np.multiply)
        assert np.array_equal(new, want)
        assert np.array_equal(out, want)
        assert number == (2j) ** rank


def test_complex_products_of_buffers_and_plans():
    x = np.array([1 + 2j, 3])

    def ranks(comm):
        plan = comm.plan("all_reduce", x, "prod")
        with pytest.raises((ArgumentError, PeerRejected), match="op=prod runs in the calling"):
            comm.all_reduce(x, "prod", async_op=True)
        return comm.all_reduce(memoryview(x), "prod"), plan(x)

    for found in run_threads(2, ranks):
        assert all(np.array_equal(total, x * x) for total in found)


def numbers(comm):
    r = comm.rank
    return [
        comm.all_reduce(5),
        comm.all_reduce(0.5, "max"),
        comm.all_reduce(r == 1, "or"),
        comm.all_reduce(1j),
        comm.all_reduce([[1, 2], [3, r]]).tolist(),
        comm.all_gather(r).tolist(),
        comm.scan(2),
        comm.broadcast(10 * r, 1),
        comm.reduce((1.0, 2.0), root=0) is None,
        comm.all_reduce(7, async_op=True).wait() == 14,
    ]


def test_numbers_and_lists_of_them():
    total = [10, 0.5, True, 2j, [[2, 4], [6, 1]], [0, 1]]
    assert run_threads(2, numbers) == [[*total, 2, 10, False, True], [*total, 4, 10, True, True]]
    kinds = run_threads(1, lambda comm: [type(comm.all_reduce(x)) for x in (1, 1.0, 1j)])
    assert kinds == [[np.int64, np.float64, np.complex128]]


@pytest.mark.parametrize(
    ("x", "text"),
    [
        (2**70, "int64 cannot hold"),
        ([1, 2**64], "int64 cannot hold|other things"),
        ([1, "a"], "other things than numbers"),
        ([np.ones(2), np.ones(2)], "np.stack.*all_gather_object"),
        ([[1], [1, 2]], "is no array"),
        ("text", "x is a str"),
    ],
)
def test_what_are_no_numbers(x, text):
    def rank(comm):
        with pytest.raises(ArgumentError, match=text):
            comm.all_reduce(x)
        return comm.all_reduce(1)

    assert run_threads(1, rank) == [1]


def test_a_list_is_not_filled():
    def ranks(comm):
        with pytest.raises((ArgumentError, PeerRejected), match="a list, which a broadcast cannot"):
            comm.broadcast([1, 2])
        return comm.broadcast(comm.rank)

    assert run_threads(2, ranks) == [0, 0]


def places(comm):
    x = np.array([[3.0, np.nan, 5.0], [1.0, 2.0, 5.0], [1.0, 7.0, np.nan]])[comm.rank]
    low, high = comm.minloc(x), comm.maxloc(x)
    return [*(a.tolist() for a in (*low, *high)), comm.minloc(-comm.rank), comm.maxloc(2.5)]


def test_which_rank_has_the_smallest_and_the_largest():
    for found in run_threads(3, places):
        assert str(found[0]) == str([1.0, np.nan, np.nan])
        assert found[1] == [1, 0, 2]
        assert str(found[2]) == str([3.0, np.nan, np.nan])
        assert found[3:] == [[0, 0, 2], (-2, 2), (2.5, 0)]
