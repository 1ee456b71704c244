"""`pycoll.init` called again by a library: the same communicator, closed by the last user."""

import gc
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import pycoll

ROOT = Path(__file__).resolve().parents[3]


def run(n, text, *options):
    """Run a program on n ranks and return its exit status and what it wrote."""
    job = [sys.executable, "-m", "pycoll", "run", "-n", str(n), *options]
    return subprocess.run(
        [*job, sys.executable, "-c", LIBRARY + text],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )


LIBRARY = """
import numpy as np, pycoll

def mean(x):
    with pycoll.init() as comm:  # a library's
        return comm.all_reduce(x, "avg")

comm = pycoll.init(timeout=20)
"""


@pytest.mark.parametrize("n", [1, 2, 3])
def test_a_library_joins_after_its_user(n):
    text = """
x = np.full(5, float(comm.rank))
for _ in range(3):
    assert (mean(x) == comm.all_reduce(x) / comm.world_size).all()
other = pycoll.init()
comm.close()
comm.close()
assert other.all_reduce(1) == other.world_size
other.close()
try:
    other.barrier()
except pycoll.CommClosed:
    print("closed", flush=True)
"""
    done = run(n, text)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "closed\n" * n


def test_it_is_no_collective():
    text = """
if comm.rank == 0:
    pycoll.init().close()
assert comm.all_reduce(comm.rank) == 3
"""
    done = run(3, text)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_an_exception_in_a_library_reaches_the_peers():
    text = """
try:
    with pycoll.init() as inner:
        if inner.rank == 1:
            raise ValueError("of the library")
        inner.barrier()
except (ValueError, pycoll.PeerLeft) as error:
    print(comm.rank, type(error).__name__, flush=True)
try:
    comm.barrier()
except pycoll.CollError as error:
    print(comm.rank, type(error).__name__, flush=True)
"""
    done = run(2, text)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [
        "0 CommClosed",
        "0 PeerLeft",
        "1 CommClosed",
        "1 ValueError",
    ]


def test_survivors_share_what_they_have_made():
    text = """
import os
if comm.rank == 1:
    os._exit(3)
try:
    comm.barrier()
except pycoll.PeerLost:
    left = comm.shrink()
comm.close()
assert pycoll.init().world_size == left.world_size == 2
assert mean(4.0) == 4.0
"""
    done = run(3, text, "--keep-going")
    assert done.returncode == 0, done.stderr


CALLS = {
    "a collective": lambda comm: comm.all_reduce(np.ones(3)),
    "numbers": lambda comm: comm.all_reduce(1),
    "one with a body": lambda comm: comm.minloc(1),
    "a variant": lambda comm: comm.all_gather_v(np.ones(3)),
    "a message": lambda comm: comm.send(np.ones(1), 0),
    "one in the background": lambda comm: comm.isend(np.ones(1), 0),
    "an object": lambda comm: comm.send_object(1, 0),
    "a group": lambda comm: comm.dup(),
    "a plan": lambda comm: comm.plan("all_reduce", np.ones(1)),
    "check": lambda comm: comm.check(),
    "shrink": lambda comm: comm.shrink(),
    "abort": lambda comm: comm.abort(),
}


@pytest.mark.parametrize("what", CALLS)
def test_what_is_closed_stays_closed_while_others_go_on(what):
    with pycoll.init() as comm:
        other = pycoll.init()
        other.all_reduce(np.ones(3))  # remembered
        other.close()
        with pytest.raises(pycoll.CommClosed):
            CALLS[what](other)
        assert (other.rank, other.world_size) == (0, 1)
        assert comm.all_reduce(1) == 1


def test_a_closed_object_sends_no_messages():
    with pycoll.init() as comm:
        other, x = pycoll.init(), np.ones(3)
        other.isend(x, 0).wait()
        other.recv(x, 0)
        other.close()
        for call in (other.send, other.isend, other.irecv, other.recv):
            with pytest.raises(pycoll.CommClosed):
                call(x, 0)
        assert comm.iprobe() is None


def test_a_close_that_is_refused_leaves_the_user_in_its_place():
    text = """
import threading, time
if comm.rank == 0:
    thread = threading.Thread(target=comm.barrier)
    thread.start()
    time.sleep(0.3)
    try:
        comm.close()
    except pycoll.ConcurrentUseError:
        print("refused", flush=True)
    thread.join()
    pycoll.init().close()
else:
    time.sleep(0.6)
    comm.barrier()
assert comm.all_reduce(1) == 2
"""
    done = run(2, text)
    assert (done.returncode, done.stdout, done.stderr) == (0, "refused\n", "")


def test_work_goes_on_after_its_object_is_closed():
    with pycoll.init() as comm, pycoll.init() as other:
        work = other.all_reduce(np.ones(3), async_op=True)
        other.close()
        assert work.wait().tolist() == [1, 1, 1]
        assert comm.all_reduce(1) == 1


def test_one_that_is_dropped_counts_as_closed():
    first, second = pycoll.init(), pycoll.init()
    session = first._session
    del first
    gc.collect()
    second.close()
    assert session._engine is None


def test_other_settings_are_refused():
    with pycoll.init(timeout=7) as comm:
        with pycoll.init(), pycoll.init(timeout=7.0):
            pass
        with pytest.raises(pycoll.ArgumentError, match=r"timeout_s=3\.0 and not 7\.0"):
            pycoll.init(timeout=3)
        with pytest.raises(pycoll.ArgumentError, match="single_copy='off' and not 'auto'"):
            pycoll.init(single_copy="off")
        with pytest.raises(pycoll.ArgumentError, match="transport is 'pigeons'"):
            pycoll.init(transport="pigeons")
        assert comm.all_reduce(1) == 1
    with pycoll.init(timeout=3) as comm:  # after the end of the first
        assert comm._session.config.timeout_s == 3


def test_a_forked_child_joins_by_itself():
    with pycoll.init() as comm:
        pid = os.fork()
        if pid == 0:
            os._exit(int(pycoll.init()._session is comm._session))
        assert os.waitpid(pid, 0)[1] == 0


@pytest.mark.parametrize("n", [1, 2])
def test_a_function_that_joins_can_be_called_again(n):
    """What a program drops without closing it stays joined, since it can join only once."""
    text = """
import gc
del comm

def total(x):
    return pycoll.init(timeout=20).all_reduce(x)

for _ in range(3):
    gc.collect()
    assert total(1) == pycoll.init(timeout=20).world_size
with pycoll.init(timeout=20) as comm:
    pass
try:
    pycoll.init(timeout=20)
except pycoll.TransportError as error:
    print("already joined" in str(error))
"""
    done = run(n, text)
    assert (done.returncode, done.stdout, done.stderr) == (0, "True\n" * n, "")
