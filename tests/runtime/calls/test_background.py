"""What calls in the background need stays until they have ended, whatever happens to the caller."""

import gc
import mmap
import subprocess
import sys
import threading
import time
import weakref

import numpy as np
import pytest

from faults import interrupted
from pycoll import _C
from pycoll.errors import CommClosed, MismatchError, PeerRejected, Revoked
from pycoll.testing import run_processes

NBYTES = 1 << 20
BUFFERS = {
    "bytearray": (lambda: bytearray(NBYTES), lambda buffer: buffer.clear()),
    "mmap": (lambda: mmap.mmap(-1, NBYTES), lambda buffer: buffer.close()),
}


@pytest.mark.parametrize("kind", BUFFERS)
@pytest.mark.parametrize("ended", ["wait", "done"])
def test_the_buffer_of_a_result_is_held_until_the_call_has_ended(kind, ended):
    make, give_away = BUFFERS[kind]

    def rank(comm):
        x = np.full(NBYTES, comm.rank + 1, np.uint8)
        comm.barrier()
        if comm.rank == 1:
            time.sleep(0.3)
            return bool((comm.all_reduce(x) == 3).all())
        buffer = make()
        work = comm.all_reduce(x, out=buffer, async_op=True)
        with pytest.raises(BufferError):
            give_away(buffer)
        while ended == "done" and not work.done():
            time.sleep(0.01)
        result = buffer if ended == "done" else work.wait()
        right = result is buffer and buffer[:] == b"\3" * NBYTES
        give_away(buffer)
        return right and work.done()

    assert run_processes(2, rank) == [True, True]


@pytest.mark.parametrize("kind", BUFFERS)
def test_the_buffer_of_a_result_is_held_by_a_call_that_blocks(kind):
    make, give_away = BUFFERS[kind]

    def rank(comm):
        x = np.full(NBYTES, comm.rank + 1, np.uint8)
        comm.barrier()
        if comm.rank == 1:
            time.sleep(0.5)
            return bool((comm.all_reduce(x) == 3).all())
        buffer = make()
        thread = threading.Thread(target=comm.all_reduce, args=(x,), kwargs={"out": buffer})
        thread.start()
        time.sleep(0.2)
        with pytest.raises(BufferError):
            give_away(buffer)
        thread.join()
        return buffer[:] == b"\3" * NBYTES

    assert run_processes(2, rank) == [True, True]


def test_an_interrupt_once_the_call_is_queued():
    """It runs to its end, on arrays that nobody else refers to."""

    def rank(comm):
        def call():
            return comm.all_reduce(np.full(100_000, comm.rank + 1.0), async_op=True)

        for _ in range(2):  # then it is remembered
            call().wait()
        comm.barrier()
        if comm.rank == 0:
            with pytest.raises(KeyboardInterrupt), interrupted("call", "_queued"):
                call()
            kept = [weakref.ref(flight.result) for flight in comm._session._in_flight]
            gc.collect()
            assert [array() is None for array in kept] == [False]
        else:
            time.sleep(0.3)
            assert (call().wait() == 3).all()
        return comm.all_reduce(np.ones(1))[0]

    assert run_processes(2, rank) == [2.0, 2.0]


def test_an_interrupt_when_nobody_knows_whether_the_call_is_queued():
    def rank(comm):
        comm.barrier()
        if comm.rank == 1:
            time.sleep(0.3)
            with pytest.raises(Revoked, match="rank 0 was interrupted"):
                comm.all_reduce(np.ones(100_000))
            return True
        x = np.ones(100_000)
        with pytest.raises(KeyboardInterrupt), interrupted("return", "guard"):
            comm.all_reduce(x, async_op=True)
        kept = weakref.ref(x)
        del x
        gc.collect()
        assert kept() is not None
        for _ in range(3):
            with pytest.raises(Revoked):
                comm.all_reduce(np.ones(9), async_op=True).wait()
        session = comm._session
        assert not session._in_flight  # what came later is not kept for ever
        comm.close()
        gc.collect()
        return kept() is None

    assert run_processes(2, rank) == [True, True]


