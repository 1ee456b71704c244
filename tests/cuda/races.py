"""Runs device code on threads under the thread sanitizer: races.py LIBRARY [broken].

With "broken" a rank does not wait for what its peers do, which the sanitizer must report.
"""

import sys
from ctypes import c_uint64, c_void_p
from dataclasses import replace

import numpy as np

from device_library import BEST, DIRECT, INTERPRET, Library, World, norm_of, plans_of, spec_of
from pycoll.algorithms import ALGORITHMS
from pycoll.schedule.lowering.plan import ENTERED, Opcode
from pycoll.types import DType


def run(library, entry, n, peers, direct, broken):
    plans = plans_of(entry, n, direct=direct)
    if broken:
        code = plans[1].code
        waits = (code["op"] == Opcode.WAIT) & (code["arg"] > ENTERED)
        plans[1] = replace(plans[1], code=code[~waits])
    count = 96
    with World(library, n, peers=peers, cell_bytes=512) as world:
        handles = world.call([spec_of(plan, "float32", count=count) for plan in plans])
        ins = [np.full(count, rank + 1, np.float32) for rank in range(n)]
        outs = [np.zeros(count, np.float32) for _ in range(n)]
        forms = [(2, BEST), (1, BEST)]
        kernel = world.info(handles[0]).kernel
        if kernel.startswith(b"low_latency"):
            other = INTERPRET if kernel.endswith(b" move") else DIRECT
            forms = [(2, BEST), (2, other), (1, BEST), (1, BEST), (1, other)]
        for blocks, method in forms:
            world.launch(handles, ins, outs, blocks=blocks, method=method, timeout_ms=60_000)
        world.synchronize()
        assert world.failed() == []
        if entry.collective == "all_reduce" and not broken:
            assert all(np.all(out == n * (n + 1) / 2) for out in outs), entry.name


def add_squares(library):
    """Lanes add their columns together, and their sums to those of other blocks."""
    x, tally = np.ones(20_000, np.float64), np.zeros(71, np.uint64)
    at = [c_void_p(array.ctypes.data) for array in (x, tally)]
    library.optim_add_squares(DType.FLOAT64, at[0], c_uint64(x.size), at[1], None)
    assert tally[36] == x.size  # of 70 limbs, that of the units


def normalise(library):
    """Blocks add squares in memory of their own, and write rows of all ranks."""
    n, rows = 3, np.ones((5, 40), np.float32)
    with World(library, n) as world:
        for push in (False, True):
            ins, more = ([rows.copy() for _ in range(n)] for _ in range(2))
            outs = ins if push else [np.zeros_like(rows) for _ in range(n)]
            world.rms_norm(norm_of(ins, rows[0], more, outs, more, push=push), timeout_ms=60_000)
            world.synchronize()
            assert world.failed() == []
            assert all(np.all(array == n + 1) for array in more)


def send(library, slotted):
    """Messages of several parts, with places that are used again."""
    n, count = 2, 70
    with World(library, n, peers=True) as world:
        kept, number = [], 0
        for i in range(count):
            x, y = np.full(200, i, np.uint8), np.zeros(200, np.uint8)
            form = {"slotted": slotted, "timeout_ms": 60_000}
            world.message("send", 0, 1, number, x, awaits=i % 2 == 0, **form)
            world.message("receive", 1, 0, number, y, source=None if slotted else x, **form)
            kept.append((x, y))
            number += world.parts(x.nbytes, slotted)
        world.synchronize()
        assert world.failed() == []
        assert all(np.array_equal(x, y) for x, y in kept)


def main():
    library = Library(sys.argv[1])
    library.schedule(-1)
    broken = "broken" in sys.argv
    names = "ring circulant halving_doubling two_shot_push one_shot bruck direct_push pairwise"
    chosen = [e for e in ALGORITHMS if e.name in (*names.split(), "push_pull")]
    for i, entry in enumerate(chosen if not broken else [chosen[0]]):
        run(library, entry, 3, i % 2 == 0, i % 3 > 0 or broken, broken)
    add_squares(library)
    normalise(library)
    for slotted in (False, True):
        send(library, slotted)
    sys.stdout.write("done\n")


if __name__ == "__main__":
    main()
