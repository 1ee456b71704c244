"""One rank of one contestant: measures the cells of a job, and checks their results.

``python rank.py JOB.json RESULT.jsonl``; started by ``run.py`` with the launcher of the contestant.
A cell's number is the median over blocks of calls, made back to back, on the slowest rank.
"""

import itertools
import json
import math
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))
from apart import Apart, is_usual
from contestants import CONTESTANTS, Unavailable, numpy_dtype

BLOCK_S = 40e-6  # a block of calls takes at least this long
POOL_BYTES = 96 << 20  # rotating buffers: more than the last cache holds
MAX_SLOTS = 512
PARTS = 8  # of the blocks of a cell
WARM = 16  # calls before ranks agree whether there is time for more, until each array was used
PATIENCE = 5  # budgets that a cell may take
TRIES = 4  # of a cell, until the cores were as far apart as usual


def block_count(collective, total, world_size):
    """Return elements of input and output of one rank; `total` elements are the full vector."""
    part = max(1, total // world_size)
    return {
        "all_gather": (part, part * world_size),
        "reduce_scatter": (part * world_size, part),
        "all_to_all": (part * world_size, part * world_size),
    }.get(collective, (total, total))


def pattern(rank, count):
    """Return small integers, which every dtype holds exactly, and so does the sum of eight."""
    return np.resize(np.float32((np.arange(13) * 7 + rank * 3) % 13 - 5), count)


def expected(collective, rank, world_size, sizes):
    """Return what a collective leaves in the output of this rank, or None if that is not said."""
    n_in = sizes[0]
    inputs = [pattern(r, n_in) for r in range(world_size)]
    if collective == "all_reduce":
        return sum(inputs)
    if collective == "broadcast":
        return inputs[0]
    if collective == "reduce":
        return sum(inputs) if rank == 0 else None
    if collective == "all_gather":
        return np.concatenate(inputs)
    mine = slice(rank * (n_in // world_size), (rank + 1) * (n_in // world_size))
    if collective == "reduce_scatter":
        return sum(inputs)[mine]
    return np.concatenate([x[mine] for x in inputs])


class Cell:
    """One collective at one size, on one array or on many in turn."""

    def __init__(self, contestant, cell, dtype, pool):
        self._lib, self._name = contestant, cell["collective"]
        total = max(1, cell["bytes"] // numpy_dtype(dtype).itemsize)
        self._sizes = block_count(self._name, total, contestant.world_size)
        slots = 1
        if cell["rotating"]:
            slots = min(MAX_SLOTS, max(2, math.ceil(POOL_BYTES / cell["bytes"])))
        same = cell["in_place"] or self._name == "broadcast"
        self._pairs = []
        for _ in range(slots):
            x = pool.take(self._sizes[0])
            self._pairs.append((x, x if same else pool.take(self._sizes[1])))
        self._calls = [contestant.bind(self._name, *pair) for pair in self._pairs]

    def check(self):
        """Make one call on the pattern; return the number of wrong elements on this rank."""
        x, out = self._pairs[-1]
        lib = self._lib
        want = expected(self._name, lib.rank, lib.world_size, self._sizes)
        if self._name != "broadcast":
            lib.host(x)[:] = pattern(lib.rank, self._sizes[0])
        else:
            lib.host(x)[:] = pattern(0, self._sizes[0]) if lib.rank == 0 else 0
        self._calls[-1]()
        wrong = 0 if want is None else int((lib.host(out).astype(np.float32) != want).sum())
        for x, out in self._pairs:  # afterwards sums must stay finite, however often they are made
            lib.host(out)[:] = 0
            lib.host(x)[:] = (1, -1)[lib.rank] if lib.rank < 2 else 0
        return wrong

    def measure(self, budget_s):
        """Return seconds a call, block by block, on this rank."""
        slots, turns = len(self._calls), itertools.cycle(self._calls)

        def block(length):
            begin = time.perf_counter()
            for call in itertools.islice(turns, length):
                call()
            return time.perf_counter() - begin

        end = time.perf_counter() + PATIENCE * budget_s
        for _ in range(-(-slots // WARM)):  # a process pays once for every page that it maps
            block(min(slots, WARM))
            if self._lib.agree(int(time.perf_counter() > end)):
                break
        block(3)
        one = min(block(1), block(2) / 2)
        length = self._lib.agree(max(1, math.ceil(BLOCK_S / one)))
        one = block(length) / length
        blocks = self._lib.agree(int(min(400, max(5, budget_s / (one * length)))))
        self._lib.meet()
        times, end = [], time.perf_counter() + PATIENCE * budget_s
        for _ in range(PARTS):  # a rank that loses its core makes a first guess of `blocks` wrong
            times += [block(length) for _ in range(-(-blocks // PARTS))]
            if self._lib.agree(int(time.perf_counter() > end)):
                break
        return np.array(times) / length


class Usual:
    """Lets a cell be measured again until the two cores were as far apart as usual all the time."""

    def __init__(self, lib, job):
        self._lib = lib
        self._apart = Apart(*job["apart"], lib.rank) if job["apart"] else None
        self._usual_ns = job["usual_ns"]

    def _distance(self):
        if self._apart is None:
            return 0.0
        self._lib.meet()
        return self._apart.ns()

    def measure(self, cell, budget_s):
        """Return seconds a call, block by block, on this rank, and the cores' distance in ns."""
        before = self._distance()
        for tries in range(1, TRIES + 1):
            times = cell.measure(budget_s)
            after = self._distance()
            odd = [ns for ns in (before, after) if not is_usual(ns, self._usual_ns)]
            if self._lib.agree(int(not odd or tries == TRIES)):
                break
            before = after
        return times, odd[0] if odd else after


class Pool:
    """Memory for one cell after the other."""

    def __init__(self, contestant, dtype, nbytes):
        self._all = contestant.make(nbytes // numpy_dtype(dtype).itemsize)
        contestant.host(self._all)[:] = 0  # touched by its owner
        self._line = 64 // numpy_dtype(dtype).itemsize
        self.reset()

    def reset(self):
        self._used = 0

    def take(self, count):
        start = self._used
        # A few lines between arrays, so that they do not all fall into the same sets of a cache.
        self._used += -(-count // self._line) * self._line + 5 * self._line
        return self._all[start : start + count]


def main():
    """Run a job."""
    job = json.loads(Path(sys.argv[1]).read_text())
    with open(sys.argv[2], "a", encoding="utf-8") as out:
        try:
            lib = CONTESTANTS[job["contestant"]](job["dtype"])
        except (Unavailable, ImportError) as error:
            out.write(json.dumps({"skipped": str(error)}) + "\n")
            return
        largest = max(cell["bytes"] for cell in job["cells"])
        usual = Usual(lib, job)
        pool = Pool(lib, job["dtype"], max(2 * POOL_BYTES, 4 * largest) + (8 << 20))
        for cell in job["cells"]:
            pool.reset()
            found = Cell(lib, cell, job["dtype"], pool)
            wrong = found.check()
            times, apart_ns = usual.measure(found, job["budget_s"])
            rows = lib.gather([np.median(times), times.min(), wrong, apart_ns])
            if lib.rank == 0:
                numbers = {"median_us": rows[:, 0].max() * 1e6, "best_us": rows[:, 1].max() * 1e6}
                numbers |= {"wrong": int(rows[:, 2].sum()), "apart_ns": rows[0, 3]}
                out.write(json.dumps({**cell, **numbers}) + "\n")
                out.flush()
        lib.meet()


if __name__ == "__main__":
    main()
