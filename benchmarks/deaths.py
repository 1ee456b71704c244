"""How soon survivors hear of a death, and what is left of a job of which nobody survives.

``python benchmarks/deaths.py`` kills ranks at random for 30 s, in worlds of 2, 4 and 8 on this
host: in the middle of calls of many kinds, and between them, while the others make calls or wait.
Counted is the time from just before the signal until the error is raised, for every survivor. Then
it kills whole jobs, the launcher too, and looks for what they have left. It prints a table and
writes benchmarks/results/deaths.md and .json.
"""

import contextlib
import mmap
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
from harness import pages
from harness.start import ROOT

import pycoll
from pycoll.config import Config
from pycoll.testing import run_processes

SECONDS, JOBS = 30.0, 10
HEAP_BYTES = 64 << 20
WORLDS = (2, 4, 8)
SMALL, LARGE = np.ones(100), np.ones(300_000)

CALLS = {
    "all_reduce of 800 B": lambda comm, peer: comm.all_reduce(SMALL),
    "all_reduce of 2.4 MB": lambda comm, peer: comm.all_reduce(LARGE),
    "all_reduce in the background": lambda comm, peer: comm.all_reduce(SMALL, async_op=True).wait(),
    "ring": lambda comm, peer: comm.all_reduce(SMALL, algorithm="ring", order="any"),
    "barrier": lambda comm, peer: comm.barrier(),
    "broadcast from the victim": lambda comm, peer: comm.broadcast(SMALL.copy(), root=peer),
    "gather by a survivor": lambda comm, peer: comm.gather(
        SMALL, root=(peer + 1) % comm.world_size
    ),
    "recv from the victim": lambda comm, peer: receive(comm, peer),
}


def receive(comm, peer):
    """The victim sends to all others in turn; a message that never comes ends by its death."""
    if comm.rank != peer:
        comm.recv(np.empty(3), peer)
        return
    for other in range(comm.world_size):
        if other != peer:
            comm.send(np.ones(3), other)


def die(when):
    """Write the time where all ranks see it, and die."""
    when[0] = time.monotonic()
    os.kill(os.getpid(), signal.SIGKILL)


def suffer(comm, name, victim, inside, delay_s, when):
    """Make calls until the victim has died; return how long ago that was."""
    call = CALLS[name]
    try:
        call(comm, victim)
        if comm.rank == victim and inside:
            threading.Timer(delay_s, die, [when]).start()
        elif comm.rank == victim:
            time.sleep(delay_s)
            die(when)
        while True:
            call(comm, victim)
    except pycoll.PeerLost:
        return time.monotonic() - when[0]


def one_death(rng):
    """Kill a rank; return the call, the world and when each survivor has heard, in seconds."""
    n, name, inside = rng.choice(WORLDS), rng.choice(list(CALLS)), rng.random() < 0.5
    victim, delay_s = rng.randrange(n), 0.02 * rng.random()
    when = np.frombuffer(mmap.mmap(-1, mmap.PAGESIZE), np.float64)[:1]
    config = Config(timeout_s=20, heap_bytes=HEAP_BYTES, tuning="off")
    words = name, victim, inside, delay_s, when
    heard = run_processes(n, suffer, *words, timeout=40, config=config, may_die=[victim])
    return name, n, [heard[rank] for rank in range(n) if rank != victim]


# --- What is left --------------------------------------------------------------------------------

PROGRAM = """
import os, sys, time
import pycoll
comm = pycoll.init(heap_bytes=256 << 20, timeout=60)
x = comm.empty(60 << 18, "float32")
x[:] = comm.rank
comm.all_reduce(x, out=x)
print(os.getpid(), flush=True)
while True:
    comm.all_reduce(x, out=x)
"""


