"""Bad input: refused with what was given and what is accepted, before anything reaches a peer."""

import inspect
import sys
import typing

import numpy as np
import pytest

import pycoll
from pycoll import algorithms
from pycoll.errors import ArgumentError, PeerRejected

F, READ_ONLY = np.ones(4), np.ones(4)
I = np.ones(4, np.int32)  # noqa: E741
READ_ONLY.flags.writeable = False
MEMORY, GRID = np.ones(16), np.ones((4, 4))


class Copied:
    """An array that lends no memory: every look at it is another copy."""

    def __init__(self, array):
        self.array, self.shown = array, []

    @property
    def __array_interface__(self):
        self.shown.append(self.array.copy())
        return self.shown[-1].__array_interface__


# What is wrong: (call, what the message must say).
BAD = {
    "op": (
        lambda c: c.all_reduce(F, "mean"),
        r"op='mean'.*accepted: sum, prod, min.*, and functions of two arrays",
    ),
    "a function where none is taken": (
        lambda c: c.reduce_scatter_v(F, [len(F), *[0] * (c.world_size - 1)], np.hypot),
        r"op=<ufunc 'hypot'> is a function; all_reduce, .* take one.*accepted here: sum",
    ),
    "op that is a call": (lambda c: c.all_reduce(F, "argmax"), r"'argmax'.*comm.maxloc\(x\)$"),
    "op in capitals": (lambda c: c.all_reduce(F, "SUM"), r"op='SUM'.*did you mean 'sum'"),
    "op of a v-variant in capitals": (
        lambda c: c.reduce_scatter_v(F, [len(F), *[0] * (c.world_size - 1)], "Max"),
        r"op='Max'.*did you mean 'max'",
    ),
    "op of another library": (lambda c: c.all_reduce(F, "MPI_BOR"), r"did you mean 'or'\?$"),
    "op that is not near": (lambda c: c.all_reduce(F, "norm"), r"functions of two arrays$"),
    "op by its sign": (lambda c: c.all_reduce(F, "+"), r"op='\+'.*did you mean 'sum'"),
    "op of Python": (lambda c: c.all_reduce(F, sum), r"function sum>: pass .*, op='sum'$"),
    "op of NumPy": (lambda c: c.reduce(F, np.mean), r"pass the name .*, op='avg'$"),
    "a result in place of op": (lambda c: c.all_reduce(F, F), r"op is an array; .* as out=$"),
    "a root in place of op": (lambda c: c.reduce(F, 0), r"op=0 .*a root goes by name"),
    "op that is no name": (lambda c: c.all_reduce(F, 5), r"op=5 is not known"),
    "op of integers": (lambda c: c.all_reduce(F, "xor"), r"op='xor'.*integers.*x is float64"),
    "op of numbers": (
        lambda c: c.reduce(F > 0, "sum"),
        r"op='sum'.*dtype bool.*x.astype\(int\) counts",
    ),
    "op of ordered types": (lambda c: c.all_reduce(F * 1j, "max"), r"op='max'.*complex128"),
    "op for records": (lambda c: c.all_reduce(np.zeros(4, "i4,f4")), r"op='sum'.*dtype \[\('f0', "),
    "op for dates": (
        lambda c: c.all_reduce(np.zeros(4, "M8[s]")),
        r"datetime64\[s\].*x.view\(np.int64\) is",
    ),
    "objects": (lambda c: c.all_gather(np.array([None])), r"x has dtype object.*Python objects"),
    "mask": (lambda c: c.all_reduce(np.ma.ones(4)), r"x is a masked array.*x.filled\(value\)"),
    "byte order": (
        lambda c: c.all_reduce(I.astype(">i4")),
        r"'>i4'.*x\.astype\(x\.dtype\.newbyteorder\('='\)\)",
    ),
    "list": (lambda c: c.all_reduce([None]), r"x is a list of other things than numbers"),
    "nothing": (
        lambda c: c.broadcast(None),
        r"x is None; .*passes an array, .*np.empty\(shape\).*broadcast_object",
    ),
    "object": (lambda c: c.all_gather(object()), r"x is an object; accepted are NumPy arrays"),
    "text": (lambda c: c.all_gather("abc"), r"x is a str"),
    "output of another shape": (
        lambda c: c.all_reduce(F, out=np.ones(5)),
        r"out has shape \(5,\).*\(4,\)",
    ),
    "output of another rank": (
        lambda c: c.all_reduce(np.ones(()), out=np.ones(1)),
        r"out has shape \(1,\).*\(\)",
    ),
    "output too small": (
        lambda c: c.all_gather(F, out=np.ones(4)),
        r"out has shape \(4,\).*\(8,\)",
    ),
    "output of another dtype": (
        lambda c: c.all_reduce(F, out=np.ones(4, np.float32)),
        r"out has dtype float32, but x has dtype float64",
    ),
    "output with other fields": (
        lambda c: c.all_gather(np.zeros(2, "i4,f4"), out=np.zeros(4, "f4,i4")),
        r"out has dtype \[\('f0', '<f4'\).*but x has dtype \[\('f0', '<i4'\)",
    ),
    "output that is a scalar": (
        lambda c: c.all_reduce(np.ones(()), out=np.float64(0)),
        r"out is a float64 whose memory cannot be written.*pass an array",
    ),
    "output that shows a copy of itself": (
        lambda c: c.all_reduce(F, out=Copied(F)),
        r"out is a Copied whose memory cannot be written",
    ),
    "output read-only": (lambda c: c.all_reduce(F, out=READ_ONLY), r"out is read-only"),
    "input read-only, in place": (
        lambda c: c.all_reduce(READ_ONLY, out=READ_ONLY),
        r"out is read-only",
    ),
    "output in immutable bytes": (
        lambda c: c.all_gather(np.zeros(1, np.uint8), out=b"ab"),
        r"out is read-only",
    ),
    "output with gaps": (
        lambda c: c.all_reduce(F, out=MEMORY[::4]),
        r"out is not C-contiguous \(shape \(4,\), strides \(32,\)\)",
    ),
    "output backwards": (lambda c: c.all_reduce(F, out=MEMORY[3::-1]), r"not C-contiguous"),
    "output in Fortran order": (lambda c: c.all_reduce(GRID, out=GRID.T), r"not C-contiguous"),
    "output that is no array": (lambda c: c.all_reduce(F, out=[0] * 4), r"out is a list"),
    "overlap": (lambda c: c.all_reduce(MEMORY[:8], out=MEMORY[1:9]), r"x and out overlap partly"),
    "overlap from below": (
        lambda c: c.reduce_scatter(MEMORY[:8], out=MEMORY[7:11]),
        r"x and out overlap partly",
    ),
    "root below": (lambda c: c.broadcast(F, root=-1), r"root=-1.*accepted: 0 to 1"),
    "root above": (lambda c: c.reduce(F, root=2), r"root=2.*accepted: 0 to 1"),
    "root that is true": (lambda c: c.gather(F, root=True), r"root=True"),
    "root in between": (lambda c: c.scatter(F, root=0.5), r"root=0.5"),
    "root in an array": (lambda c: c.broadcast(F, root=np.array(0)), r"root=array\(0\)"),
    "root that is text": (lambda c: c.broadcast(F, root="0"), r"root='0'"),
    "order": (lambda c: c.all_reduce(F, order="fast"), r"order='fast'.*accepted: any, tree, rank"),
    "order in an array": (
        lambda c: c.all_reduce(F, order=np.array(["tree"])),
        r"order=array\(\['tree'\]",
    ),
    "elements without bytes": (
        lambda c: c.broadcast(np.empty(4, np.dtype([]))),
        r"x has dtype \[\], whose elements have no bytes",
    ),
    "foreign byte order in a record": (
        lambda c: c.broadcast(np.empty(4, ">i4,<f4")),
        r"x\.astype\(x\.dtype\.newbyteorder\('='\)\)",
    ),
    "order that is no text": (lambda c: c.all_reduce(F, order=["tree"]), r"order=\['tree'\]"),
    "algorithm": (lambda c: c.all_reduce(F, algorithm="rings"), r"'rings'.*(known|accepted).*ring"),
    "algorithm that is no name": (
        lambda c: c.all_reduce(F, algorithm=5),
        r"algorithm=5 is an int; accepted.*one_shot",
    ),
    "algorithm that is a plain function": (
        lambda c: c.all_reduce(F, algorithm=len),
        r"algorithm=<built-in function len> is .*a function under @algorithm\('all_reduce'\)",
    ),
    "algorithm that is a list of names": (
        lambda c: c.all_reduce(F, algorithm=["ring"]),
        r"algorithm=\['ring'\] is a list; accepted.*ring",
    ),
    "algorithm of another collective": (
        lambda c: c.all_reduce(F, algorithm=algorithms.find("broadcast", "direct")),
        r"'direct' computes broadcast, not all_reduce",
    ),
    "algorithm of another order": (
        lambda c: c.all_reduce(F, algorithm="one_shot", order="rank"),
        r"'one_shot' gives order tree, not rank",
    ),
    "no time": (lambda c: c.barrier(timeout=0), r"timeout=0.*above 0"),
    "negative time": (lambda c: c.all_reduce(F, timeout=-1.0), r"timeout=-1.0"),
    "time that is no number": (lambda c: c.all_reduce(F, timeout=float("nan")), r"timeout=nan"),
    "time that spells a number": (lambda c: c.all_reduce(F, timeout="3"), r"timeout='3'.*a number"),
    "time in bytes": (lambda c: c.barrier(timeout=b"3"), r"timeout=b'3'.*a number"),
    "time that is text": (lambda c: c.all_reduce(F, timeout="soon"), r"timeout='soon'"),
    "indivisible": (
        lambda c: c.reduce_scatter(np.ones(5)),
        r"shape \(5,\).*multiple of the world size 2; .*scatter_v .*different sizes$",
    ),
    "indivisible by dimension": (lambda c: c.all_to_all(np.ones((3, 2))), r"shape \(3, 2\)"),
    "nothing to divide": (lambda c: c.all_to_all(np.ones(())), r"shape \(\)"),
    "nothing to divide at the root": (lambda c: c.scatter(np.ones(3), c.rank), r"shape \(3,\)"),
    "no output to scatter into": (
        lambda c: c.scatter(root=1 - c.rank),
        r"needs out=, or an x like.*scatter_object$",
    ),
    "no input to scatter": (
        lambda c: c.scatter(root=c.rank, out=F.copy()),
        r"x is None; .*passes an array, .*np.empty\(shape\).*broadcast_object",
    ),
    "output off the root": (
        lambda c: c.reduce(F, root=1 - c.rank, out=F.copy()),
        r"out is for the root, rank",
    ),
    "in the background": (lambda c: c.all_reduce(F, "mean", async_op=True), r"op='mean'"),
    "counts that wrap": (
        lambda c: c.all_to_all_v(np.zeros(0), np.full(2, 1 << 63, np.uint64)),
        r"counts add up to 18446744073709551616, but x has 0 rows",
    ),
    "counts beyond all memory": (
        lambda c: c.scatter_v(np.zeros(0), [1 << 62, 0], root=1 - c.rank),
        r"counts=\[4611686018427387904, 0\].*at most 281474976710656 rows",
    ),
    "counts of several lengths": (
        lambda c: c.all_to_all_v(F, [[1], [1, 2]]),
        r"counts=\[\[1\], \[1, 2\]\]; accepted are 2 integers",
    ),
    "plan": (lambda c: c.plan("all_reduce", F)(np.ones(3)), r"made for float64\[4\]"),
    "plan with a bad output": (
        lambda c: c.plan("all_reduce", F)(F, out=READ_ONLY),
        r"out is read-only",
    ),
    "plan without time": (lambda c: c.plan("all_reduce", F)(F, timeout=0), r"timeout=0"),
}


