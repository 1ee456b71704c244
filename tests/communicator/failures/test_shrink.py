"""The ranks that are left go on: `Communicator.shrink` after deaths, exits and nothing at all."""

import numpy as np
import pytest

from faults import KILLED, die, who
from pycoll.errors import ArgumentError, CollError, CommClosed, PeerLeft, Revoked
from pycoll.testing import run_processes, run_threads


def work(comm):
    """Make calls until one fails."""
    while True:
        comm.all_reduce(np.ones(1000))


def after(comm, *victims):
    """Kill some ranks, and return what the others make of it."""
    comm.barrier()
    if comm.rank in victims:
        die()
    with pytest.raises(CollError):
        work(comm)
    return comm.shrink()


@pytest.mark.parametrize(("n", "victims"), [(2, [0]), (3, [1]), (4, [0, 3]), (5, [0, 1, 2, 3])])
def test_killed_ranks_are_left_out(n, victims):
    def rank(comm):
        left = after(comm, *victims)
        with pytest.raises(CollError):
            comm.barrier()
        return who(left, comm.rank)

    left = [r for r in range(n) if r not in victims]
    results = run_processes(n, rank, may_die=victims)
    assert results == [KILLED if r in victims else left for r in range(n)]


def test_one_after_the_other():
    """Down to the last one, each time out of the communicator of those who were left."""

    def rank(comm):
        old, steps = comm.rank, []
        while True:
            steps.append(who(comm, old))
            try:
                comm.barrier()  # whoever dies behind it leaves nobody in the calls before
                if comm.rank == comm.world_size // 2 and comm.world_size > 1:
                    die()
                comm.barrier()
                return steps
            except CollError:
                comm = comm.shrink()

    results = run_processes(5, rank, may_die=range(5))
    assert results[0] == [[0, 1, 2, 3, 4], [0, 1, 3, 4], [0, 1, 4], [0, 4], [0]]
    assert results[1:] == [KILLED] * 4


def test_those_who_left_or_closed(run):
    def rank(comm):
        comm.barrier()
        if comm.rank == 1:
            comm.close()
            return None
        if comm.rank == 2:
            with pytest.raises(ValueError, match="enough"), comm:
                raise ValueError("enough")
            return None
        with pytest.raises(PeerLeft):
            comm.barrier()
        return who(comm.shrink(), comm.rank)

    assert run(5, rank) == [[0, 3, 4], None, None, [0, 3, 4], [0, 3, 4]]


def test_nobody_is_gone(run):
    """All are left then; who is in another call hears of it, and can come as well."""

    def rank(comm):
        comm.barrier()
        if comm.rank == 1:
            with pytest.raises(Revoked, match=r"rank [02] called shrink"):
                work(comm)
        return who(comm.shrink(), comm.rank)

    assert run(3, rank) == [[0, 1, 2]] * 3


def test_alone(run):
    assert run(1, lambda comm: who(comm.shrink(), 0)) == [[0]]


def test_symmetric_arrays_stay():
    def rank(comm):
        x = comm.empty(300_000, np.float64)
        x[:] = comm.rank
        left = after(comm, 0)
        assert (x == comm.rank).all()
        left.all_reduce(x, out=x)
        y = left.zeros(10)
        return float(x[0]), float(left.all_reduce(y + 1)[3]), bool((x == x[0]).all())

    assert run_processes(3, rank, may_die=[0]) == [KILLED, (3.0, 2.0, True), (3.0, 2.0, True)]


def test_background_calls_end_first():
    def rank(comm):
        x = np.ones(1 << 20)
        comm.barrier()
        if comm.rank == 1:
            die()
        works = [comm.all_reduce(x, async_op=True) for _ in range(4)]
        left = comm.shrink()
        for work in works:
            with pytest.raises(CollError):
                work.wait()
        return who(left, comm.rank)

    assert run_processes(3, rank, may_die=[1]) == [[0, 2], KILLED, [0, 2]]


def test_groups():
    """A group without the dead rank works on; one that had it is shrunk like any other."""

    def rank(comm):
        row, column = comm.split(comm.rank // 2), comm.split(comm.rank % 2)
        whole = after(comm, 3)
        rows = who(row if comm.rank < 2 else row.shrink(), comm.rank)
        columns = who(column if comm.rank % 2 == 0 else column.shrink(), comm.rank)
        again = who(whole.split(0, key=-whole.rank), comm.rank)
        return who(whole, comm.rank), rows, columns, again

    results = run_processes(4, rank, may_die=[3])
    assert results == [
        ([0, 1, 2], [0, 1], [0, 2], [2, 1, 0]),
        ([0, 1, 2], [0, 1], [1], [2, 1, 0]),
        ([0, 1, 2], [2], [0, 2], [2, 1, 0]),
        KILLED,
    ]


def test_errors_name_the_rank_in_the_job():
    def rank(comm):
        left = after(comm, 0)
        left.barrier()
        if comm.rank == 2:
            die()
        with pytest.raises(CollError, match=r"rank 1 \(rank 2 of the job, process") as caught:
            left.barrier()
        return "call its shrink() to go on with the ranks that are left" in str(caught.value)

    assert run_processes(4, rank, may_die=[0, 2]) == [KILLED, True, KILLED, True]


@pytest.mark.parametrize("timeout", [-1, "soon"])
def test_bad_arguments(run, timeout):
    def rank(comm):
        with pytest.raises(ArgumentError, match="timeout"):
            comm.shrink(timeout=timeout)
        comm.barrier()

    run(2, rank)


def test_after_close(run):
    def rank(comm):
        comm.close()
        with pytest.raises(CommClosed):
            comm.shrink()

    run(2, rank)


def test_threads_that_leave():
    def rank(comm):
        comm.barrier()
        if comm.rank in (0, 2):
            with pytest.raises(KeyError), comm:
                raise KeyError(comm.rank)
            return None
        with pytest.raises(PeerLeft):
            comm.all_reduce(np.ones(5))
        return who(comm.shrink(), comm.rank)

    assert run_threads(4, rank) == [None, [1, 3], None, [1, 3]]