def shared_memory(pids):
    """Return the bytes of each piece of shared memory that processes have open, by its inode."""
    found = {}
    for pid in pids:
        with contextlib.suppress(OSError):  # it has ended
            for fd in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    if os.readlink(fd).startswith("/memfd:"):
                        state = os.stat(fd)
                        found[state.st_ino] = 512 * state.st_blocks
            for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
                words = line.split()
                if len(words) > 5 and words[5].startswith("/memfd:"):
                    found.setdefault(int(words[4]), 0)
    return found


def names(folder):
    """Return all files where jobs could leave any."""
    places = Path("/dev/shm"), Path("/dev/mqueue")
    found = {str(path) for place in places for path in place.rglob("*pycoll*")}
    return found | {str(path) for path in Path(folder).rglob("*")}


def lives(pid):
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


def kill_all(ranks):
    """Kill a job and its launcher; return the bytes that it had, and what it has left."""
    with tempfile.TemporaryDirectory() as folder:
        environ = os.environ | {"TMPDIR": folder, "PYTHONPATH": str(ROOT), "HOME": folder}
        there = names(folder)
        words = [sys.executable, "-m", "pycoll", "run", "-n", str(ranks)]
        words += [sys.executable, "-c", PROGRAM]
        job = subprocess.Popen(words, env=environ, stdout=subprocess.PIPE, text=True, cwd=folder)
        pids = [int(job.stdout.readline().split()[-1]) for _ in range(ranks)]
        held = shared_memory(pids)
        for pid in (*pids, job.pid):
            with contextlib.suppress(ProcessLookupError):  # the others have ended it
                os.kill(pid, signal.SIGKILL)
        job.wait()
        until = time.monotonic() + 10
        while any(map(lives, pids)) and time.monotonic() < until:
            time.sleep(0.01)
        everybody = [name for name in os.listdir("/proc") if name.isdigit()]
        kept = sum(held[inode] for inode in shared_memory(everybody) if inode in held)
        return sum(held.values()), kept, len(names(folder) - there), sum(map(lives, pids))


def main():
    parser = pages.arguments(__doc__, "deaths")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of random deaths")
    parser.add_argument("--jobs", type=int, default=JOBS, help="of which nobody survives")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    others, until = pages.Others(), time.monotonic() + args.seconds
    rng, heard, deaths = random.Random(args.seed), {}, 0
    while time.monotonic() < until:
        name, n, found = one_death(rng)
        heard.setdefault(name, []).extend(found)
        heard.setdefault(f"{n} ranks", []).extend(found)
        heard.setdefault("all", []).extend(found)
        deaths += 1
    left = [kill_all(4) for _ in range(args.jobs)]
    report(args.name, heard, deaths, left, others.share())


def report(name, heard, deaths, left, share):
    """Write the page."""

    def row(what):
        ms = np.array(heard[what]) * 1e3
        columns = (np.percentile(ms, q) for q in (50, 99, 100))
        return [what, str(len(ms)), *(f"{value:.1f} ms" for value in columns)]

    lines = pages.table(
        ("while the others are in", "survivors", "median", "p99", "p100"),
        [row(what) for what in (*CALLS, *(f"{n} ranks" for n in WORLDS), "all") if what in heard],
    )
    held, kept, files, alive = (np.array(column) for column in zip(*left, strict=True))
    lines += [
        "",
        f"Of {len(left)} jobs of 4 ranks, of which the launcher and all ranks were killed in the "
        f"middle of a call: they held {held.min() >> 20} to {held.max() >> 20} MiB of shared "
        f"memory, of which {kept.max()} bytes were still in use; {files.sum()} files and "
        f"{alive.sum()} processes were left.",
    ]
    about = f"{deaths} deaths by SIGKILL. Other processes used {share:.0%} of the cores."
    ms = {what: [round(1e3 * value, 1) for value in heard[what]] for what in heard if what in CALLS}
    found = {"ms": ms, "left": [list(map(int, row)) for row in left]}
    pages.write(name, "How soon survivors hear of a death", about, lines, **found)


if __name__ == "__main__":
    main()
