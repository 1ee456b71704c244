"""Which ranks share a host, and what that means for calls."""

import os
import threading

import pytest

from pycoll import algorithms
from pycoll.errors import ArgumentError, TransportError
from pycoll.runtime.calls.plans import CallSpec
from pycoll.runtime.selection.topology import Topology
from pycoll.runtime.startup import mpi
from pycoll.runtime.startup.hosts import Card, candidates, fewest_cores, most_crowded, share
from pycoll.types import DType, Kind, Order, ReduceOp


def cards(*hosts):
    return [Card(host, "name", os.getpid()) for host in hosts]


def test_cards_survive_the_wire():
    card = Card.own()
    assert Card.unpack(card.pack().ljust(512, b"\0")) == card
    assert len(card.pack()) <= 512


def test_owners_have_a_core_each():
    bound = [Card("a", "name", rank, 1 << rank) for rank in range(4)]
    free = [Card("b", "name", rank, 0b11) for rank in range(4)]
    assert fewest_cores(bound, (0, 0, 0, 0)) == 4
    assert fewest_cores(bound + free, (0, 0, 0, 0, 1, 1, 1, 1)) == 2
    hosts = (0, 0, 0, 1, 1, 1)
    for cores, columns in ((1, 1), (2, 2), (8, 3)):
        topology = Topology(hosts, 0, cores)
        assert topology.columns("all_reduce", 64 << 10) == 1
        assert topology.columns("all_reduce", 65 << 10) == columns


def test_ranks_of_one_machine_share_its_cores_whatever_hosts_they_are_on():
    bound = [Card("boot1 user ipc:1", "name", rank, 1 << rank) for rank in range(4)]
    inside = [Card("boot1 user ipc:2", "name", rank, 0b11) for rank in range(2)]
    other = [Card("boot2 user ipc:1", "name", rank, 1 << rank) for rank in range(3)]
    assert most_crowded(bound) == (4, 4)
    assert not most_crowded(bound).crowded
    assert most_crowded(bound + inside) == most_crowded(other + inside + bound) == (6, 4)
    assert most_crowded(bound + inside).crowded
    assert most_crowded(other) == most_crowded(other[:1] + other[1:]) == (3, 3)
    assert most_crowded(other + bound) == (4, 4)
    assert Card.own().machine == Card.own().host.split()[0]


def test_candidates():
    assert candidates(cards("a", "b", "a")) == (0, 1, 0)
    assert candidates(cards("a", "a", "a"), [7, 7, 1]) == (0, 0, 1)
    assert candidates(cards("a", "b", "b"), [0, 0, 1]) == (0, 1, 2)
    with pytest.raises(ArgumentError, match="are not the hosts of 2 ranks"):
        candidates(cards("a", "a"), [0, 0, 1])


def exchanging(n):
    """Return an exchange between n threads."""
    rows, barrier = [b""] * n, threading.Barrier(n)

    def bind(rank):
        def exchange(card):
            rows[rank] = card
            barrier.wait(10)
            found = list(rows)
            barrier.wait(10)
            return found

        return exchange

    return bind


def shared(hosts, pids):
    """Run `share` on all ranks, as threads; return what each got, with its descriptors closed."""
    n = len(hosts)
    bind, results = exchanging(n), [None] * n

    def run(rank):
        results[rank] = share(bind(rank), rank, hosts, pids)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(n)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    for result in results:
        result.close()
    return results


def test_ranks_share_what_they_can_open():
    results = shared((0, 0, 1), [os.getpid()] * 3)
    assert {r.hosts for r in results} == {(0, 0, 1)}
    assert [r.control_fd >= 0 for r in results] == [True, True, False]
    assert results[0].mates(0) == [0, 1]


def test_ranks_that_cannot_open_it_count_as_hosts():
    gone = 2**22 + 1  # above the greatest process number
    results = shared((0, 0, 1, 1), [gone, os.getpid(), os.getpid(), os.getpid()])
    assert {r.hosts for r in results} == {(0, 1, 2, 2)}
    assert [r.control_fd >= 0 for r in results] == [False, False, True, True]


def spec(dtype, op=ReduceOp.SUM, order=Order.TREE, kind=Kind.ALL_REDUCE):
    algorithm = algorithms.find("all_reduce", "two_shot_pull")
    return CallSpec(kind, "all_reduce", algorithm, (), False, dtype, 4, 100, op, order)


@pytest.mark.parametrize(
    ("hosts", "call", "gives"),
    [
        ((0, 0, 1, 1), spec(DType.FLOAT32), True),
        ((0, 0, 0, 1, 1, 1), spec(DType.FLOAT32), True),  # by subtrees
        ((0, 0, 0, 1, 1, 1), spec(DType.BFLOAT16), False),
        ((0, 0, 0, 1, 1, 1), spec(DType.FLOAT32, order=Order.RANK), False),
        ((0, 0, 1), spec(DType.FLOAT32), True),
        ((0, 1, 1), spec(DType.FLOAT32), True),
        ((0, 0, 1), spec(DType.FLOAT32, order=Order.ANY), True),
        ((0, 0, 1), spec(DType.INT32, order=Order.RANK), True),
        ((0, 0, 1), spec(DType.FLOAT64, ReduceOp.MAX), True),
        ((0, 1, 0, 1), spec(DType.FLOAT64, ReduceOp.MAX), False),
        ((0, 1, 0, 1), spec(DType.FLOAT64, ReduceOp.MAX, Order.ANY), True),
        ((0, 1, 0, 1), spec(DType.INT32, ReduceOp.MAX), True),
        ((0, 0, 1, 1), spec(DType.FLOAT32, order=Order.RANK), False),
        ((0, 0, 1, 1), spec(DType.BFLOAT16), False),
        ((0, 1, 0, 1), spec(DType.INT32), True),
        ((0, 1, 0, 1), spec(DType.FLOAT32), True),
        ((0, 1, 0, 1, 0, 1), spec(DType.FLOAT32), False),  # each rank is a subtree
        ((0, 0, 0), spec(DType.INT32), False),
        ((0, 1, 2), spec(DType.INT32), False),
        ((0, 0, 1, 1), spec(DType.FLOAT32, kind=Kind.BARRIER), True),
        ((0, 0, 1, 1), spec(DType.FLOAT32, kind=Kind.ALL_GATHER_V), False),
    ],
)
def test_what_goes_in_two_levels(hosts, call, gives):
    assert Topology(hosts, 0).gives(call) is gives


def test_columns():
    topology = Topology((0, 0, 0, 1, 1), 0)
    assert topology.columns("all_reduce", 8) == 1
    assert topology.columns("all_reduce", 1 << 20) == 2
    assert topology.columns("gather", 1 << 20) == 1


@pytest.mark.parametrize(
    ("environ", "size"),
    [
        ({}, 0),
        ({"PMI_SIZE": "4", "PMI_RANK": "1"}, 4),
        ({"OMPI_COMM_WORLD_SIZE": "3"}, 3),
        ({"SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2"}, 2),
        ({"SLURM_NTASKS": "4", "SLURM_PROCID": "0"}, 0),  # a batch script runs once
        ({"SLURM_NTASKS": "2"}, 0),
    ],
)
def test_launchers(environ, size):
    assert mpi.launched_size(environ) == size


def test_a_launcher_without_mpi4py(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "mpi4py", None)
    monkeypatch.delitem(__import__("sys").modules, "mpi4py.MPI", raising=False)
    with pytest.raises(TransportError, match="pip install mpi4py"):
        mpi.world({"PMI_SIZE": "2"})
