"""Whole programs under ``pycoll run``: how they end, and that nothing is left of them."""

import os
import re
import signal
import sys
import time
from pathlib import Path

import pytest

from tests.support.launched import launched, outcome

PRELUDE = "import os, sys, time\nimport numpy as np\nimport pycoll\n"


@pytest.fixture
def program(tmp_path):
    """``program(n, text)`` starts n ranks of a script, with an empty temporary directory."""
    (tmp_path / "tmp").mkdir()
    with launched(env={"TMPDIR": str(tmp_path / "tmp")}) as begin:

        def start(n, text):
            script = tmp_path / "script.py"
            script.write_text(PRELUDE + text)
            return begin([sys.executable, "-m", "pycoll", "run", "-n", str(n), str(script)])

        yield start


ENDINGS = {
    "ring": "comm.all_reduce(np.ones(1000), algorithm='ring', order='any')",
    "broadcast": "comm.broadcast(np.ones(1000), algorithm='ring')",
    "reduce": "comm.reduce(np.ones(200_000))",
    "gather": "comm.gather(np.ones(10))",
    "in the background": "comm.all_reduce(np.ones(100_000), async_op=True)",
    "a group": "comm.dup().all_reduce(np.ones(1000), algorithm='ring', order='any')",
    "messages": "comm.send(np.ones(9), 5 - comm.rank); comm.recv(np.ones(9), 5 - comm.rank)",
}


@pytest.mark.parametrize("last", ENDINGS)
def test_a_program_may_end_without_closing(program, last):
    for _ in range(2):
        process = program(6, f"comm = pycoll.init()\n{ENDINGS[last]}\n")
        assert outcome(process) == (0, "", "")


@pytest.mark.parametrize(
    ("end", "reason"),
    [
        ("{}['missing']", "KeyError: 'missing'"),
        ("pass", "closed"),
        ("sys.exit(3)", "rank 1"),
        ("comm.close()", "closed"),
        ("os._exit(3)", "died"),
    ],
)
def test_the_others_hear_how_a_rank_ended(program, end, reason):
    text = f"""
comm = pycoll.init(timeout=30)
comm.barrier()
if comm.rank == 1:
    {end}
else:
    try:
        comm.all_reduce(np.ones(3))
    except pycoll.PeerLost as error:
        print(type(error).__name__, error, flush=True)
"""
    status, out, err = outcome(program(2, text))
    name = "PeerLost" if "_exit" in end else "PeerLeft"
    assert out.startswith(f"{name} rank 1"), (out, err)
    assert reason in out
    assert status == (0 if end in ("pass", "comm.close()") else 3 if "exit" in end else 1)


def test_an_unexpected_end_shows_one_traceback(program):
    text = """
comm = pycoll.init(timeout=30)
comm.barrier()
if comm.rank == 2:
    raise RuntimeError("the cause")
comm.all_reduce(np.ones(3))
"""
    status, out, err = outcome(program(3, text))
    assert (status, out) == (1, "")
    assert err.count("Traceback") == 1
    assert "RuntimeError: the cause" in err


def test_a_forked_child_that_runs_to_its_end(program):
    """It inherits what runs at exit; none of that may touch the parent's communicator."""
    text = """
import warnings
warnings.simplefilter("ignore", DeprecationWarning)  # of threads that libraries have, from 3.12 on
comm = pycoll.init(timeout=30)
x = comm.empty(5000)
x[:] = 1
pid = os.fork()
if pid == 0:
    sys.exit(0)
assert os.waitpid(pid, 0)[1] == 0
comm.all_reduce(x, out=x)
sys.stdout.write(f"{x.min()} {x.max()}\\n")
"""
    assert outcome(program(2, text)) == (0, "2.0 2.0\n" * 2, "")


def test_workers_made_by_fork(program):
    text = """
import multiprocessing
comm = pycoll.init(timeout=30)
x = comm.empty(5000)
x[:] = 1
with multiprocessing.get_context("fork").Pool(2) as pool:
    assert pool.map(abs, [-1, 2, -3]) == [1, 2, 3]
comm.all_reduce(x, out=x)
sys.stdout.write(f"{x.min()} {x.max()}\\n")
"""
    assert outcome(program(2, text)) == (0, "2.0 2.0\n" * 2, "")


def test_a_daemon_thread_in_a_call_at_the_end(program):
    text = """
import threading
comm = pycoll.init(timeout=30)
if comm.rank == 0:
    threading.excepthook = lambda args: None
    threading.Thread(target=comm.barrier, daemon=True).start()
    time.sleep(0.2)
else:
    time.sleep(0.5)
    try:
        comm.barrier()
    except pycoll.PeerLeft as error:
        sys.stdout.write(str(error))
"""
    status, out, err = outcome(program(2, text))
    assert (status, err) == (0, "")
    assert "left: it exited while one of its threads was in a call" in out


