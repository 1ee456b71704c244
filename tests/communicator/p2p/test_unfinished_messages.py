"""Messages in the background that a communicator is closed over, well or not."""

import contextlib
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

import chaos
from pycoll.config import Config
from pycoll.errors import CollTimeout, CommClosed, ConcurrentUseError, PeerLeft
from pycoll.runtime.calls.messages import MessageWork
from pycoll.testing import run_processes

SIZES = [100, 20_000, 1 << 20]


@pytest.fixture(params=["shared memory", "tcp"])
def connected(request):
    """Return a function that runs another one on two ranks."""

    def run(fn, timeout_s=20.0):
        def part(comm):
            if request.param == "shared memory":
                return fn(comm)
            return fn(chaos.over_tcp(comm, [0, 1], Config(timeout_s)))

        return run_processes(2, part, config=Config(timeout_s), timeout=60)

    return run


@pytest.mark.parametrize("count", SIZES)
def test_what_was_sent_before_the_end_is_received(connected, count):
    def rank(comm):
        if comm.rank == 0:
            for tag in range(8):
                comm.isend(np.full(count, tag + 1.0), 1, tag)
        else:
            time.sleep(0.2)
            for tag in reversed(range(8)):
                x = np.zeros(count)
                comm.recv(x, 0, tag)
                assert (x == tag + 1).all()
        comm.close()
        return True

    assert connected(rank) == [True] * 2


def test_messages_of_other_sizes_are_received_in_the_order_of_the_calls(connected):
    """A receive does not take, or refuse, the message that an earlier one waits for."""
    sizes = [20_000, 20_001, 3, 19_999, 0, 20_000]

    def rank(comm):
        for _ in range(20):
            taken = [np.zeros(size) for size in sizes]
            receives = [comm.irecv(x, 1 - comm.rank) for x in taken]
            sends = [
                comm.isend(np.full(size, k + 1.0), 1 - comm.rank) for k, size in enumerate(sizes)
            ]
            for work in (*receives, *sends):
                work.wait()
            assert all((x == k + 1).all() for k, x in enumerate(taken))
        comm.close()
        return True

    assert connected(rank) == [True] * 2


def test_a_look_at_what_comes_passes_over_what_is_awaited(connected):
    def rank(comm):
        if comm.rank == 0:
            sends = [comm.isend(np.full(size, 1.0), 1) for size in (20_000, 30_000, 40_000)]
            for work in sends:
                work.wait()
        else:
            receives = [comm.irecv(np.zeros(size), 0) for size in (20_000, 30_000)]
            assert comm.probe(0).nbytes == 8 * 40_000
            comm.recv(np.zeros(40_000), 0)
            for work in receives:
                work.wait()
        comm.close()
        return True

    assert connected(rank) == [True] * 2


def test_a_message_that_nobody_received_is_an_error_of_its_sender():
    def rank(comm):
        if comm.rank == 1:
            comm.close()
            return True
        comm.isend(np.ones(1 << 20), 1, tag=5)
        with pytest.raises(PeerLeft, match=r"message was not received: .*to rank 1 \(tag 5"):
            comm.close()
        comm.close()
        return True

    assert run_processes(2, rank) == [True] * 2


def test_two_that_send_and_do_not_receive_do_not_wait_for_each_other(connected):
    """Whoever waits takes in what comes, and then leaves the other alone."""

    def rank(comm):
        comm.isend(np.ones(1 << 20), 1 - comm.rank)
        comm.barrier()
        start = time.monotonic()
        with contextlib.suppress(PeerLeft):
            comm.close()
        return time.monotonic() - start < 15

    assert connected(rank) == [True] * 2


def test_a_close_waits_as_long_as_any_call():
    def rank(comm):
        if comm.rank == 1:
            time.sleep(1.0)
            return True
        comm.isend(np.ones(1 << 20), 1)
        with pytest.raises(CollTimeout, match=r"message was not received: .*to rank 1"):
            comm.close()
        return True

    assert run_processes(2, rank, config=Config(0.3)) == [True] * 2


def test_a_close_that_is_refused_changes_nothing(run):
    def rank(comm):
        if comm.rank == 1:
            time.sleep(0.3)
            comm.all_reduce(np.ones(2))
            comm.send(np.full(4, 7.0), 0, tag=3)
            comm.barrier()
            return True
        came = np.zeros(4)
        work, sums = comm.irecv(came, 1, tag=3), []
        thread = threading.Thread(target=lambda: sums.append(comm.all_reduce(np.ones(2))))
        thread.start()
        time.sleep(0.1)
        with pytest.raises(ConcurrentUseError):
            comm.close()
        thread.join()
        assert work.wait(10) == 1
        comm.barrier()
        return bool((came == 7).all() and (sums[0] == 2).all())

    assert run(2, rank) == [True] * 2


