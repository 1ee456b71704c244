"""More ranks than cores beside the least that they do: ``python benchmarks/crowd.py``.

Ranks that share a core can only take turns on it, so a small call costs what it takes the kernel to
go from process to process, as often as ranks have to. The least is a barrier by hand, in which a
rank raises a flag and yields until it sees those of all others: in a loop in C, and called from
Python, whose code and data the caches lose with every switch. Sums in place stand beside the same
by hand: in memory that all ranks map, and staged, in the segments that suit it best. All take turns
in the same processes. Takes two minutes; writes results/crowd.md and .json.
"""

import resource
import statistics

import numpy as np
from harness import pages, start
from harness.ranks import SEGMENTS, ByHand, batches, contest

from pycoll.cli.common.text import sized

WORLDS = (2, 4, 8)
SIZES = (8 << 10, 64 << 10, 512 << 10, 1 << 20, 4 << 20)
ROUNDS, TURN_S = 31, 0.02


class Crowd(ByHand):
    """The functions of native/limit_crowd.cpp."""

    def place(self, comm, count):
        """Return the first elements of this rank's place in the memory of all."""
        return self.array(self.shared_bytes(comm.rank), count)


def barriers(comm, crowd):
    """Return {what: (function, calls in it)} of calls that move next to nothing."""
    x, shared = np.zeros(2, np.float32), comm.zeros(2, np.float32)
    return {
        "barriers by hand, in C": (crowd.function("crowd_barriers", 20), 20),
        "barrier by hand, from Python": (crowd.function("crowd_barriers", 1), 1),
        "barrier": (comm.barrier, 1),
        "all_reduce of 8 B": (lambda: comm.all_reduce(x, out=x), 1),
        "all_reduce of 8 B, symmetric": (lambda: comm.all_reduce(shared, out=shared), 1),
    }


def sums(comm, crowd, nbytes):
    """Return {what: (function, 1)} of an all_reduce in place."""
    count = nbytes // 4
    x, shared = np.zeros(count, np.float32), comm.zeros(count, np.float32)
    ways = {
        "ordinary": lambda: comm.all_reduce(x, out=x),
        "symmetric": lambda: comm.all_reduce(shared, out=shared),
        "symmetric by hand": crowd.function("crowd_symmetric_sum", count),
    }
    for segment in (s for s in SEGMENTS if s <= max(nbytes, SEGMENTS[0])):
        ways[f"staged {segment}"] = crowd.function("crowd_staged_sum", x, count, segment // 4)
    return {name: (call, 1) for name, call in ways.items()}


def verify(comm, crowd):
    """Stop if what is done by hand is not right."""
    count, wanted = 300_001, sum(range(1, comm.world_size + 1))
    shared, x = crowd.place(comm, count), np.empty(count, np.float32)
    for segment in SEGMENTS:
        x[:] = comm.rank + 1
        crowd.function("crowd_staged_sum", x, count, segment // 4)()
        comm.barrier()
        shared[:] = comm.rank + 1
        comm.barrier()
        crowd.function("crowd_symmetric_sum", count)()
        if (x != wanted).any() or (shared != wanted).any():
            raise SystemExit("what is done by hand is wrong")
        comm.barrier()
    crowd.place(comm, max(SIZES) // 4)[:] = 0


def switches():
    """Return how often this process has given its core to another one."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_nvcsw + used.ru_nivcsw


def measure(comm, ways):
    """Return {what: microseconds and switches of each round} of a call."""
    once = {name: float(batches(comm, call, 10, 3).min()) for name, (call, _) in ways.items()}
    turns = {name: (ways[name][0], max(8, int(TURN_S / once[name]))) for name in ways}
    found = contest(comm, turns, ROUNDS, switches)
    return {
        name: {
            "us": [s / inside * 1e6 for s in found[name]["seconds"]],
            "switches": [s / inside for s in found[name]["observed"]],
        }
        for name, (_, inside) in ways.items()
    }


def rank(comm, library):
    """Return what was found about barriers and about sums of all sizes."""
    crowd = Crowd(comm, library)
    verify(comm, crowd)
    found = {"barriers": measure(comm, barriers(comm, crowd))}
    for nbytes in SIZES:
        with comm.dup() as own:  # what it finds out about other sizes does not count
            found[nbytes] = measure(own, sums(own, crowd, nbytes))
    return found


def spread(values):
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:.1f} ({low:.1f}-{high:.1f})"


def small(found):
    """Return the lines of the table of calls that move next to nothing."""
    for name in next(iter(found.values()))["barriers"]:
        cells = [name]
        for table in found.values():
            rounds = table["barriers"][name]
            cells += [spread(rounds["us"]), f"{statistics.median(rounds['switches']):.2f}"]
        yield cells


def best(table, ours, theirs):
    """Return how long the best by hand takes as a part of our time, as text."""
    own = table[ours]["us"]
    by_hand = [rounds["us"] for name, rounds in table.items() if name.startswith(theirs)]
    return f"{min(pages.ratio(times, own) for times in by_hand):.2f}"


def large(found):
    for n, tables in found.items():
        for nbytes in map(str, SIZES):
            table = tables[nbytes]
            cells = [str(n), sized(int(nbytes)), spread(table["symmetric"]["us"])]
            cells += [best(table, "symmetric", "symmetric by hand")]
            yield [*cells, spread(table["ordinary"]["us"]), best(table, "ordinary", "staged")]


def main():
    args = pages.arguments(__doc__, "crowd").parse_args()
    by_hand = {"source": "limit_crowd.cpp", "flags": ["-march=native"]}
    found = {n: start.measure(__file__, n, **by_hand) for n in WORLDS}
    about = (
        "Microseconds a call on the slowest rank: median of the rounds, and their middle half. "
        "Switches: how often rank 0 gives its core to another process in a call. x: the time by "
        "hand as a part of pycoll's, the median of rounds that took all in turn; above 1, pycoll "
        "is faster. Sums are of float32, in place, of the same array again."
    )
    head = ["what", *(f"{n} ranks {what}" for n in found for what in ("us", "switches"))]
    lines = ["## Next to nothing", "", *pages.table(head, small(found)), "", "## Sums", ""]
    head = ["ranks", "size", "symmetric us", "by hand: x", "ordinary us", "staged by hand: x"]
    lines += pages.table(head, large(found))
    pages.write(args.name, "More ranks than cores", about, lines, ranks=found)


if __name__ == "__main__":
    start.main(main, rank)
