"""What it costs to compile one rank's plan, of every algorithm that the selector may choose.

    python benchmarks/plans.py 1024 4096

For each number of ranks the selector is asked about every collective, reduction order, place of
arrays and size. Of what it chooses, the plans of a few ranks are compiled: printed are the least
processor time of some tries, of the slowest rank, and the most memory that one takes for a while.
All cases take turns, so that a busy neighbour does not meet all tries of one.
What takes longer or more than `BARS` allow is marked, and makes the script fail.
"""

import itertools
import time
import tracemalloc

from harness import pages

from pycoll.runtime.selection.select import select, working_dtype
from pycoll.schedule.language.collectives import COLLECTIVES
from pycoll.schedule.lowering.compile import peer_plan
from pycoll.schedule.lowering.messages import message_plan
from pycoll.types import DType, ReduceOp

BARS = {1024: (10e-3, 2 << 20), 4096: (50e-3, 8 << 20)}  # seconds, bytes
SIZES = [1 << power for power in range(2, 34, 2)]
PLACES = (
    {},
    {"crowded": True},
    {"direct": True},
    {"input_only": True},
    {"messages": True},
    {"messages": True, "one_host": True},
)
TRIES = 7


def chosen(n, dtypes):
    """Return the schedules that calls get, with the way they are compiled, each once."""
    found = {}
    for name, spec in COLLECTIVES.items():
        orders = ("tree", "rank", "any") if spec.reduces else (None,)
        types = dtypes if spec.reduces else dtypes[:1]
        for order, dtype, place, nbytes in itertools.product(orders, types, PLACES, SIZES):
            if spec.reduces:
                wide = working_dtype(name, n, dtype, ReduceOp.SUM, order)
                nbytes, dtype = nbytes * wide.itemsize // dtype.itemsize, wide
            choice = select(name, nbytes, n, order=order, dtype=dtype, **place)
            way = "messages" if place.get("messages") else "direct" if choice.direct else "staged"
            params = tuple(sorted(choice.params.items()))
            found[name, choice.name, params, way] = choice
    for (name, algorithm, _, way), choice in found.items():
        for root in (0, n // 2) if COLLECTIVES[name].rooted else (None,):
            params = choice.params | ({} if root is None else {"root": root})
            yield f"{name}/{algorithm}", way, choice.algorithm, params


def compile_one(algorithm, n, params, rank, way):
    """Compile a plan as the first call of a program does."""
    schedule = algorithm.schedule(n, **params)
    if way == "messages":
        return message_plan(schedule, rank)
    return peer_plan(schedule, rank, direct=way == "direct")


def seconds_of(case):
    """Return the processor time that a plan takes."""
    start = time.process_time()
    compile_one(*case)
    return time.process_time() - start


def bytes_of(case):
    """Return the most memory that a plan takes at a time."""
    tracemalloc.start()
    compile_one(*case)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


def spent(n, dtypes):
    """Return seconds and bytes by algorithm and kind of plan, of the rank that needs the most."""
    cases = [
        ((name, way), (algorithm, n, params, rank, way))
        for name, way, algorithm, params in chosen(n, dtypes)
        for rank in (0, 1, n // 2 - 1, n // 2, n - 1)
    ]
    turns = [[seconds_of(case) for _, case in cases] for _ in range(TRIES)]
    most = {}
    for (label, case), *seconds in zip(cases, *turns, strict=True):
        both = min(seconds), bytes_of(case)
        most[label] = tuple(map(max, both, most.get(label, both)))
    return most


def main():
    parser = pages.arguments(__doc__)
    parser.add_argument("ranks", type=int, nargs="*", default=list(BARS))
    parser.add_argument("--dtypes", nargs="+", default=["float32", "float16"])
    args = parser.parse_args()
    dtypes = [DType[name.upper()] for name in args.dtypes]
    missed = 0
    for n in args.ranks:
        most = spent(n, dtypes)
        seconds, nbytes = BARS.get(n, (float("inf"), float("inf")))
        rows = []
        for (name, way), (took, peak) in most.items():
            misses = "missed" * (took > seconds or peak > nbytes)
            missed += bool(misses)
            rows.append([name, way, f"{took * 1e3:.1f} ms", f"{peak / 2**20:.2f} MiB", misses])
        head = ["algorithm", "plan", "time", "memory", ""]
        print(f"\n{n} ranks\n", *pages.table(head, rows), sep="\n", flush=True)
    raise SystemExit(bool(missed))


if __name__ == "__main__":
    main()
