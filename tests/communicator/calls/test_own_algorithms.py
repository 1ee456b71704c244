"""Algorithms that a program brings along: proven before they run, and run as they were proven."""

import itertools

import numpy as np
import pytest

import pycoll
from pycoll.errors import ArgumentError, MismatchError, ScheduleError
from pycoll.schedule.ir import ACC, IN, OUT, TMP, algorithm, at, fold
from pycoll.testing import run_processes


@algorithm("all_reduce", "lost", chunks=1)
def lost(rank, n):
    yield fold([at(peer, IN) for peer in range(n - 1)], to=at(rank, OUT))


@algorithm("all_reduce", "double", chunks=1)
def double(rank, n):
    yield fold([*(at(peer, IN) for peer in range(n)), at(rank, IN)], to=at(rank, OUT))


@algorithm("all_reduce", "nothing")
def nothing(rank, n):
    yield from ()


@algorithm("all_reduce", "lying", chunks=1, order="tree")
def lying(rank, n):
    yield fold([at(peer, IN) for peer in range(n)], to=at(rank, OUT))


@algorithm("reduce", "elsewhere", chunks=1, root=0)
def elsewhere(rank, n, *, root):
    yield fold([at(peer, IN) for peer in range(n)], to=[at(root, OUT), at(root + 1, OUT)])


@algorithm("all_reduce", "endless", chunks=1)
def endless(rank, n):
    for _ in itertools.count():
        yield fold(at(rank, IN), to=at(rank, OUT))


@algorithm("all_reduce", "crumbs", chunks=lambda n: 3 * 10**7)
def crumbs(rank, n):
    yield fold([at(peer, IN) for peer in range(n)], to=at(rank, OUT))


@algorithm("all_reduce", "no folds", chunks=1)
def no_folds(rank, n):
    yield None


@algorithm("all_reduce", "half a chunk", chunks=1)
def half_a_chunk(rank, n):
    yield fold([at(peer, IN, 0.5) for peer in range(n)], to=at(rank, OUT))


@algorithm("all_reduce", "a mask of another length", chunks=1)
def short_mask(rank, n):
    everybody = np.ones(n + 1, bool)
    yield fold([at(peer, IN) for peer in range(n)], to=at(rank, OUT), where=everybody)


WRONG = (
    *(lost, double, nothing, lying, elsewhere, endless),
    *(crumbs, no_folds, half_a_chunk, short_mask),
)


@pytest.mark.parametrize("wrong", WRONG, ids=lambda a: a.name)
def test_a_wrong_algorithm_does_not_run(wrong):
    def rank(comm):
        out = np.full(100, -7.0)
        call = getattr(comm, wrong.collective)
        with pytest.raises(ScheduleError, match=wrong.name):
            call(np.ones(100), out=out if comm.rank == 0 else None, algorithm=wrong)
        assert (out == -7).all()
        return comm.all_reduce(np.ones(3)).tolist()  # the communicator goes on

    assert run_processes(4, rank, timeout=60) == [[4.0] * 3] * 4


# The proof runs the vector form over all ranks: what runs has to be that, too.
@algorithm("all_gather", "rolled")
def rolled(rank, n):
    yield fold(at(rank, IN, rank), to=at(rank, OUT, rank))
    left = np.roll(rank, 1)
    for step in range(n - 1):
        yield fold(at(left, OUT, rank - step - 1), to=at(rank, OUT, rank - step - 1))


@algorithm("all_gather", "far ranks, numbers for masks", in_place=False)
def odd(rank, n):
    yield fold(at(rank, IN, rank), to=at(rank, OUT, rank))
    for step in range(1, n):
        peer = rank + step + 8 * n
        yield fold(at(peer, IN, peer), to=at(rank, OUT, peer), where=2)


@pytest.mark.parametrize("gather", [rolled, odd], ids=lambda a: a.name)
def test_what_was_proven_runs(run, gather):
    def rank(comm):
        for count in (1, 5000):
            for array in (np.empty(count), comm.empty(count)):
                array[:] = comm.rank + 1
                found = comm.all_gather(array, algorithm=gather)
                assert (found.reshape(-1, count) == [[1], [2], [3], [4]]).all()
        return True

    assert run(4, rank) == [True] * 4


def shares(k):
    """Make an all-gather and a reduce-scatter with k chunks for each rank."""

    @algorithm("all_gather", f"gather {k}", chunks=lambda n: k * n, in_place=False)
    def gather(rank, n):
        for peer in range(n):
            yield fold(at(peer, IN, k * peer), to=at(rank, OUT, k * peer), count=k)

    @algorithm("reduce_scatter", f"scatter {k}", chunks=lambda n: k * n, in_place=False)
    def scatter(rank, n):
        sources = [at(peer, IN, k * rank) for peer in range(n)]
        yield fold(sources, to=at(rank, OUT, k * rank), count=k)

    return gather, scatter


@pytest.mark.parametrize("k", [2, 3])
@pytest.mark.parametrize("count", [1, 2, 7, 3001])
def test_blocks_that_are_no_multiples_of_their_chunks(run, k, count):
    gather, scatter = shares(k)

    def guarded(size):
        array = np.full(size + 64, -7, np.float32)
        return array, array[32 : size + 32]

    def rank(comm):
        n = comm.world_size
        x = np.arange(count, dtype=np.float32) + 1000 * comm.rank
        for symmetric in (False, True):
            block = comm.empty(count, np.float32) if symmetric else np.empty(count, np.float32)
            block[:] = x
            around, out = guarded(n * count)
            comm.all_gather(block, out=out, algorithm=gather)
            want = np.concatenate([np.arange(count) + 1000 * r for r in range(n)])
            assert (out == want).all()
            around_sum, total = guarded(count)
            comm.reduce_scatter(out, out=total, algorithm=scatter)
            assert (total == n * (np.arange(count) + 1000 * comm.rank)).all()
            for edges in (around, around_sum):
                assert (edges[:32] == -7).all()
                assert (edges[-32:] == -7).all()
        return True

    assert run(3, rank) == [True] * 3


