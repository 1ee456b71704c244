"""Calls that end on one rank before they begin: the peers of that very call hear of it."""

import contextlib
import dataclasses
import resource
from pathlib import Path

import numpy as np
import pytest

from pycoll.algorithms import find
from pycoll.errors import CommClosed, PeerRejected, Revoked
from pycoll.runtime.calls.parts import v_variants
from pycoll.runtime.startup import make_groups
from pycoll.testing import run_processes

ODD = 1  # the rank whose arguments raise
INTERRUPTS = (KeyboardInterrupt, SystemExit, GeneratorExit)


class Times:
    """A number that can be looked at a few times, and then raises."""

    def __init__(self, times, value, error):
        self.left, self.value, self.error = times, value, error

    def look(self, *_):
        self.left -= 1
        if self.left < 0:
            raise self.error("not again")
        return self.value

    __float__ = __index__ = look

    def __bool__(self):
        return bool(self.look())

    def __eq__(self, other):
        return self.look() == other

    def __le__(self, other):
        return self.look() <= other

    def __lt__(self, other):
        return self.look() < other

    def __ge__(self, other):
        return self.look() >= other

    __hash__ = None


class Raising:
    """An object that raises when it is looked at, whatever for."""

    def __init__(self, error):
        self.error = error

    def look(self, *_):
        raise self.error("do not look")

    __bool__ = __float__ = __index__ = __eq__ = __le__ = __lt__ = __ge__ = __repr__ = look
    __array_interface__ = property(look)
    __hash__ = None


def ring_that_raises(error):
    ring = find("all_reduce", "ring")

    def rounds(rank, n):
        yield from ring.rounds(rank, n)
        raise error("at the end")

    return dataclasses.replace(ring, name="raising", rounds=rounds)


def twos(comm):
    return np.ones(2 * comm.world_size), [2] * comm.world_size


# What is passed: (a call with it, one that is good).
CALLS = {
    "x": (lambda c, a: c.all_reduce(a), np.ones(4)),
    "out": (lambda c, a: c.all_reduce(np.ones(4), out=a), None),
    "op": (lambda c, a: c.all_reduce(np.ones(4), a), "sum"),
    "order": (lambda c, a: c.all_reduce(np.ones(4), order=a), None),
    "algorithm": (lambda c, a: c.all_reduce(np.ones(4), algorithm=a), None),
    "timeout": (lambda c, a: c.all_reduce(np.ones(4), timeout=a), 9.0),
    "async_op": (lambda c, a: c.all_reduce(np.ones(4), async_op=a), False),
    "async_op of a barrier": (lambda c, a: c.barrier(async_op=a), False),
    "root": (lambda c, a: c.broadcast(np.ones(4), a), 0),
    "x of a plan": (lambda c, a: c.plan("all_reduce", np.ones(4))(a), np.ones(4)),
    "colour": (lambda c, a: c.split(a), 0),
    "timeout of a check": (lambda c, a: c.check(timeout=a), 9.0),
    "x of different sizes": (lambda c, a: c.all_gather_v(a), np.ones(4)),
    "timeout of different sizes": (lambda c, a: c.all_gather_v(np.ones(4), timeout=a), 9.0),
    "root of different sizes": (lambda c, a: c.gather_v(np.ones(4), a), 0),
    "root of counts": (lambda c, a: c.scatter_v(*twos(c), a), 0),
    "order of counts": (lambda c, a: c.reduce_scatter_v(*twos(c), order=a), None),
}
NUMBERS = {name: good for name, (_, good) in CALLS.items() if isinstance(good, (int, float))}


def total(comm):
    return comm.all_reduce(np.arange(3.0)).tolist()


def ends(comm, call, argument, good, error):
    """Make one call; return whether it ended as it has to, and the sum of the next one."""
    expected = error if comm.rank == ODD else Revoked if error in INTERRUPTS else PeerRejected
    with pytest.raises(expected) as caught:
        call(comm, argument if comm.rank == ODD else good)
    told = comm.rank == ODD or f"rank {ODD} " in str(caught.value)
    if error not in INTERRUPTS:
        return told, total(comm)
    with pytest.raises(Revoked, match=error.__name__):
        total(comm)
    return told, None


