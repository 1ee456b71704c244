"""All-reduce over TCP, without MPI, between two hosts made of network namespaces.

    python benchmarks/hosts_tcp.py --ranks 1 2 --mbit 1000

Links and hosts are those of hosts.py. Beside pycoll, in turns, a pair of ranks on different hosts
exchanges over a plain socket what the link must carry for it: nothing is combined and nobody else
waits, so no all-reduce by blocking sockets takes less. Calls follow each other without a rest, so
that the limit holds for all of them. It needs root, iproute2 and util-linux.
"""

import json
import os
import socket
import statistics
import sys
import threading
import time
from pathlib import Path

import hosts
import numpy as np
from harness import pages

import pycoll

SIZES = [8, 4 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20]
TURNS = 9
ONE_GO = 16 << 10  # bytes that a socket takes without anybody who reads
PORT = 29700
PROGRAM = Path(__file__).resolve()
ABOUT = (
    "Medians of the slowest rank. A plain socket: what a pair of ranks takes to exchange as much "
    "over one. A full frame carries 1448 of its 1514 bytes, so 95.6 % of a link is all that TCP "
    "can have, but for the 128 KiB that pass at once after a rest"
)


def connect(comm):
    """Return a plain socket to the same rank of the other host."""
    half = comm.world_size // 2
    where = (f"{hosts.NET}.1", PORT + comm.rank % half)
    if comm.rank < half:
        server = socket.create_server(where)
        comm.barrier()
        plain, _ = server.accept()
    else:
        comm.barrier()
        plain = socket.create_connection(where)
    plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return plain


def exchange(plain, mine, theirs):
    """Send and receive as many bytes, both at once."""
    sender = threading.Thread(target=plain.sendall, args=(mine,))
    if len(mine) > ONE_GO:
        sender.start()
    else:
        plain.sendall(mine)
    view, got = memoryview(theirs), 0
    while got < len(view):
        got += plain.recv_into(view[got:])
    if len(mine) > ONE_GO:
        sender.join()


def measure(comm, call, count):
    """Return the seconds of a call on the slowest rank."""
    comm.barrier()
    start = time.perf_counter()
    for _ in range(count):
        call()
    return comm.all_reduce((time.perf_counter() - start) / count, "max")


def row(comm, plain, size):
    """Return a size, and the seconds of both ways."""
    n, count = comm.world_size, max(4, min(500, (4 << 20) // size))
    x = np.arange(size // 4, dtype=np.float32) % 1000
    mine, y = x + comm.rank, np.empty_like(x)
    part = bytes(max(1, x.nbytes * 2 // n))
    theirs = bytearray(len(part))
    ways = [lambda: comm.all_reduce(mine, out=y), lambda: exchange(plain, part, theirs)]
    took = [[measure(comm, way, count) for way in ways] for _ in range(TURNS)]
    if not np.array_equal(y, x * n + n * (n - 1) / 2):
        raise SystemExit(f"wrong result of {size} bytes")
    return [size, *map(statistics.median, zip(*took, strict=True))]


def rank(out, *sizes):
    """Write what both ways took for each size."""
    with pycoll.init(timeout=60) as comm, connect(comm) as plain:
        rows = [row(comm, plain, int(size)) for size in sizes]
        if comm.rank == 0:
            Path(out).write_text(json.dumps(rows))


def main():
    parser = pages.arguments(__doc__, "hosts_tcp")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2], help="on each host")
    parser.add_argument("--mbit", type=int, default=1000)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, metavar="BYTES")
    args = parser.parse_args()
    if reason := hosts.obstacle():
        raise SystemExit(f"skipped: {reason}")
    found, lines = {}, []
    for ranks in args.ranks:
        found[ranks] = hosts.run_over_tcp(PROGRAM, args.sizes, 2, ranks, args.mbit)
        for size, ours, both in found[ranks]:
            link = f"{size * 8 / args.mbit / ours / 1e6:.1%}" if size >= 1 << 20 else ""
            us = [f"{seconds * 1e6:.1f} us" for seconds in (ours, both)]
            lines.append([f"2 x {ranks}", pages.size(size), *us, f"{both / ours:.2f}", link])
    head = ["hosts x ranks", "size", "pycoll", "a plain socket", "times as fast", "of the link"]
    about = f"{ABOUT}. Links of {args.mbit} Mbit/s"
    pages.write(args.name, "All-reduce over TCP", about, pages.table(head, lines), found=found)


if __name__ == "__main__":
    if "MASTER_ADDR" in os.environ:
        rank(*sys.argv[1:])
    else:
        main()
