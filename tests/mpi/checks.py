"""Programs about the health check over MPI; each returns what was wrong."""

import os
import time

import numpy as np

import pycoll
from pycoll.runtime import health


def check(comm):
    """Let all be well, then let the last rank differ, and then stay away."""
    n, me = comm.world_size, comm.rank
    comm.all_reduce(np.ones(70_000))
    found = comm.check()
    pids = comm.all_gather(np.array([os.getpid()])).tolist()
    wrong = [] if [p.pid for p in found.peers] == pids else [f"{found} instead of {pids}"]
    mates = [r for r in range(n) if found.hosts[r] == found.hosts[me]]
    two_levels = type(comm._session).__name__ == "TwoLevelSession"
    for peer in found.peers:
        way = "" if peer.rank == me else "messages of"
        if two_levels and peer.rank != me and peer.rank in mates:
            way = "shared memory"
        well = peer.transport.startswith(way) and (peer.latency_s > 0) == (peer.rank != me)
        wrong += [] if well else [f"{peer}"]
    return wrong + _differing(comm) + _staying_away(comm)


def _differing(comm):
    last, version = comm.world_size - 1, health.VERSION
    if comm.rank == last:
        health.VERSION = "0.0.9"
    try:
        comm.check()
        wrong = ["nothing was raised"]
    except pycoll.MismatchError as error:
        wrong = [] if f"rank {last}: 0.0.9" in str(error) else [str(error)]
    health.VERSION = version
    return wrong


def _staying_away(comm):
    twin, last, wrong = comm.dup(), comm.world_size - 1, []
    start = time.monotonic()
    if comm.rank != last:
        try:
            twin.check(timeout=0.5)
            wrong.append("nothing was raised")
        except pycoll.CollTimeout as error:
            wrong += [] if f"rank {last}" in str(error) else [str(error)]
        wrong += [] if time.monotonic() - start < 5 else ["it took long"]
    comm.barrier()
    twin.close()
    return wrong


def hosts_of(comm):
    """Return the map of hosts that the check reports."""
    return list(comm.check().hosts)


def selection(comm):
    """Return the digest of what tuning has changed."""
    return comm.check().selection


ALL = (check, hosts_of, selection)