@pytest.mark.parametrize("error", [ValueError, MemoryError, *INTERRUPTS], ids=lambda e: e.__name__)
def test_arguments_that_raise(run, error):
    """The peers make the same call twice: the second one of the odd rank is not taken for it."""

    def rank(comm):
        found = {}
        for name, (call, good) in CALLS.items():
            if name == "op" and error is ValueError:
                continue  # what cannot be shown is told of otherwise
            with comm.dup() as twin:
                found[name] = ends(twin, call, Raising(error), good, error)
            comm.barrier()
        return found

    after = None if error in INTERRUPTS else [0.0, 2.0, 4.0]
    for found in run(2, rank):
        assert found == dict.fromkeys(found, (True, after))


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_that_change(run, name):
    """However often a number is looked at, its rank is in the call, or all ranks are told."""
    call, good = CALLS[name]

    def rank(comm):
        for times in range(8):
            try:
                call(comm, Times(times, good, ValueError) if comm.rank == ODD else good)
            except ValueError:
                assert comm.rank == ODD
            except PeerRejected:
                assert comm.rank != ODD
            assert total(comm) == [0.0, 2.0, 4.0]
        return True

    assert run(2, rank) == [True, True]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt], ids=lambda e: e.__name__)
def test_an_algorithm_that_is_interrupted(run, error):
    ring = find("all_reduce", "ring")
    call, _ = CALLS["algorithm"]

    def rank(comm):
        kind = error if error in INTERRUPTS else Exception
        return ends(comm, call, ring_that_raises(error), ring, kind if comm.rank == ODD else error)

    after = None if error in INTERRUPTS else [0.0, 2.0, 4.0]
    assert run(2, rank) == [(True, after)] * 2


def test_no_memory_for_the_result_of_a_call_like_an_earlier_one():
    """Such a call has no preparation; the peers must not take the next one for it."""

    def rank(comm):
        x = np.full(20 << 20, comm.rank + 1, np.uint8)  # malloc keeps no room as large
        comm.all_gather(x)
        limits, taken = resource.getrlimit(resource.RLIMIT_AS), []
        if comm.rank == ODD:
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            room = pages * resource.getpagesize() + (2 << 20)
            resource.setrlimit(resource.RLIMIT_AS, (room, limits[1]))
            with contextlib.suppress(MemoryError):
                while True:  # what the process has mapped and does not use
                    taken.append(np.empty(4 << 20, np.uint8))
        with pytest.raises(MemoryError if comm.rank == ODD else PeerRejected) as caught:
            comm.all_gather(x)
        resource.setrlimit(resource.RLIMIT_AS, limits)
        return "MemoryError" in repr(caught.value), comm.all_gather(2 * x)[:: x.size].tolist()

    assert run_processes(2, rank) == [(True, [2, 4])] * 2


# What fits no signature, and the call that the others make.
MISFITS = {
    "a name": (lambda c: c.all_reduce(np.ones(4), foo=1), lambda c: c.all_reduce(np.ones(4))),
    "too many": (lambda c: c.barrier(1), lambda c: c.barrier()),
    "too few": (lambda c: c.broadcast(), lambda c: c.broadcast(np.ones(4))),
    "twice": (lambda c: c.gather(np.ones(4), x=1), lambda c: c.gather(np.ones(4))),
    "different sizes": (lambda c: c.all_gather_v(), lambda c: c.all_gather_v(np.ones(4))),
    "colours": (lambda c: c.split(0, 0, 0), lambda c: c.split(0)),
    "twins": (lambda c: c.dup(1), lambda c: c.dup()),
    "a check": (lambda c: c.check(9.0), lambda c: c.check()),
}


@pytest.mark.parametrize("name", MISFITS)
def test_arguments_that_fit_no_signature(run, name):
    wrong, right = MISFITS[name]

    def rank(comm):
        total(comm)
        told = ends(comm, lambda c, call: call(c), wrong, right, TypeError)
        comm.close()
        with pytest.raises(CommClosed):
            wrong(comm)
        return told

    assert run(2, rank) == [(True, [0.0, 2.0, 4.0])] * 2


@pytest.mark.parametrize("name", MISFITS)
def test_what_fits_no_signature_is_told_with_the_method(run, name):
    def rank(comm):
        with pytest.raises(TypeError, match=r"^\w+\.\w+\(\) "):
            MISFITS[name][0](comm)

    run(1, rank)


PARTS = {
    "split": (make_groups, lambda c: c.split(0)),
    "dup": (make_groups, lambda c: c.dup()),
    "all_gather_v": (v_variants, lambda c: c.all_gather_v(np.ones(4))),
    "reduce_scatter_v": (v_variants, lambda c: c.reduce_scatter_v(*twos(c))),
    "all_to_all_v": (v_variants, lambda c: c.all_to_all_v(*twos(c))),
}


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("name", PARTS)
def test_an_interrupt_between_the_parts_of_a_call(name, error):
    module, call = PARTS[name]
    exchange = module.exchange

    def interrupted(*args):
        exchange(*args)
        raise error

    def rank(comm):
        if comm.rank == ODD:
            module.exchange = interrupted
            with pytest.raises(error):
                call(comm)
        with pytest.raises(Revoked, match=rf"rank 1 was interrupted \({error.__name__}\)"):
            call(comm)
        return True

    assert run_processes(3, rank) == [True] * 3