def test_an_interrupt_before_the_call_is_queued():
    """What comes later does not wait for it: it has never been in the queue."""

    def rank(comm):
        comm.barrier()
        if comm.rank == 1:
            with pytest.raises(Revoked, match="rank 0 was interrupted"):
                comm.all_reduce(np.ones(100_000))
            return True
        x = np.ones(100_000)
        with pytest.raises(KeyboardInterrupt), interrupted("c_return", "_enqueue"):  # it is noted
            comm.all_reduce(x, async_op=True)
        kept = weakref.ref(x)
        del x
        comm._session.sweep()
        assert not comm._session._in_flight
        comm.close()
        gc.collect()
        return kept() is None

    assert run_processes(2, rank) == [True, True]


def test_threads_let_go_of_calls_at_the_same_time():
    def rank(comm):
        works, errors = [], []
        lock = threading.Lock()
        over = threading.Event()

        def wait():
            while not over.is_set() or works:
                with lock:
                    work = works.pop() if works else None
                try:
                    time.sleep(0) if work is None else work.wait()
                except Exception as error:
                    errors.append(repr(error))

        threads = [threading.Thread(target=wait) for _ in range(4)]
        for thread in threads:
            thread.start()
        x = np.ones(8)
        for _ in range(20_000):
            work = comm.all_reduce(x, async_op=True)
            with lock:
                works.append(work)
        over.set()
        for thread in threads:
            thread.join()
        comm._session.sweep()
        return errors, len(comm._session._in_flight)

    assert run_processes(2, rank) == [([], 0)] * 2


def test_the_engine_keeps_no_error_of_a_call_that_nobody_waits_for(run):
    def rank(comm):
        if comm.rank == 1:
            with pytest.raises(TypeError):
                comm.all_reduce()
            comm.barrier()
            return True
        work = comm.all_reduce(np.ones(3), async_op=True)
        comm.barrier()
        session = comm._session
        session.sweep()
        assert _C.error_of(session.engine, work._queued_call.ticket) is None
        for _ in range(2):
            with pytest.raises(PeerRejected, match="rank 1 refused"):
                work.wait()
        return work.done()

    assert run(2, rank) == [True, True]


def test_a_call_that_the_engine_does_not_take(run):
    def rank(comm):
        session = comm._session
        comm.all_reduce(np.ones(3), async_op=True).wait()
        session.engine.close()
        for x in (np.ones(3), np.ones(4)):  # remembered, and not
            with pytest.raises(CommClosed):
                comm.all_reduce(x, async_op=True)
        session.sweep()
        return len(session._in_flight)

    assert run(2, rank) == [0, 0]


UNWAITED = """
import numpy as np
import pycoll

comm = pycoll.init(timeout=10)
work = comm.all_reduce(np.ones(3 + comm.rank), async_op=True)
"""


def test_the_end_of_a_program_tells_of_a_mismatch_that_nobody_waits_for(tmp_path):
    """Its report is made when no module can be imported any more."""
    script = tmp_path / "unwaited.py"
    script.write_text(UNWAITED)
    command = [sys.executable, "-m", "pycoll", "run", "-n", "2", str(script)]
    job = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert job.returncode == 0
    for rank in range(2):
        text = (
            f"pycoll: rank {rank} ended without wait() for a call in the background that has failed"
        )
        assert f"{text}: MismatchError: ranks called different things; field 'count'" in job.stderr
    assert job.stderr.count("float64[4]") == 2
    assert "Exception ignored" not in job.stderr


def test_what_somebody_has_heard_is_not_told_again(run, capfd):
    def ranks(comm):
        works = [comm.all_reduce(np.ones(3 + comm.rank), async_op=True) for _ in range(3)]
        with pytest.raises(MismatchError):
            works[comm.rank].wait()
        comm.close()

    run(2, ranks)
    assert "without wait()" not in capfd.readouterr().err
