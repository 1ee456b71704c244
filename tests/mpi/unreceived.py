"""Programs in which something sent waits for its receiver; each returns what was wrong."""

import time

import numpy as np

import pycoll


def refused_then_large(comm):
    """Refuse a call whose messages MPI does not send at once, and make only large calls then."""
    n, wrong, large = comm.world_size, [], np.ones(200_001)
    for size in (600, 2500, 4000):
        for bad in range(n):
            try:
                comm.all_reduce("no array" if comm.rank == bad else np.ones(size))
                wrong.append("nothing was raised")
            except (pycoll.PeerRejected, pycoll.ArgumentError) as error:
                rejected = isinstance(error, pycoll.PeerRejected)
                wrong += [] if rejected == (comm.rank != bad) else [repr(error)]
            for _ in range(3):
                wrong += [] if (comm.all_reduce(large) == n).all() else [f"{size}: the sum"]
    return wrong


def received_late(comm):
    """Send messages, make calls of every size, and only then receive the messages."""
    n, me, wrong = comm.world_size, comm.rank, []
    for size in (3000, 10_000, 32 << 10):
        for times in (1, 3):
            for _ in range(times):
                comm.send(np.full(size, me, np.uint8), (me + 1) % n)
            for count in (1, 1, 4000, 4000, 200_001, 200_001):
                sums = comm.all_reduce(np.ones(count))
                wrong += [] if (sums == n).all() else [f"{size}: the sum of {count}"]
            for _ in range(times):
                found = np.empty(size, np.uint8)
                comm.recv(found, (me - 1) % n)
                wrong += [] if (found == (me - 1) % n).all() else [f"{size}: the message"]
    return wrong


def refused_behind_mail(comm):
    """Refuse a call while messages wait: that costs the call and no more."""
    n, me, wrong = comm.world_size, comm.rank, []
    comm.send(np.full(20_000, me, np.uint8), (me + 1) % n)
    for bad in range(n):
        try:
            comm.all_reduce("no array" if me == bad else np.ones(4000))
            wrong.append("nothing was raised")
        except (pycoll.PeerRejected, pycoll.ArgumentError):
            pass
    found = np.empty(20_000, np.uint8)
    comm.recv(found, (me - 1) % n)
    wrong += [] if (found == (me - 1) % n).all() else ["the message"]
    return wrong


def given_up_and_changed(comm):
    """Give up a send and change the array: the receiver comes later and gets nothing of it."""
    wrong = []
    for _ in range(5):
        twin = comm.dup()
        comm.barrier()
        x = np.full(70_000, 1.0 if comm.rank == 0 else -1.0)
        try:
            if comm.rank == 0:
                twin.send(x, 1, timeout=0.003)
            elif comm.rank == 1:
                time.sleep(0.02)
                twin.recv(x, 0)
            if comm.rank < 2:
                wrong.append(f"no error, and {set(x.tolist())}")
        except (pycoll.CollTimeout, pycoll.Revoked):
            x[:] = 2
        comm.barrier()
        twin.close()
    return wrong


ALL = (refused_then_large, received_late, refused_behind_mail, given_up_and_changed)