@algorithm("broadcast", "from rank 0", chunks=1, in_place=False)
def from_rank_0(rank, n):
    yield fold(at(0, IN), to=at(rank, OUT))


def test_an_algorithm_without_a_root_has_rank_0(run):
    def rank(comm):
        x = np.full(50, comm.rank + 1.0)
        found = comm.broadcast(x, root=0, algorithm=from_rank_0)
        with pytest.raises(ArgumentError, match="from rank 0 has no parameter root"):
            comm.broadcast(x, root=1, algorithm=from_rank_0)
        return found[0]

    assert run(2, rank) == [1, 1]


# Reads of IN behind the first write of OUT: in place that needs a copy of the input.
@algorithm("all_reduce", "late reads", chunks=1, in_place=False)
def late_reads(rank, n):
    yield fold(at(rank + 1, IN), to=at(rank, OUT))
    yield fold([at(0, IN), at(0, OUT)], to=at(0, OUT), where=rank == 0)
    yield fold([at(1, OUT), at(1, IN)], to=at(1, OUT), where=rank == 1)


def test_in_place_with_an_algorithm_that_cannot(run):
    def rank(comm):
        for count in (1, 5000):
            for x in (np.empty(count), comm.empty(count)):
                for _ in range(2):
                    x[:] = comm.rank + 1
                    comm.all_reduce(x, out=x, algorithm=late_reads)
                    assert (x == 3).all()
        return True

    assert run(2, rank) == [True] * 2


def twice(count):
    """Make all-reduces of one name that differ in what they do."""

    @algorithm("all_reduce", "same name", chunks=count)
    def reduce(rank, n):
        for chunk in range(count):
            pieces = [at(peer, IN, chunk) for peer in range(n)]
            yield fold(pieces, to=at(0, OUT, chunk), where=rank == 0)
        for chunk in range(count):
            yield fold(at(0, OUT, chunk), to=at(rank, OUT, chunk), where=rank > 0)

    return reduce


def test_algorithms_are_told_apart_by_what_they_do(run):
    one, two = twice(1), twice(2)

    def rank(comm):
        assert comm.all_reduce(np.ones(10), algorithm=twice(2))[0] == 2
        with pytest.raises(MismatchError, match=r"algorithm=custom#(.|\n)*algorithm=custom#"):
            comm.all_reduce(np.ones(10), algorithm=two if comm.rank else one)
        return True

    assert run(2, rank) == [True] * 2


def roomy(slots):
    """Make all-reduces that differ in the room they leave: in how the arrays are cut."""

    @algorithm("all_reduce", "roomy", chunks=1, slots=slots)
    def reduce(rank, n):
        yield fold([at(peer, IN) for peer in range(n)], to=at(rank, TMP))
        yield fold(at(rank, TMP), to=at(rank, OUT))

    return reduce


def test_algorithms_are_told_apart_by_their_slots(run):
    one, many = roomy(1), roomy(1000)

    def rank(comm):
        x = comm.empty(100000)
        x[:] = comm.rank + 1
        with pytest.raises(MismatchError, match=r"algorithm=custom#(.|\n)*algorithm=custom#"):
            comm.all_reduce(x, out=x, algorithm=many if comm.rank else one)
        return True

    assert run(2, rank) == [True] * 2


# Rank 2 reads from rank 1 what rank 0 has written there: it need not wait for rank 1 itself.
@algorithm("all_reduce", "detour", chunks=1)
def detour(rank, n):
    yield fold([at(peer, IN) for peer in range(n)], to=at(1, OUT), where=rank == 0)
    yield fold(at(1, OUT), to=at(rank, OUT), where=rank != 1)


# A parameter of this name belongs to pipelines in the registry only.
@algorithm("all_reduce", "own k", chunks=1, k=3)
def own_k(rank, n, *, k):
    assert k == 3
    yield fold([at(peer, IN) for peer in range(n)], to=at(rank, TMP))
    yield fold(at(rank, TMP), to=at(rank, OUT))


own_k = algorithm("all_reduce", "own k", chunks=1, slots=1, k=3)(own_k.rounds)


@pytest.mark.parametrize("correct", [detour, own_k], ids=lambda a: a.name)
def test_correct_algorithms_run(run, correct):
    def rank(comm):
        for x in (np.ones(4096), comm.empty(4096)):
            x[:] = comm.rank + 1
            assert (comm.all_reduce(x, algorithm=correct) == 6).all()
        return True

    assert run(3, rank) == [True] * 3


def test_an_algorithm_must_name_what_it_computes():
    for options in ({"collective": "all_reduced"}, {"collective": "all_reduce", "order": "tre"}):
        with pytest.raises(ScheduleError, match="is not known; known: "):
            algorithm(**options)
    with pytest.raises(ScheduleError, match="reduces nothing"):
        algorithm("broadcast", order="tree")


def test_many_algorithms_do_not_pile_up(monkeypatch):
    monkeypatch.setattr(pycoll.runtime.calls.plans, "_MAX_BINDINGS", 64)
    with pycoll.init() as comm:
        plans = comm._session._caller.plans
        for i in range(150):
            made = algorithm("all_reduce", f"number {i}", chunks=1)(
                lambda rank, n: iter([fold(at(rank, ACC), to=at(rank, OUT))])
            )
            comm.all_reduce(np.ones(1), algorithm=made)
        assert 0 < len(plans._plans) <= 64