def good(comm):
    return comm.all_reduce(np.arange(3.0)).tolist()


@pytest.mark.parametrize("name", BAD)
def test_one_rank_is_wrong(run, name):
    call, text = BAD[name]

    def rank(comm):
        assert good(comm) == [0.0, 2.0, 4.0]
        if comm.rank == 1:
            with pytest.raises(ArgumentError, match=text) as caught:
                call(comm)
        else:
            with pytest.raises(PeerRejected, match=r"rank 1 refused its arguments") as caught:
                comm.all_reduce(F)
        return good(comm), str(caught.value)

    (after, told), (also, said) = run(2, rank)
    assert after == also == [0.0, 2.0, 4.0]
    assert said[:100] in told


@pytest.mark.parametrize("name", BAD)
def test_all_ranks_are_wrong(run, name):
    call, text = BAD[name]

    def rank(comm):
        for _ in range(3):
            with pytest.raises(ArgumentError, match=text):
                call(comm)
        return good(comm)

    assert run(2, rank) == [[0.0, 2.0, 4.0]] * 2


def test_refusals_again_and_again(run):
    """In turn, by each rank, in small and large calls, with and without symmetric memory."""

    def rank(comm):
        x = comm.empty(40_000)
        x[:] = comm.rank
        for i in range(30):
            wrong = i % comm.world_size == comm.rank
            try:
                comm.all_reduce(x if i % 2 else F, "mean" if wrong else "sum")
            except ArgumentError:
                assert wrong
            except PeerRejected:
                assert not wrong
            else:
                raise AssertionError("nobody refused")
            assert comm.all_reduce(x, "max")[-1] == comm.world_size - 1
        return x[0]

    assert run(3, rank) == [0.0, 1.0, 2.0]


