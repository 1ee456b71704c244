"""One rank of one contestant: measures a cell whenever it is asked to, and checks the result.

``python rank.py FOLDER``; started by ``launch.py`` with the launcher of the contestant. A cell's
number is the median over blocks of calls, made back to back, on the slowest rank.
"""

import itertools
import json
import math
import os
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))
from contestants import CONTESTANTS, Unavailable, numpy_dtype

BLOCK_S = 40e-6  # a block of calls takes at least this long
POOL_BYTES = 96 << 20  # rotating buffers: more than the last cache holds
MAX_SLOTS = 512
PARTS = 8  # of the blocks of a cell
WARM = 8  # calls before ranks agree whether there is time for more
SETTLED = 32  # calls until who tries several ways has found the fastest; and each array is used
PATIENCE = 5  # budgets that a cell may take
SLOW_S = 0.1  # a call that takes longer is made twice, and that is all


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
        self._pairs = [self._pair(pool, same) for _ in range(slots)]
        self._calls = [contestant.bind(self._name, *pair) for pair in self._pairs]

    def _pair(self, pool, same):
        """Return an input and a result, in the same memory or not."""
        count, rank = self._sizes[0], self._lib.rank
        if same and self._name == "all_gather":
            out = pool.take(self._sizes[1])
            return out[rank * count : (rank + 1) * count], out
        x = pool.take(count)
        return x, x if same else pool.take(self._sizes[1])

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
        return 0 if want is None else int((lib.host(out).astype(np.float32) != want).sum())

    def fill(self):
        """Fill all arrays so that sums stay finite, however often they are made."""
        lib = self._lib
        for x, out in self._pairs:
            lib.host(out)[:] = 0
            lib.host(x)[:] = (1, -1)[lib.rank] if lib.rank < 2 else 0

    def measure(self, budget_s):
        """Return seconds a call, block by block, on this rank."""
        slots, turns = len(self._calls), itertools.cycle(self._calls)

        def block(length):
            begin = time.perf_counter()
            for call in itertools.islice(turns, length):
                call()
            return time.perf_counter() - begin

        first = block(1)
        if self._lib.agree(int(first > SLOW_S)):
            return np.array([first, block(1)])
        end = time.perf_counter() + PATIENCE * budget_s
        for _ in range(-(-max(slots, SETTLED) // WARM)):  # and a page costs when it is first used
            block(WARM)
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


def pool_bytes(cells):
    """Return the bytes that the arrays of the largest of these cells take."""
    largest = max(cell["bytes"] for cell in cells)
    if any(cell["rotating"] for cell in cells):
        return max(4 * largest, 2 * POOL_BYTES) + (8 << 20)
    return 2 * largest + (8 << 20)


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
    """Measure what the pipe of this rank asks for, until it ends."""
    folder = Path(sys.argv[1])
    job = json.loads((folder / "job.json").read_text())
    # Neither may wait for a driver that has gone.
    answers = os.fdopen(os.open(folder / "answers", os.O_RDWR), "w", buffering=1)
    try:
        lib = CONTESTANTS[job["contestant"]].make(job["dtype"])
    except (Unavailable, ImportError) as error:
        answers.write(json.dumps({"skipped": str(error)}) + "\n")
        return
    budget_s = job["budget_s"] * lib.world_size / 2  # many ranks take longer to settle on few cores
    pool, checked = Pool(lib, job["dtype"], pool_bytes(job["cells"])), set()
    lib.meet()
    if lib.rank == 0:
        answers.write("{}\n")
    pipe = os.open(folder / f"orders.{lib.rank}", os.O_RDONLY | os.O_NONBLOCK)
    os.set_blocking(pipe, True)
    with os.fdopen(pipe) as orders:
        for line in orders:
            cell, wrong = json.loads(line), 0
            lib.meet()
            pool.reset()
            found = Cell(lib, cell, job["dtype"], pool)
            if lib.collects and line not in checked:
                wrong = found.check()
                checked.add(line)
            found.fill()
            rows = lib.gather([np.median(found.measure(budget_s)), wrong])
            if lib.rank == 0:
                answer = {"median_us": rows[:, 0].max() * 1e6, "wrong": int(rows[:, 1].sum())}
                answers.write(json.dumps(answer) + "\n")
    lib.meet()


if __name__ == "__main__":
    main()
