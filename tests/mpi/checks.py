"""Programs about the health check over MPI; each returns what was wrong."""

import os
import time

import numpy as np

import pycoll
from pycoll.cli.tune import measure
from pycoll.runtime.selection.tuning_table import Tuning, fingerprint
from pycoll.runtime.sessions import health
from pycoll.schedule.cost.network import Network


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
    """Return the map of hosts that the check reports, and what a communicator of a host says."""
    found = comm.check().hosts
    assert comm.hosts == found
    host = comm.split(found[comm.rank])
    assert host.rank == comm.local_rank
    assert host.hosts == (0,) * host.world_size
    host.close()
    return list(found)


def selection(comm):
    """Return the digest of what tuning has changed."""
    return comm.check().selection


def tune(comm):
    """Measure for a moment, and use what was found; return where, and what is wrong."""
    world = measure(comm, ["all_reduce", "gather"], 20.0, 256)
    table = Tuning(fingerprint(), (world,))
    comm._session.use(Tuning.parse(table.to_json()), comm._session.sharing)
    wrong = [] if comm._session.plans.world == world else ["it is not used"]
    wrong += [] if comm.check().selection == table.digest else ["another table is used"]
    wrong += [] if isinstance(world.machine, Network) else [repr(world.machine)]
    wrong += [] if 0 < world.machine.far_alpha < 1 else ["far_alpha"]
    wrong += [] if {t.collective for t in world.times} == {"all_reduce", "gather"} else ["times"]
    wrong += ["symmetric"] if any(t.symmetric for t in world.times) else []
    wrong += [] if comm.all_reduce(np.ones(64))[0] == comm.world_size else ["sum"]
    return [world.transport.split()[0], list(world.ranks_per_host), wrong]


ALL = (check, hosts_of, selection, tune)
