"""Ranks that end, or are refused, before they join: the others hear of it at once, and why."""

import os
import signal
import subprocess
import sys
import time

import pytest

from pycoll import _C
from pycoll.config import Config
from pycoll.errors import PeerLeft
from pycoll.runtime.sessions.reports import raising
from pycoll.runtime.startup.bootstrap import make_memfd
from pycoll.runtime.startup.make_groups import open_control, tell_end
from pycoll.testing import RankFailed, run_processes

LIMIT_S = 60  # of the calls; nobody must wait for that

PROGRAM = """
import os, signal, sys, time
rank, here = int(os.environ["PYCOLL_RANK"]), sys.argv[1]
waits = os.path.join(here, "waits")
def end():
    {end}
early = {early}
if rank == 1 and early:
    end()
import pycoll
if rank == 1:
    while not os.path.exists(waits):
        time.sleep(0.01)
    time.sleep(0.3)
    end()
if not early:
    open(waits, "w").close()
try:
    pycoll.init(timeout=60)
    print("joined")
except pycoll.CollError as error:
    print(type(error).__name__, error)
"""


def launch(folder, text, *options, n=2):
    """Run a script; return its status and output, and how long it took."""
    script = folder / "script.py"
    script.write_text(text)
    start = time.monotonic()
    command = [sys.executable, "-m", "pycoll", "run", "-n", str(n), *options, script, folder]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S + 30)
    assert time.monotonic() - start < LIMIT_S / 2, done
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("early", [True, False], ids=["at once", "while another waits"])
@pytest.mark.parametrize(
    ("end", "options", "told"),
    [
        ("sys.exit(0)", [], "exited with code 0"),
        ("sys.exit(0)", ["--keep-going"], "exited with code 0"),
        ("os.kill(os.getpid(), signal.SIGKILL)", ["--keep-going"], "was killed by SIGKILL"),
    ],
)
def test_a_rank_that_ends_before_it_joins(tmp_path, end, options, told, early):
    status, out, err = launch(tmp_path, PROGRAM.format(end=end, early=early), *options)
    assert out.startswith("PeerLeft rank 1"), (out, err)
    assert f"it {told} before it joined" in out
    assert status == 0, err


def test_settings_that_one_rank_cannot_use(tmp_path):
    text = """
import os, sys, time, pycoll
rank = int(os.environ["PYCOLL_RANK"])
try:
    pycoll.init(timeout=[60, -1][rank])
except pycoll.CollError as error:
    os.write(1, f"{rank} {type(error).__name__} {error}\\n".encode())  # at once: two ranks write
done = os.path.join(sys.argv[1], "done")
while rank == 1 and not os.path.exists(done):  # its end would tell the other one
    time.sleep(0.01)
open(done, "w").close()
"""
    _, out, err = launch(tmp_path, text)
    first, second = sorted(out.splitlines())
    assert first.startswith("0 PeerLeft rank 1"), (out, err)
    assert "ArgumentError: timeout=-1" in first
    assert second.startswith("1 ArgumentError timeout=-1")


def test_a_world_of_one_may_try_again(tmp_path):
    text = """
import pycoll
try:
    pycoll.init(timeout=-1)
except pycoll.ArgumentError:
    print(pycoll.init(timeout=5).world_size)
"""
    assert launch(tmp_path, text, n=1) == (0, "1\n", "")


def test_ranks_that_need_no_communicator(tmp_path):
    text = """
import os, time
time.sleep(0.3 * int(os.environ["PYCOLL_RANK"]))
print("done", flush=True)
"""
    assert launch(tmp_path, text, n=3) == (0, "done\n" * 3, "")


def test_a_rank_that_has_joined_and_ends_is_no_absence(tmp_path):
    text = """
import os, time, pycoll
with pycoll.init(timeout=30) as comm:
    comm.barrier()
    if comm.rank == 1:
        os._exit(0)  # without a word
    time.sleep(0.5)
    try:
        comm.barrier()
    except pycoll.PeerLost as error:
        print(type(error).__name__)
"""
    assert launch(tmp_path, text)[1] == "PeerLost\n"


def test_a_death_between_the_place_and_the_life_lock():
    def rank(comm):
        comm.barrier()

    make = _C.Engine

    def engine(control, heap, rank, **options):
        if rank == 1:  # takes the place as a thread would, without a helper thread
            taken = make(control, heap, rank, timeout_s=9, threads=True)
            os.kill(os.getpid(), signal.SIGKILL)
            taken.close()
        return make(control, heap, rank, **options)

    start = time.monotonic()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_C, "Engine", engine)
        with pytest.raises(RankFailed) as caught:
            run_processes(2, rank, timeout=2 * LIMIT_S)
    assert time.monotonic() - start < LIMIT_S / 2
    assert "PeerLost: rank 1 (process" in str(caught.value)


def test_a_forked_rank_that_dies_before_it_joins():
    def rank(comm):
        comm.barrier()

    def heap(fd, n, nbytes, make=_C.Heap):
        if os.read(place, 1) == b"x":  # one of them
            os._exit(3)
        return make(fd, n, nbytes)

    place, write_end = os.pipe()
    os.write(write_end, b"x..")
    start = time.monotonic()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_C, "Heap", heap)
        with pytest.raises(RankFailed) as caught:
            run_processes(3, rank, timeout=2 * LIMIT_S)
    for fd in (place, write_end):
        os.close(fd)
    assert time.monotonic() - start < LIMIT_S / 2
    assert "it exited with code 3 before it joined" in str(caught.value)


def test_the_first_who_ends_is_the_one_that_is_named():
    fd = make_memfd("control")
    for rank in (2, 1, 2):
        assert tell_end(fd, rank, 4000 + rank, f"ended {rank}")
    with pytest.raises(PeerLeft, match=r"^rank 2 cannot join .*: it ended 2 before"):
        open_control(fd, 3, Config())
    os.close(fd)


def test_an_end_after_the_memory_was_laid_out():
    fd = make_memfd("control")
    control = open_control(fd, 2, Config())
    assert tell_end(fd, 1, 4001, "ended")
    assert tell_end(fd, 1, 4001, "ended again")
    engine = raising(_C.Engine, control, None, 0, timeout_s=9, threads=True)
    with pytest.raises(_C.EngineError) as caught:
        engine.check_peers()
    assert "it ended before it joined" in str(caught.value)
    os.close(fd)
