"""How exactly times of two ranks in a trace can be compared, where the truth is known.

    python benchmarks/clocks.py

One host: ranks read one clock, so what the trace says of a call must lie between two readings of
that clock around it; what is outside is error. Then the same trace is read as if the ranks had two
clocks: the offset that their calls give should be 0.

Two hosts: network namespaces joined by a link, one in a time namespace whose monotonic clock is
exactly 1000 s ahead. What the trace finds for that, less 1000 s, is the error. It needs root.
"""

import argparse
import json
import os
import secrets
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from hosts import NET, network, obstacle

from pycoll.observe.trace.merged import merge
from pycoll.testing import run_processes

AHEAD_S = 1000
PROGRAM = """
import sys
import numpy as np, pycoll
with pycoll.init() as comm:
    x = np.ones(1)
    for _ in range(20):
        comm.all_reduce(x)
    with comm.trace(sys.argv[1]):
        for _ in range(int(sys.argv[2])):
            comm.all_reduce(x)
"""


def offset(trace):
    """Return how much later the clock of rank 1 is taken to be than that of rank 0, in ns."""
    shift = {stream.rank: trace.shift_ns[id(stream)] for stream in trace.streams}
    return shift[0] - shift[1]


def bracketed(comm, calls, folder):
    """Make calls in a trace; return readings of the clock around each."""
    x, around = comm.zeros(1), np.empty((calls, 2), np.int64)
    for _ in range(20):
        comm.all_reduce(x, out=x)
    with comm.trace(folder):
        for i in range(calls):
            around[i, 0] = time.monotonic_ns()
            comm.all_reduce(x, out=x)
            around[i, 1] = time.monotonic_ns()
    return around


def one_host(calls, folder):
    """Print the error of times on one host, and the offset that calls alone would give."""
    around = run_processes(2, bracketed, calls, folder)
    trace, worst = merge(folder), 0.0
    for stream in trace.streams:
        before, after = around[stream.rank].T
        enter = stream.calls["enter_ns"].astype(np.int64)
        leave = enter + stream.calls["total_ns"]
        worst = max(worst, float((before - enter).max()), float((leave - after).max()))
    stated = trace.clock_error_ns / 1e3
    print(f"one host, {calls:,} calls: error {max(worst, 0) / 1e3:.3f} us, stated {stated:.3g} us")
    (notes,) = folder.glob("rank1-*.jsonl")
    head, *lines = notes.read_text().splitlines(keepends=True)
    notes.write_text("".join([json.dumps(json.loads(head) | {"clock": "other"}) + "\n", *lines]))
    trace = merge(folder)
    told = f"error {abs(offset(trace)) / 1e3:.3f} us, stated {trace.clock_error_ns / 1e3:.3g} us"
    print(f"one host as if it were two: {told}")


def two_hosts(calls, folder):
    """Print the error of the offset between two namespaces."""
    program = folder / "program.py"
    program.write_text(PROGRAM)
    secret = secrets.token_hex(16)
    with network(2, 10_000) as names:
        ranks = []
        for rank, name in enumerate(names):
            ahead = ["--time", "--fork", "--kill-child", f"--monotonic={AHEAD_S}"] * rank
            words = ["ip", "netns", "exec", name, "unshare", "--ipc", *ahead]
            words += [sys.executable, str(program), str(folder / "trace"), str(calls)]
            place = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": f"{NET}.1"}
            env = {**os.environ, **place, "MASTER_PORT": "29511", "PYCOLL_SECRET": secret}
            ranks.append(subprocess.Popen(words, env=env))
        if any(process.wait(120) for process in ranks):
            raise SystemExit("a rank has failed")
    trace = merge(folder / "trace")
    error, stated = abs(offset(trace) - AHEAD_S * 1e9) / 1e3, trace.clock_error_ns / 1e3
    print(f"two namespaces, {calls:,} calls: error {error:.3f} us, stated {stated:.3g} us")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calls", type=int, nargs="+", default=[100, 1000, 10_000])
    args = parser.parse_args()
    why = obstacle()
    for calls in args.calls:
        with tempfile.TemporaryDirectory() as folder:
            one_host(calls, Path(folder) / "one")
            if not why:
                two_hosts(calls, Path(folder))
    if why:
        print(f"two namespaces: not measured: {why}")


if __name__ == "__main__":
    main()
