"""Ranks that do not call the same thing: MismatchError on all of them, with who, what, where."""

import re
import time

import numpy as np
import pytest

from pycoll.errors import MismatchError
from pycoll.testing import run_processes, run_threads

BOUND_S = 1.0
X = np.ones(4)
RECORDS = np.dtype([("a", "i4"), ("b", "f4")]), np.dtype([("a", "f4"), ("b", "i4")])


def symmetric(comm, size):
    x = comm.empty(size, np.float64)
    x[:] = 1
    return x


# name: (field that the error names, what most ranks call, what the odd one calls)
KINDS = {
    "dtype of equal size": (
        "dtype",
        lambda c: c.all_reduce(np.ones(4, np.float32)),
        lambda c: c.all_reduce(np.ones(4, np.int32)),
    ),
    "dtype that is only moved": (
        "dtype",
        lambda c: c.all_gather(np.zeros(4, "M8[s]")),
        lambda c: c.all_gather(np.zeros(4, "M8[ms]")),
    ),
    "dtype of equal bytes that is only moved": (
        "dtype",
        lambda c: c.broadcast(np.zeros(4, np.complex64)),
        lambda c: c.broadcast(np.zeros(4, np.float64)),
    ),
    "complex numbers and their parts": (
        "dtype",
        lambda c: c.all_reduce(np.ones(4, np.float32)),
        lambda c: c.all_reduce(np.ones(2, np.complex64)),
    ),
    "truth values and bytes": (
        "dtype",
        lambda c: c.all_reduce(np.ones(4, np.uint8), "max"),
        lambda c: c.all_reduce(np.ones(4, bool), "max"),
    ),
    "fields of a record": (
        "dtype",
        lambda c: c.all_gather(np.zeros(4, RECORDS[0])),
        lambda c: c.all_gather(np.zeros(4, RECORDS[1])),
    ),
    "names of fields": (
        "dtype",
        lambda c: c.all_gather(np.zeros(4, [("a", "i4"), ("b", "i4")])),
        lambda c: c.all_gather(np.zeros(4, [("b", "i4"), ("a", "i4")])),
    ),
    "length of texts": (
        "dtype",
        lambda c: c.all_gather(np.array(["x" * 50])),
        lambda c: c.all_gather(np.array(["x" * 6])),
    ),
    "op": ("op", lambda c: c.all_reduce(X, "sum"), lambda c: c.all_reduce(X, "max")),
    "average": ("op", lambda c: c.reduce(X, "sum"), lambda c: c.reduce(X, "avg")),
    "root": ("root", lambda c: c.broadcast(X, root=0), lambda c: c.broadcast(X, root=1)),
    "count": ("count", lambda c: c.all_reduce(X), lambda c: c.all_reduce(np.ones(2))),
    "count by far": ("count", lambda c: c.all_reduce(X), lambda c: c.all_reduce(np.ones(400_000))),
    "nothing": ("count", lambda c: c.all_reduce(X), lambda c: c.all_reduce(np.ones(0))),
    "count of a share": ("count", lambda c: c.all_gather(X), lambda c: c.all_gather(np.ones(5))),
    "order": (
        "order",
        lambda c: c.all_reduce(X, order="tree"),
        lambda c: c.all_reduce(X, order="rank"),
    ),
    "algorithm": (
        "algorithm",
        lambda c: c.all_reduce(X, algorithm="one_shot"),
        lambda c: c.all_reduce(X, algorithm="two_shot_pull"),
    ),
    "kind": ("kind", lambda c: c.all_reduce(X), lambda c: c.broadcast(X)),
    "barrier": ("kind", lambda c: c.all_reduce(X), lambda c: c.barrier()),
    "two that exchange counts": (
        "kind",
        lambda c: c.scatter_v(np.ones(2 * c.world_size), [2] * c.world_size),
        lambda c: c.all_to_all_v(np.ones(2 * c.world_size), [2] * c.world_size),
    ),
    "counts and numbers": (
        "kind",
        lambda c: c.all_gather_v(np.ones(3)),
        lambda c: c.all_gather(np.ones((1, 2), np.uint64)),
    ),
    "a split and numbers": (
        "kind",
        lambda c: c.split(0),
        lambda c: c.all_gather(np.ones((1, 3), np.int64)),
    ),
    "memory": (
        "memory",
        lambda c: c.all_reduce(np.ones(100_000)),
        lambda c: c.all_reduce(symmetric(c, 100_000), out=symmetric(c, 100_000)),
    ),
    "memory of the input": (
        "memory",
        lambda c: c.all_gather(np.ones(4000)),
        lambda c: c.all_gather(symmetric(c, 4000)),
    ),
    "memory of the result": (
        "memory",
        lambda c: c.reduce_scatter(symmetric(c, 120_000)),
        lambda c: c.reduce_scatter(
            symmetric(c, 120_000), out=symmetric(c, 120_000 // c.world_size)
        ),
    ),
    "a plan": (
        "op",
        lambda c: c.all_reduce(X, "min"),
        lambda c: c.plan("all_reduce", X, "max")(X),
    ),
    "in the background": (
        "op",
        lambda c: c.all_reduce(X, "min"),
        lambda c: c.all_reduce(X, "max", async_op=True).wait(),
    ),
}


def places(call):
    """Return a pattern for the places of a call: it may stand on any line of its lambda."""
    lines = sorted({line for _, _, line in call.__code__.co_lines() if line})
    return "test_mismatch.py:(" + "|".join(map(str, lines)) + ")"


def provoke(run, n, name, odd):
    """Let one rank make the odd call; return what the others and it raise, and how soon."""
    _, usual, other = KINDS[name]

    def rank(comm):
        comm.all_reduce(X)
        start = time.monotonic()
        with pytest.raises(MismatchError) as caught:
            (other if comm.rank == odd else usual)(comm)
        elapsed = time.monotonic() - start
        with pytest.raises(MismatchError, match=re.escape(str(caught.value).splitlines()[0])):
            comm.barrier()  # for good
        return str(caught.value), elapsed

    return run(n, rank)


@pytest.mark.parametrize("name", KINDS)
def test_all_ranks_are_told(run, name):
    field, usual, other = KINDS[name]
    n, odd = 3, 2
    results = provoke(run, n, name, odd)
    for text, elapsed in results:
        assert f"field '{field}' differs" in text
        assert "rank 2 differs from the others" in text
        for rank in range(n):
            assert re.search(f"rank {rank}: .*{places(other if rank == odd else usual)}", text), (
                text
            )
        assert elapsed < BOUND_S
    assert len({text for text, _ in results}) == 1


@pytest.mark.parametrize("n", [2, 4, 5])
@pytest.mark.parametrize("odd", [0, 1])
def test_any_rank_in_any_world(n, odd):
    for text, elapsed in provoke(run_threads, n, "op", odd):
        assert "field 'op' differs" in text
        assert (f"rank {odd} differs from the others" in text) == (n > 2)
        assert elapsed < BOUND_S


@pytest.mark.parametrize("name", ["all_gather", "gather"])
def test_a_gathering_call_says_that_it_counts_the_result(run, name):
    def rank(comm):
        with pytest.raises(MismatchError) as caught:
            getattr(comm, name)(np.ones(3 if comm.rank == 2 else 4))
        return str(caught.value)

    for text in run(3, rank):
        assert f"rank 0: {name}(into float64[12], " in text
        assert f"rank 2: {name}(into float64[9], " in text
        assert f"Blocks of different sizes are for {name}_v." in text


def test_a_call_that_one_rank_skips():
    def rank(comm):
        comm.barrier()
        if comm.rank == 1:
            with pytest.raises(MismatchError) as caught:
                comm.all_reduce(X)
        else:
            with pytest.raises(MismatchError) as caught:
                comm.broadcast(X)
        return str(caught.value)

    for text in run_processes(3, rank):
        assert "field 'kind' differs: rank 1 differs from the others" in text
        assert "rank 0: broadcast(" in text
        assert "rank 1: all_reduce(" in text


def test_an_eager_call_that_one_rank_skips_at_the_end(run):
    """A broadcast of few bytes needs nothing of the receivers; still nobody gets away with it."""

    def rank(comm):
        if comm.rank == 0:
            with pytest.raises(MismatchError):
                comm.broadcast(X)
            return True
        with pytest.raises(MismatchError):
            comm.all_gather(X)
        return True

    assert run(2, rank) == [True, True]


def test_nothing_is_written_outside_of_the_arrays():
    def rank(comm):
        small = comm.rank == 1
        count = 4 if small else 300_000
        memory = comm.empty(600_000, np.float64)
        memory[:] = -1
        with pytest.raises(MismatchError):
            comm.all_reduce(np.ones(count), out=memory[300 : 300 + count])
        return bool((memory[:300] == -1).all() and (memory[300 + count :] == -1).all())

    assert run_processes(3, rank) == [True] * 3


def test_the_output_of_a_small_call_is_untouched(run):
    def rank(comm):
        out = np.full(4, -1.0)
        with pytest.raises(MismatchError):
            comm.all_reduce(X, "max" if comm.rank else "sum", out=out)
        return out.tolist()

    assert run(2, rank) == [[-1.0] * 4] * 2


def test_other_communicators_stay_usable(run):
    def rank(comm):
        twin = comm.dup()
        with pytest.raises(MismatchError):
            twin.all_reduce(np.ones(1 + comm.rank))
        return float(comm.all_reduce(np.ones(1))[0])

    assert run(2, rank) == [2.0, 2.0]
