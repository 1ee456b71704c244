"""One call of the system fails in one rank of a short job: every call there is, job after job.

    python tests/communicator/failures/fail_nth.py [--transport shm|tcp] [--every K] [--kinds ...]

Memory, descriptors or threads end at the n-th call (once, or for good) and each rank has to get the
right results or an error: no crash, no hang, no wrong result, and no rank that goes on as if
nothing had happened. Needs the library of tests/native/preload in LD_PRELOAD; it starts itself so.
"""

import argparse
import contextlib
import ctypes
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
SOURCE = ROOT / "tests/native/preload/fail_nth.cpp"
KINDS = ["memory", "map", "resize", "reserve", "memfd", "futex", "socket", "thread"]
N, LIMIT_S, DEADLINE_S = 2, 4.0, 20.0
FOR_GOOD = 1 << 40


def build(folder):
    """Compile the library; return its path."""
    library = Path(folder) / "libfail_nth.so"
    command = [os.environ.get("CXX", "g++"), "-std=c++20", "-O1", "-fPIC", "-shared"]
    subprocess.run([*command, "-o", str(library), str(SOURCE), "-ldl"], check=True)
    return library


def mapped(name):
    """Return where the code of a library lies."""
    text = Path("/proc/self/maps").read_text()
    rows = re.findall(rf"^(\w+)-(\w+) r-xp .*/{name}[^/]*$", text, re.MULTILINE)
    return [(int(low, 16), int(high, 16)) for low, high in rows]


class Shim:
    """The library that this process has been started with."""

    def __init__(self):
        self._dll = ctypes.CDLL(None)
        self._dll.fail_seen.restype = ctypes.c_long
        for i, (low, high) in enumerate(mapped("_C") + mapped("libstdc")):
            self._dll.fail_among(i, ctypes.c_size_t(low), ctypes.c_size_t(high))

    def arm(self, kind, first, last):
        self._dll.fail_from(KINDS.index(kind), ctypes.c_long(first), ctypes.c_long(last))

    def seen(self):
        return self._dll.fail_seen()


# --- What a rank does: steps, which tell whether their results are right -------------------------


def steps_of_shm(rank, launch):
    import numpy as np

    import pycoll

    os.environ.update(launch)
    comm = pycoll.init(timeout=LIMIT_S, heap_bytes=64 << 20)
    yield comm.world_size == N
    yield from calls(comm, rank, np)
    x = comm.empty(50_000, np.float64)
    x[:] = rank
    yield bool((comm.all_reduce(x) == N * (N - 1) / 2).all())
    part = comm.split(0, key=-rank)
    yield part.rank == N - 1 - rank
    yield part.all_reduce(np.ones(5)).tolist() == [N] * 5
    part.close()
    work = comm.all_reduce(np.ones(3), async_op=True)
    yield work.wait().tolist() == [N] * 3
    comm.close()


