"""The health check: what it reports, and what it raises, on every rank."""

import os
import re
import signal
import time

import numpy as np
import pytest

from pycoll.errors import (
    ArgumentError,
    CollTimeout,
    MismatchError,
    PeerLost,
    PeerRejected,
    Revoked,
)
from pycoll.runtime.sessions import health
from pycoll.testing import run_processes, run_threads

RUNS = [run_processes, run_threads]


@pytest.mark.parametrize("n", [*range(1, 10), 16, 33])
def test_rounds_pair_everybody_once(n):
    rounds = {rank: list(health.partners(rank, n)) for rank in range(n)}
    for rank, peers in rounds.items():
        assert sorted(peers) == [r for r in range(n) if r != rank]
    waiting = {rank: iter(peers) for rank, peers in rounds.items()}
    at = {rank: next(peers, None) for rank, peers in waiting.items()}
    met = 0
    while True:  # whoever is with the one who is with him goes on; nobody is left standing
        pairs = [(a, b) for a, b in at.items() if b is not None and a < b and at[b] == a]
        if not pairs:
            break
        for pair in pairs:
            met += 1
            for rank in pair:
                at[rank] = next(waiting[rank], None)
    assert met == n * (n - 1) // 2


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("n", [1, 2, 5])
def test_all_is_well(run, n):
    def rank(comm):
        comm.all_reduce(np.ones(5))
        if comm.rank == 0 and n > 1:
            comm.send(np.arange(3), 1, tag=7)  # a message that waits is not disturbed
        found = [comm.check(), comm.check(timeout=5)]
        if comm.rank == 1:
            x = np.empty(3, int)
            assert comm.recv(x, 0, tag=7) == 0
            assert x.tolist() == [0, 1, 2]
        assert comm.all_reduce(np.ones(1))[0] == n
        return os.getpid(), found

    results = run(n, rank)
    pids = [pid for pid, _ in results]
    for me, (_, found) in enumerate(results):
        for report in found:
            assert report.rank == me
            assert [peer.rank for peer in report.peers] == list(range(n))
            assert [peer.pid for peer in report.peers] == pids
            assert report.hosts == (0,) * n
            assert report.transport == "shared memory"
            for peer in report.peers:
                assert peer.transport == ("" if peer.rank == me else "shared memory")
                assert (peer.latency_s > 0) == (peer.rank != me)
                assert peer.latency_s < report.seconds
            told = "1 rank on 1 host is well" if n == 1 else f"{n} ranks on 1 host are well"
            assert told in str(report)
    for k in range(2):
        assert len({found[k].iteration for _, found in results}) == 1
    assert results[0][1][0].iteration < results[0][1][1].iteration


@pytest.mark.parametrize("run", RUNS)
def test_a_rank_that_chooses_otherwise_is_named(run):
    class Other:
        digest = "abc123"

    def rank(comm):
        if comm.rank == 2:
            comm._session.tuning = Other()
        with pytest.raises(MismatchError) as caught:
            comm.check()
        comm._session.tuning = None
        comm.check()  # nothing was lost
        return str(caught.value)

    texts = set(run(4, rank))
    assert len(texts) == 1
    text = texts.pop()
    assert "table of the selector: rank 2 differs from the others" in text
    assert "rank 2: abc123" in text
    assert "rank 0, 1, 3: none" in text


def test_another_version_is_named():
    def rank(comm):
        if comm.rank == 1:
            health.VERSION = "0.0.9"
        with pytest.raises(MismatchError, match=r"version of pycoll(?s:.*)rank 1: 0\.0\.9"):
            comm.check()

    run_processes(2, rank)


def test_a_call_that_is_no_check_is_a_mismatch(run):
    def rank(comm):
        with pytest.raises(MismatchError, match=r"rank 1: broadcast\("):
            comm.check() if comm.rank != 1 else comm.broadcast(np.ones(3))

    run(3, rank)


def test_a_dead_rank():
    def rank(comm):
        comm.barrier()
        if comm.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(PeerLost, match=r"rank 1 \(process \d+\) died"):
            comm.check()

    run_processes(3, rank, may_die=[1])


def test_a_rank_that_stays_away():
    def rank(comm):
        if comm.rank == 2:
            time.sleep(1.0)
            with pytest.raises(CollTimeout):
                comm.check()
            return
        start = time.monotonic()
        with pytest.raises(CollTimeout, match="rank 2: has not made this call"):
            comm.check(timeout=0.2)
        assert time.monotonic() - start < 0.9

    run_processes(3, rank)


def test_a_rank_that_answers_no_message():
    def rank(comm):
        if comm.rank == 0:
            health.PINGS = 0  # it answers the roll call only
            comm.check()
            time.sleep(0.5)
            return
        with pytest.raises(CollTimeout, match=r"messages between rank 1 and rank 0 \(shared") as e:
            comm.check(timeout=0.3)
        assert re.search("nothing from rank 0 within 0.[0-3]", str(e.value))

    run_processes(2, rank)


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_between_two_messages(error):
    def interrupt(*_):
        raise error

    def rank(comm):
        comm.check()
        if comm.rank == 1:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(health, "_send", interrupt)
                with pytest.raises(error):
                    comm.check()
        with pytest.raises(Revoked, match=rf"rank 1 was interrupted \({error.__name__}\)"):
            comm.check()
        return True

    assert run_processes(3, rank) == [True] * 3


@pytest.mark.parametrize("timeout", [0, -1, "soon"])
def test_a_wrong_deadline_is_refused(run, timeout):
    def rank(comm):
        if comm.rank == 0:
            with pytest.raises(ArgumentError, match="timeout="):
                comm.check(timeout=timeout)
        else:
            with pytest.raises(PeerRejected, match="rank 0 refused"):
                comm.check()
        comm.check()

    run(2, rank)