def test_a_daemon_thread_that_receives_at_the_end(program):
    text = """
import threading
comm = pycoll.init(timeout=30)
threading.excepthook = lambda args: None
receive = lambda: comm.recv(np.empty(3), 1 - comm.rank)
threading.Thread(target=receive, daemon=True).start()
time.sleep(0.1)
"""
    for _ in range(8):
        assert outcome(program(2, text)) == (0, "", "")


def test_a_call_in_the_background_that_nobody_joins(program):
    text = """
comm = pycoll.init(timeout=30)
if comm.rank == 0:
    comm.all_reduce(np.ones(3), async_op=True)
"""
    assert outcome(program(3, text)) == (0, "", "")


@pytest.mark.parametrize("setting", ["cell_bytes", "heap_bytes"])
def test_ranks_with_different_settings(program, setting):
    text = f"""
comm = pycoll.init(timeout=3, {setting}=4096 * (1 + int(os.environ["PYCOLL_RANK"])))
comm.barrier()
"""
    status, _, err = outcome(program(2, text))
    assert status == 1
    assert re.search(
        r"TransportError: the (heap|control segment) has \d+ bytes where this rank", err
    )


def test_a_job_is_joined_once(program):
    text = """
pycoll.init().close()
try:
    pycoll.init()
except pycoll.TransportError as error:
    print(error, flush=True)
"""
    status, out, _ = outcome(program(2, text))
    assert status == 0
    assert out.count("already joined its job of 2 ranks") == 2


def test_a_world_of_one(program):
    text = """
with pycoll.init() as comm:
    x = comm.all_reduce(np.arange(3.0))
    assert (comm.rank, comm.world_size, x.tolist()) == (0, 1, [0.0, 1.0, 2.0])
    comm.send(x, 0)
    assert comm.recv(x, pycoll.ANY) == 0
    assert comm.split(0).dup().all_to_all(x).tolist() == x.tolist()
"""
    assert outcome(program(1, text)) == (0, "", "")


def named_memory(pid, folder):
    """Return the files in /dev/shm or the temporary directory that a process has open or mapped."""
    links = [os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir()]
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    paths = links + [line.split(maxsplit=5)[-1] for line in lines]
    return [path for path in paths if path.startswith(("/dev/shm", f"{folder}/tmp"))]


def wait_until(condition, seconds):
    """Wait for something that must happen in time."""
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.02)


@pytest.mark.parametrize("victims", ["launcher", "ranks", "all"])
def test_nothing_is_left_after_sigkill(program, victims, tmp_path):
    text = f"""
comm = pycoll.init()
twin = comm.dup()
x = comm.empty(1 << 20)
x[:] = 1
open({str(tmp_path)!r} + f"/pid.{{comm.rank}}", "w").write(str(os.getpid()))
comm.barrier()
while True:
    twin.all_reduce(x, out=x, op="max")
"""
    process = program(3, text)
    wait_until(lambda: len(list(tmp_path.glob("pid.*"))) == 3, 30)
    time.sleep(0.2)
    pids = [int(path.read_text()) for path in tmp_path.glob("pid.*")]
    assert [name for pid in pids for name in named_memory(pid, tmp_path)] == []
    if victims != "ranks":
        process.kill()
    if victims != "launcher":
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
    process.communicate(timeout=30)
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), 10)
    assert os.listdir(tmp_path / "tmp") == []


def test_exit_handlers_and_finalizers_of_a_program_communicate(program):
    text = """
import atexit

class Logger:
    def __init__(self, name, comm=None):
        self.name, self.comm = name, comm
    def log(self):
        x = np.full(3, 1.0)
        total = self.comm.all_reduce(x)[0] + self.comm.all_reduce(x, async_op=True).wait()[0]
        os.write(1, f"{self.name} {total:g}\\n".encode())
    def __del__(self):
        self.log()

before = Logger("handler")
atexit.register(before.log)
comm = before.comm = pycoll.init(timeout=10).dup()
part = comm.split(0)
last = Logger("finalizer", part)
last.me = last  # a part of the last garbage
"""
    process = program(2, text)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, "")
    assert sorted(out.split("\n")) == ["", *["finalizer 4"] * 2, *["handler 4"] * 4]


def test_peers_hear_the_reason_of_an_exit(program):
    text = """
comm = pycoll.init(timeout=10)
if comm.rank == 1:
    sys.exit("no key lr_decay")
comm.barrier()
"""
    process = program(2, text)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert re.search(r"rank 1 \(process \d+\) left: SystemExit: no key lr_decay", err)


def test_what_cannot_be_served_at_the_end_says_so(program):
    text = """
import atexit

def handler():
    try:
        comm.barrier()
    except pycoll.CommClosed as error:
        print(error)

atexit.register(handler)
comm = pycoll.init(timeout=10)
raise ValueError("nothing will come of it")
"""
    process = program(1, text)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "the interpreter is ending: ValueError has ended it; communicate before" in out