def test_inputs_and_outputs_of_a_refused_call_are_untouched(run):
    def rank(comm):
        x, out = comm.empty(50_000), comm.empty(50_000)
        x[:], out[:] = comm.rank, -1
        with pytest.raises((ArgumentError, PeerRejected)):
            comm.all_reduce(x, "mean" if comm.rank == 2 else "sum", out=x)
        with pytest.raises((ArgumentError, PeerRejected)):
            comm.all_reduce(np.ones(4), "mean" if comm.rank == 2 else "sum", out=np.ones(4))
        return bool((x == comm.rank).all() and (out == -1).all())

    assert run(3, rank) == [True] * 3


def test_more_than_there_is_memory_for(run):
    def rank(comm):
        huge = np.broadcast_to(np.ones(1), (1 << 50,))
        error = MemoryError if comm.rank == 0 else PeerRejected
        with pytest.raises(error):
            comm.all_reduce(huge if comm.rank == 0 else F)
        return good(comm)

    assert run(2, rank) == [[0.0, 2.0, 4.0]] * 2


@pytest.mark.parametrize("root", [1, np.int64(1), np.uint8(1)], ids=repr)
def test_any_integer_is_a_root(run, root):
    def rank(comm):
        return comm.broadcast(np.array([comm.rank]), root).tolist()

    assert run(2, rank) == [[1], [1]]


