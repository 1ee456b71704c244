"""Threads of one rank that receive from anybody: each gets one message, and none gets two."""

import contextlib
import threading
import time

import numpy as np
import pytest

import chaos
import pycoll
from pycoll.config import Config
from pycoll.testing import run_processes

N, ROUNDS = 3, 1000


@contextlib.contextmanager
def on_one_host(comm):
    yield comm


def on_three_hosts(comm):
    return chaos.over_tcp(comm, list(range(N)), Config(5.0))


@pytest.fixture(params=[on_one_host, on_three_hosts])
def ranks(request):
    """Return a function that runs another one on three ranks."""

    def run(body):
        def part(comm):
            with request.param(comm) as connected:
                return body(connected)

        return run_processes(N, part, config=Config(5.0))

    return run


def in_the_background(comm, ask):
    work = comm.irecv_object(tag=1)
    while ask and not work.done():
        time.sleep(0)
    return work.wait()


def any_tag(comm):
    x = np.empty(2, int)
    comm.recv(x, tag=pycoll.ANY)
    return tuple(x.tolist())


WAYS = {
    "recv of any tag": (any_tag,) * 2,
    "recv_object": (lambda comm: comm.recv_object(tag=1),) * 2,
    "irecv_object": (lambda comm: in_the_background(comm, False),) * 2,
    "both, and done": (
        lambda comm: comm.recv_object(tag=1),
        lambda comm: in_the_background(comm, True),
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_each_thread_gets_one(ranks, way):
    def body(comm):
        if comm.rank > 0:
            for number in range(ROUNDS):
                if any_tag in WAYS[way]:
                    comm.send(np.array([comm.rank, number]), 0, tag=comm.rank)
                else:
                    comm.send_object((comm.rank, number), 0, 1)
                comm.recv_object(0, 2)
            return None
        found = [[], []]
        both = threading.Barrier(2, timeout=10)

        def receive(thread):
            for number in range(ROUNDS):
                both.wait()
                found[thread].append(WAYS[way][thread](comm))
                both.wait()
                if thread == 0:
                    for rank in (1, 2):
                        comm.send_object(number, rank, 2)

        threads = [threading.Thread(target=receive, args=(i,), daemon=True) for i in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return [sorted(pair) for pair in zip(*found, strict=True)]

    assert ranks(body)[0] == [[(1, i), (2, i)] for i in range(ROUNDS)]


def test_who_waits_hears_of_an_object_that_another_thread_has_received(ranks):
    def body(comm):
        longest_s = 0.0
        for _ in range(10):
            comm.barrier()
            if comm.rank == 1:
                time.sleep(0.02)
                comm.send_object("first", 0, 1)
            if comm.rank == 0:
                first, second = comm.irecv_object(1, 1), comm.irecv_object(1, 1)
                waits = threading.Thread(target=first.wait, daemon=True)
                begin_s = time.monotonic()
                waits.start()
                while waits.is_alive():
                    assert not second.done()  # what has come is for the first one
                longest_s = max(longest_s, time.monotonic() - begin_s)
                assert first.wait() == "first"
        return longest_s

    assert max(ranks(body)) < 3  # not the limit of the one that waits
