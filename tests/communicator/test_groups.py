"""Communicators made of communicators."""

import os
import resource
import signal
import threading
import time

import numpy as np
import pytest

from pycoll.config import Config
from pycoll.errors import (
    ArgumentError,
    CollTimeout,
    CommClosed,
    PeerLeft,
    PeerLost,
    PeerRejected,
    Revoked,
    TransportError,
)
from pycoll.runtime.startup import make_groups
from pycoll.runtime.startup.bootstrap import adopt
from pycoll.testing import run_processes, run_threads


def who(comm, group):
    """Return this rank's place in a group, and the parent's ranks in the group's order."""
    return group.rank, group.all_gather(np.array([comm.rank])).tolist()


def test_split_by_colour(run):
    def rank(comm):
        with comm.split(color=comm.rank % 2) as group:
            return who(comm, group)

    assert run(5, rank) == [
        (0, [0, 2, 4]),
        (0, [1, 3]),
        (1, [0, 2, 4]),
        (1, [1, 3]),
        (2, [0, 2, 4]),
    ]


def test_ranks_that_share_memory_are_on_one_host(run):
    def rank(comm):
        with comm.split(comm.rank % 2) as group:
            return comm.hosts, comm.local_rank, group.hosts, group.local_rank

    one, two = (0,) * 3, (0,) * 2
    assert run(3, rank) == [(one, 0, two, 0), (one, 1, (0,), 0), (one, 2, two, 1)]