@pytest.mark.parametrize(
    ("shape", "dtype", "error", "text"),
    [
        (-1, "f4", ArgumentError, r"shape=-1"),
        ((2, -3), "f4", ArgumentError, r"shape=\(2, -3\)"),
        ((2, 1.5), "f4", ArgumentError, r"shape=\(2, 1.5\)"),
        ("ab", "f4", ArgumentError, r"shape='ab'"),
        (3, object, ArgumentError, r"dtype=object"),
        (3, "no such type", ArgumentError, r"dtype='no such type'"),
        (1 << 50, "f8", MemoryError, r"bytes|address space"),
        ((1 << 40, 1 << 40), "f8", MemoryError, r"bytes|address space"),
    ],
)
def test_symmetric_arrays_that_cannot_be(run, shape, dtype, error, text):
    def rank(comm):
        with pytest.raises(error, match=text):
            comm.empty(shape, dtype)
        return comm.empty(3, np.int8).shape

    assert run(2, rank) == [(3,), (3,)]


@pytest.mark.skipif(sys.version_info < (3, 11), reason="typing.Unpack is of Python 3.11")
def test_types_of_arguments_can_be_looked_up():
    for name, method in inspect.getmembers(pycoll.Communicator, callable):
        if not name.startswith("_"):
            assert "return" in typing.get_type_hints(method), name