def calls(comm, rank, np):
    """Small and large collectives, and messages of both kinds."""
    yield comm.all_reduce(np.full(3, rank + 1.0)).tolist() == [N * (N + 1) / 2] * 3
    large = np.arange(200_000) + rank
    yield bool((comm.all_reduce(large) == N * np.arange(200_000) + N * (N - 1) // 2).all())
    yield comm.all_gather(np.array([rank])).tolist() == list(range(N))
    for count in (4, 300_000):
        x = np.full(count, rank)
        if rank == 0:
            comm.send(x, 1, tag=1)
            comm.recv(x, 1, tag=2)
        else:
            y = np.zeros_like(x)
            comm.recv(y, 0, tag=1)
            comm.send(x, 0, tag=2)
            x = y
        yield bool((x == 1 - rank).all())


def steps_of_tcp(rank, launch):
    import numpy as np

    from pycoll.comm import Communicator
    from pycoll.config import Config
    from pycoll.runtime.sessions.message_session import MpiJob, MpiSession
    from pycoll.runtime.startup import tcp_connections
    from pycoll.runtime.startup.hosts import Card

    line = socket.socket(fileno=int(launch["line"]))
    line.settimeout(LIMIT_S)

    def exchange(topic, value):
        line.sendall(json.dumps(value).encode() + b"\n")
        data = b""
        while not data.endswith(b"\n"):
            part = line.recv(1 << 16)
            if not part:
                raise ConnectionError("the other rank has gone")
            data += part
        other = json.loads(data)
        return [value, other] if rank == 0 else [other, value]

    names = [f"rank {r}" for r in range(N)]
    ends = tcp_connections.connect(exchange, rank, names, "", LIMIT_S, one_host=True)
    api = tcp_connections.open_api(ends, names)
    exchange("open", 0)
    job = MpiJob(api, None, [Card.own()] * N, tuple(range(N)), "TCP")
    comm = Communicator(MpiSession(job, list(range(N)), rank, 0, Config(timeout_s=LIMIT_S)))
    yield comm.world_size == N
    yield from calls(comm, rank, np)
    comm.close()
    api.close()


STEPS = {"shm": steps_of_shm, "tcp": steps_of_tcp}


def take_part(transport, rank, launch, out, arm, shim):
    """Run one rank in this process; write what came of it, and how many calls were counted."""
    signal.alarm(int(DEADLINE_S))  # a rank that hangs dies of it
    done, said = 0, "ok"
    if arm:
        shim.arm(*arm)
    try:
        for right in STEPS[transport](rank, launch):
            if not right:
                said = f"WRONG RESULT in step {done}"
                break
            done += 1
    except BaseException as error:
        said = f"{type(error).__name__}: {error}"
    seen = shim.seen() if arm else 0
    shim.arm("map", -1, -1)
    with contextlib.suppress(BrokenPipeError):
        os.write(out, json.dumps([rank, done, said[:600], seen]).encode() + b"\n")
    os._exit(0)


def start(transport, arm, victim, shim):
    """Fork the ranks; return their processes and the pipe of what they say."""
    from pycoll.config import Launch
    from pycoll.runtime.startup.bootstrap import make_memfd

    read_end, write_end = os.pipe()
    if transport == "shm":
        fds = [make_memfd("control"), make_memfd("heap")]
        launches = [Launch(rank, N, *fds).to_env() for rank in range(N)]
    else:
        ends = socket.socketpair()
        fds = [end.detach() for end in ends]
        launches = [{"line": str(fd)} for fd in fds]
    pids = []
    for rank in range(N):
        pids.append(os.fork())
        if pids[-1] == 0:
            os.close(read_end)
            if transport == "tcp":
                os.close(fds[1 - rank])
            take_part(
                transport, rank, launches[rank], write_end, arm if rank == victim else None, shim
            )
    for fd in (*fds, write_end):
        os.close(fd)
    return pids, read_end


def job(transport, arm, victim, shim):
    """Run a job; return what each rank said, or how it ended, and the calls counted."""
    pids, read_end = start(transport, arm, victim, shim)
    said, seen = {}, 0
    with os.fdopen(read_end) as lines:
        for line in lines:
            rank, done, text, count = json.loads(line)
            said[rank], seen = (done, text), max(seen, count)
    for rank, pid in enumerate(pids):
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if rank not in said:
            how = "HANGS" if code == -signal.SIGALRM else "CRASHED"
            said[rank] = (-1, f"{how}, status {code}")
    return [said[rank] for rank in range(N)], seen


def fault(said, victim):
    """Tell what is wrong with how a job ended; "" if nothing is."""
    for _, text in said:
        if text.split()[0] in ("WRONG", "HANGS,", "CRASHED,"):
            return text
    done, text = said[victim]
    if text == "ok":
        bad = [other for _, other in said if other != "ok"]
        return f"the others have an error, and it has none: {bad}" if bad else ""
    for rank, (steps, other) in enumerate(said):
        if other == "ok" and steps > done + 1:
            return f"rank {rank} went on as if nothing had happened"
    return ""


def sweep(transport, kinds, every, offset=0, for_good=False, out=print):
    """Let each call fail, or each K-th; return how many jobs there were, and what was wrong."""
    shim, jobs, wrong, start_s = Shim(), 0, [], time.monotonic()
    for kind in kinds:
        for victim in range(N):
            said, total = job(transport, (kind, -1, -1), victim, shim)
            assert [text for _, text in said] == ["ok"] * N, said
            for number in range(offset % every, total + 3, every):
                last = FOR_GOOD if for_good else number
                said, _ = job(transport, (kind, number, last), victim, shim)
                jobs += 1
                if found := fault(said, victim):
                    wrong.append(f"{transport} {kind} {number} of rank {victim}: {found}; {said}")
                    out(wrong[-1], flush=True)
            out(f"{transport}: {kind} of rank {victim}: {total} calls", flush=True)
    out(f"{jobs} jobs in {time.monotonic() - start_s:.1f} s, {len(wrong)} wrong", flush=True)
    return jobs, wrong


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--transport", choices=STEPS, nargs="*", default=list(STEPS))
    parser.add_argument("--kinds", nargs="*", default=KINDS)
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--offset", type=int, default=0)
    parser.add_argument("--for-good", action="store_true", help="all calls from there on fail")
    parser.add_argument("--library", help="built before; by default into tests/native/build")
    args = parser.parse_args()
    if not hasattr(ctypes.CDLL(None), "fail_seen"):
        folder = ROOT / "tests/native/build"
        folder.mkdir(exist_ok=True)
        library = args.library or build(folder)
        environ = os.environ | {"LD_PRELOAD": str(library), "PYTHONPATH": str(ROOT)}
        environ |= {"PYCOLL_TUNING": "off", "OPENBLAS_NUM_THREADS": "1"}
        os.execve(sys.executable, [sys.executable, *sys.argv], environ)
    import numpy  # noqa: F401 - once, before ranks are forked

    import pycoll.runtime.sessions.message_session
    import pycoll.runtime.startup.tcp_connections  # noqa: F401

    wrong = []
    for transport in args.transport:
        wrong += sweep(transport, args.kinds, args.every, args.offset, args.for_good)[1]
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