def test_split_orders_by_key_then_rank(run):
    def rank(comm):
        backwards = comm.split(color=7, key=-comm.rank)
        ties = comm.split(color=-1, key=comm.rank // 2 * -1)
        return who(comm, backwards), who(comm, ties)

    assert run(4, rank) == [
        ((3, [3, 2, 1, 0]), (2, [2, 3, 0, 1])),
        ((2, [3, 2, 1, 0]), (3, [2, 3, 0, 1])),
        ((1, [3, 2, 1, 0]), (0, [2, 3, 0, 1])),
        ((0, [3, 2, 1, 0]), (1, [2, 3, 0, 1])),
    ]


def test_ranks_without_a_colour_get_none(run):
    def rank(comm):
        group = comm.split(color=None if comm.rank == 1 else 0)
        total = int(comm.all_reduce(np.ones(1, np.int64))[0])
        return total, group and who(comm, group)

    assert run(3, rank) == [(3, (0, [0, 2])), (3, None), (3, (1, [0, 2]))]


def test_what_mpi_calls_undefined_is_no_colour(run):
    def rank(comm):
        wanted = ArgumentError if comm.rank else PeerRejected
        with pytest.raises(wanted, match=r"MPI\.UNDEFINED; here None leaves a rank out"):
            comm.split(-32766 if comm.rank else 0)
        return int(comm.all_reduce(1))

    assert run(2, rank) == [2, 2]


def test_nobody_has_a_colour(run):
    def rank(comm):
        return comm.split(color=None) is None

    assert run(2, rank) == [True, True]


def test_groups_of_one(run):
    def rank(comm):
        with comm.split(color=comm.rank) as alone:
            return alone.world_size, alone.all_reduce(np.full(3, comm.rank)).tolist()

    assert run(3, rank) == [(1, [r] * 3) for r in range(3)]


def test_groups_of_groups(run):
    def rank(comm):
        row = comm.split(color=comm.rank // 2)
        column = comm.split(color=comm.rank % 2)
        twin = row.dup().split(color=0, key=1 - row.rank)
        return [who(comm, group) for group in (row, column, twin)]

    assert run(4, rank) == [
        [(0, [0, 1]), (0, [0, 2]), (1, [1, 0])],
        [(1, [0, 1]), (0, [1, 3]), (0, [1, 0])],
        [(0, [2, 3]), (1, [0, 2]), (1, [3, 2])],
        [(1, [2, 3]), (1, [1, 3]), (0, [3, 2])],
    ]


def test_symmetric_memory_in_a_group(run):
    def rank(comm):
        group = comm.split(color=comm.rank % 2, key=-comm.rank)
        x = group.empty(10_000, np.float64)
        y = comm.empty(10_000, np.float64)
        x[:], y[:] = comm.rank, comm.rank * 10
        group.all_reduce(x, out=x, algorithm="ring", order="any")
        group.all_reduce(y, out=y)
        return x[0], y[-1]

    assert run(4, rank) == [(2.0, 20.0), (4.0, 40.0), (2.0, 20.0), (4.0, 40.0)]


def test_dup_has_traffic_of_its_own(run):
    def rank(comm):
        twin = comm.dup()
        x, got = np.full(2, comm.rank), np.empty(2, int)
        other = 1 - comm.rank
        works = [c.all_reduce(x, async_op=True) for c in (comm, twin)]
        comm.send(x, other, tag=3)
        twin.send(x + 10, other, tag=3)
        twin.recv(got, other, tag=3)
        return got.tolist(), [w.wait().tolist() for w in reversed(works)]

    assert run(2, rank) == [([11, 11], [[1, 1]] * 2), ([10, 10], [[1, 1]] * 2)]


def test_two_communicators_in_two_threads():
    def rank(comm):
        twin, sums = comm.dup(), {}

        def loop(name, group):
            x = np.ones(100)
            for _ in range(200):
                x = group.all_reduce(x, "avg")
            sums[name] = x.sum()

        threads = [
            threading.Thread(target=loop, args=pair) for pair in {"a": comm, "b": twin}.items()
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return sums

    assert run_processes(2, rank) == [{"a": 100.0, "b": 100.0}] * 2


def test_closing_one_leaves_the_other(run):
    def rank(comm):
        first, second = comm.dup(), comm.dup()
        first.close()
        with pytest.raises(CommClosed):
            first.barrier()
        third = second.split(color=0)
        second.close()
        return int(third.all_reduce(comm.all_reduce(np.ones(1, int)))[0])

    assert run(2, rank) == [4, 4]


def test_the_child_lives_on_without_its_parent(run):
    def rank(comm):
        parent = comm.dup()
        child = parent.dup()
        x = child.empty(5000)
        x[:] = 1
        parent.close()
        del parent
        return float(child.all_reduce(x, out=x)[0])

    assert run(3, rank) == [3.0] * 3


def test_an_aborted_child_leaves_its_parent_usable(run):
    def rank(comm):
        child = comm.dup()
        if comm.rank == 0:
            child.abort("enough")
        with pytest.raises(Revoked, match="enough"):
            child.barrier()
        return int(comm.all_reduce(np.ones(1, int))[0])

    assert run(2, rank) == [2, 2]


def test_the_rank_that_made_the_memory_is_killed_before_the_others_open_it():
    def die(*_):
        os.kill(os.getpid(), signal.SIGKILL)

    def open_late(*place):
        time.sleep(0.3)
        return adopt(*place)

    def rank(comm):
        comm.barrier()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(make_groups, "adopt", open_late if comm.rank else die)
            with pytest.raises(PeerLost, match=r"rank 0 \(process \d+\) died"):
                comm.split(0)
        return True

    assert run_processes(3, rank, may_die=[0]) == [-signal.SIGKILL, True, True]


@pytest.mark.parametrize("how", ["died", "left"])
def test_the_rank_in_the_job_is_named_where_it_is_another(how):
    def rank(comm):
        odd = comm.split(comm.rank % 2).split(comm.rank // 4, key=-comm.rank)
        comm.barrier()
        if comm.rank == 5 and how == "died":
            os.kill(os.getpid(), signal.SIGKILL)
        if comm.rank == 5:
            odd._session.leave("no more")
        if comm.rank == 7:
            error = PeerLost if how == "died" else PeerLeft
            with pytest.raises(error, match=rf"^rank 1 \(rank 5 of the job, process \d+\) {how}"):
                odd.barrier()
            return True

    assert run_processes(8, rank, may_die=[5])[7]


def test_two_communicators_in_opposite_order_time_out():
    def rank(comm):
        twin = comm.dup()
        first = comm if comm.rank == 0 else twin
        with pytest.raises(CollTimeout) as caught:
            first.all_reduce(np.ones(2), timeout=0.3)
        time.sleep(0.3)  # the other one still waits for the communicator that is not in use here
        return str(caught.value)

    texts = run_processes(2, rank, config=Config(timeout_s=5, heap_bytes=1 << 20))
    for me, text in enumerate(texts):
        assert f"rank {me}: is in all_reduce" in text
        assert f"waits for rank {1 - me} to make this call" in text
        assert f"rank {1 - me}: has not made this call" in text


def test_many_groups_of_many_ranks():
    sizes = (1, 2, 3, 5, 16)

    def rank(comm):
        totals = []
        for size in sizes:
            with comm.split(color=comm.rank // size) as group:
                totals.append(int(group.all_reduce(np.array([comm.rank]))[0]))
        return totals

    blocks = [
        [range(r // k * k, min(16, r // k * k + k)) for k in (1, 2, 3, 5, 16)] for r in range(16)
    ]
    assert run_threads(16, rank) == [[sum(block) for block in row] for row in blocks]


@pytest.mark.parametrize("poor", [0, 1])
def test_no_descriptors_left(poor):
    def rank(comm):
        comm.dup().close()  # so that nothing is left to import
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        if comm.rank == poor:
            lowest_free = os.dup(0)
            os.close(lowest_free)
            resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, limits[1]))
        error = TransportError if comm.rank == poor else PeerRejected
        with pytest.raises(error, match=r"(?i)too many open files"):
            comm.dup()
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        return int(comm.dup().all_reduce(comm.all_reduce(np.ones(1, int)))[0])

    assert run_processes(3, rank) == [9] * 3


@pytest.mark.parametrize("color", ["red", 1.5, 2**63, "", 0.0])
def test_a_colour_that_is_no_integer(run, color):
    def rank(comm):
        with pytest.raises(ValueError, match=r"color=.*integers of 64 bits, and None for a rank"):
            comm.split(color=color)
        return int(comm.all_reduce(np.ones(1, int))[0])

    assert run(2, rank) == [2, 2]
