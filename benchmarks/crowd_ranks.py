"""What the ranks of benchmarks/crowd.py do.

``pycoll run -n N benchmarks/crowd_ranks.py FILE LIBRARY``
"""

import ctypes
import functools
import json
import resource
import sys
from pathlib import Path

import numpy as np

import pycoll

sys.path.insert(0, str(Path(__file__).resolve().parent))
from overhead_ranks import batches, shared_map

SIZES = (8 << 10, 64 << 10, 512 << 10, 1 << 20, 4 << 20)
SEGMENTS = (64 << 10, 128 << 10, 256 << 10, 512 << 10, 1 << 20)
PITCH = 4 << 20  # bytes of a rank's place in the shared memory
ROUNDS, BATCH_US, WARM = 31, 20_000, 4


class Crowd(ctypes.Structure):
    """The ranks as limit_crowd.cpp sees them."""

    _fields_ = [
        ("memory", ctypes.c_void_p),
        *[(name, ctypes.c_size_t) for name in ("rank", "ranks", "pitch")],
        ("turn", ctypes.POINTER(ctypes.c_uint64)),
    ]


class ByHand:
    """The functions of limit_crowd.cpp on memory that all ranks map."""

    def __init__(self, comm, library):
        self._library = ctypes.CDLL(library)
        self._library.crowd_bytes.restype = ctypes.c_size_t
        self._memory = np.frombuffer(shared_map(comm, self._end(comm.world_size)), np.uint8)
        turn = ctypes.pointer(ctypes.c_uint64(0))
        self._crowd = Crowd(self._memory.ctypes.data, comm.rank, comm.world_size, PITCH, turn)

    def _end(self, ranks):
        """Return where the places of so many ranks end, and the next one begins."""
        return self._library.crowd_bytes(ctypes.c_size_t(ranks), ctypes.c_size_t(PITCH))

    def place(self, count):
        """Return the first elements of this rank's place."""
        start = self._end(self._crowd.rank)
        return self._memory[start : start + 4 * count].view(np.float32)

    def function(self, name, *arguments):
        """Return a function of no argument; arrays are passed by their address."""
        passed = [
            ctypes.c_void_p(a.ctypes.data) if isinstance(a, np.ndarray) else ctypes.c_size_t(a)
            for a in arguments
        ]
        return functools.partial(getattr(self._library, name), self._crowd, *passed)


def barriers(comm, by_hand):
    """Return {what: (function, calls in it)} of calls that move next to nothing."""
    x, shared = np.zeros(2, np.float32), comm.zeros(2, np.float32)
    return {
        "barriers by hand, in C": (by_hand.function("crowd_barriers", 20), 20),
        "barrier by hand, from Python": (by_hand.function("crowd_barriers", 1), 1),
        "barrier": (comm.barrier, 1),
        "all_reduce of 8 B": (lambda: comm.all_reduce(x, out=x), 1),
        "all_reduce of 8 B, symmetric": (lambda: comm.all_reduce(shared, out=shared), 1),
    }


def sums(comm, by_hand, nbytes):
    """Return {what: (function, 1)} of an all_reduce in place."""
    count = nbytes // 4
    x, shared = np.zeros(count, np.float32), comm.zeros(count, np.float32)
    ways = {
        "ordinary": lambda: comm.all_reduce(x, out=x),
        "symmetric": lambda: comm.all_reduce(shared, out=shared),
        "symmetric by hand": by_hand.function("crowd_symmetric_sum", count),
    }
    for segment in (s for s in SEGMENTS if s <= max(nbytes, SEGMENTS[0])):
        ways[f"staged {segment}"] = by_hand.function("crowd_staged_sum", x, count, segment // 4)
    return {name: (call, 1) for name, call in ways.items()}


def verify(comm, by_hand):
    """Stop if what is done by hand is not right."""
    count, wanted = 300_001, sum(range(1, comm.world_size + 1))
    shared, x = by_hand.place(count), np.empty(count, np.float32)
    for segment in SEGMENTS:
        x[:] = comm.rank + 1
        by_hand.function("crowd_staged_sum", x, count, segment // 4)()
        comm.barrier()
        shared[:] = comm.rank + 1
        comm.barrier()
        by_hand.function("crowd_symmetric_sum", count)()
        if (x != wanted).any() or (shared != wanted).any():
            raise SystemExit("what is done by hand is wrong")
        comm.barrier()
    by_hand.place(PITCH // 4)[:] = 0


def switches():
    """Return how often this process has given its core to another one."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_nvcsw + used.ru_nivcsw


def measure(comm, ways):
    """Return {what: microseconds and switches of each round} of a call."""
    found = {name: {"us": [], "switches": []} for name in ways}
    names, shuffle = list(ways), np.random.default_rng(0).shuffle  # the same on all ranks
    once = {name: float(batches(comm, ways[name][0], 10, 3).min()) * 1e6 for name in ways}
    for _ in range(ROUNDS):
        shuffle(names)
        for name in names:
            call, inside = ways[name]
            calls = max(8, int(BATCH_US / once[name]))
            batches(comm, call, calls // WARM, 1)
            before = switches()
            seconds = float(batches(comm, call, calls, 1)[0])
            found[name]["us"].append(seconds / inside * 1e6)
            found[name]["switches"].append((switches() - before) / calls / inside)
    return found


def main():
    path, library = sys.argv[1:]
    with pycoll.init(timeout=60, tuning="off") as comm:
        by_hand = ByHand(comm, library)
        verify(comm, by_hand)
        found = {"barriers": measure(comm, barriers(comm, by_hand))}
        for nbytes in SIZES:
            with comm.dup() as own:  # what it finds out about other sizes does not count
                found[nbytes] = measure(own, sums(own, by_hand, nbytes))
        if comm.rank == 0:
            Path(path).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