def test_a_close_beside_a_thread_that_waits_for_a_send():
    def rank(comm):
        if comm.rank == 1:
            time.sleep(0.5)
            x = np.zeros(1 << 20)
            comm.recv(x, 0)
            return bool((x == 1).all())
        work = comm.isend(np.ones(1 << 20), 1)
        thread = threading.Thread(target=work.wait)
        thread.start()
        time.sleep(0.1)
        with pytest.raises(ConcurrentUseError):
            comm.close()
        thread.join()
        return work.done()

    assert run_processes(2, rank) == [True] * 2


PROGRAM = """
import sys, time, numpy as np, pycoll
count, receives = int(sys.argv[1]), sys.argv[2] == "receives"
comm = pycoll.init(timeout=20)
if comm.rank == 0:
    for tag in range(8):
        comm.isend(np.full(count, tag + 1.0), 1, tag)
elif receives:
    time.sleep(0.3)
    for tag in reversed(range(8)):
        x = np.zeros(count)
        comm.recv(x, 0, tag)
        assert (x == tag + 1).all(), x
    print("right")
"""


def job(tmp_path, *words):
    """Run the program on two ranks; return what it has written."""
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    command = [sys.executable, "-m", "pycoll", "run", "-n", "2", script, *words]
    found = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, timeout=60, check=True
    )
    return found.stdout, found.stderr


@pytest.mark.parametrize("count", SIZES)
def test_a_program_that_ends_without_waiting(tmp_path, count):
    assert job(tmp_path, count, "receives") == ("right\n", "")


def test_a_program_that_ends_before_its_message_is_received(tmp_path):
    out, said = job(tmp_path, 1 << 20, "ends")
    assert out == ""
    assert "pycoll: rank 0 ended without wait(): a message was not received" in said


def test_a_message_is_not_forgotten_beside_a_thread_that_waits(connected):
    def rank(comm):
        x = np.full(4, float(comm.rank))
        if comm.rank == 1:
            time.sleep(0.5)
            comm.send(x, 0)
            return True
        work = comm.irecv(x, 1)
        thread = threading.Thread(target=work.wait)
        thread.start()
        time.sleep(0.2)
        with pytest.raises(ConcurrentUseError):
            work.forget()
        thread.join()
        return bool((x == 1).all()) and work.wait() == 1

    assert connected(rank) == [True] * 2


def test_a_message_is_not_given_up_beside_a_thread_that_waits(run):
    def rank(comm):
        x = np.full(1 << 20, float(comm.rank))
        if comm.rank == 1:
            time.sleep(0.5)
            comm.recv(x, 0)
            return bool((x == 0).all())
        work = comm.isend(x, 1)
        thread = threading.Thread(target=work.wait)
        thread.start()
        time.sleep(0.2)
        with pytest.raises(ConcurrentUseError):
            work.give_up()
        thread.join()
        return work.done()

    assert run(2, rank) == [True] * 2


def test_a_thread_that_asks_before_another_one_has_noted_the_end(connected):
    def rank(comm):
        x = np.full(4, float(comm.rank))
        if comm.rank == 1:
            time.sleep(0.3)
            comm.send(x, 0)
            return True
        sys.setswitchinterval(10)
        work, seen = comm.irecv(x, 1), []
        thread = threading.Thread(target=lambda: seen.append(work.wait()))
        thread.start()
        time.sleep(0.1)
        until = time.monotonic() + 0.6
        while time.monotonic() < until:  # meanwhile the thread needs the lock of Python
            pass
        with contextlib.suppress(ConcurrentUseError):
            work.wait()
        thread.join()
        return seen == [1] and work.wait() == 1

    assert connected(rank) == [True] * 2


def test_messages_of_a_closed_communicator(connected):
    def rank(comm):
        session = comm._session
        work = comm.irecv(np.zeros(4), 1 - comm.rank)
        comm.close()
        late = MessageWork(session, 1, None, False)  # closed by another thread meanwhile
        for message in (work, late):
            with pytest.raises(CommClosed):
                message.wait(1)
        return True

    assert connected(rank) == [True] * 2
