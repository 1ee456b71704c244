"""Measure calls of 256 bytes, kind by kind: which reach the engine without Python code, which not.

``python benchmarks/calls.py [-n 2]`` takes some seconds and prints a table; with PyTorch it has
rows for tensors. ``--save`` writes benchmarks/results/calls.md and .json as well. Ranks share
nothing but the cores: where others use those, or the two are far apart, every row grows alike.
"""

import importlib.util
import time

import numpy as np
from harness import pages, start
from harness.ranks import batches, there_and_back

COUNT = 64
REGISTERED = 16 << 10  # bytes: smaller ones may have no whole page, which cannot be moved


def arrays(comm):
    """Return rows about NumPy arrays: what a call is, and the call."""
    n, rank = comm.world_size, comm.rank
    x, out = np.ones(COUNT, np.float32), np.empty(COUNT, np.float32)
    whole = np.ones(n * COUNT, np.float32)
    own = whole[rank * COUNT : (rank + 1) * COUNT]
    gaps, deep = np.ones((COUNT, 2), np.float32)[:, 0], np.ones((2,) * 6, np.float32)
    symmetric, registered = comm.empty(COUNT, np.float32), np.ones(REGISTERED // 4, np.float32)
    symmetric[:] = 1
    comm.register(registered)
    sizes = [COUNT] * n
    persistent = comm.plan("all_reduce", x, out=out, persistent=True)
    return {
        "barrier": lambda: comm.barrier(),
        "all_reduce, a new result": lambda: comm.all_reduce(x),
        "all_reduce, `out=`": lambda: comm.all_reduce(x, out=out),
        "all_reduce, a persistent plan": lambda: persistent(),
        "all_reduce, `timeout=5`": lambda: comm.all_reduce(x, out=out, timeout=5),
        "all_reduce, `async_op`, and wait": lambda: comm.all_reduce(x, async_op=True).wait(),
        "all_reduce, an algorithm by name": lambda: comm.all_reduce(x, algorithm="ring"),
        "all_reduce, an input with gaps": lambda: comm.all_reduce(gaps, out=out),
        "all_reduce, six dimensions": lambda: comm.all_reduce(deep, out=deep),
        "all_reduce, symmetric memory": lambda: comm.all_reduce(symmetric, out=symmetric),
        "all_reduce, a registered array": lambda: comm.all_reduce(registered, out=registered),
        "all_reduce, a NumPy scalar": lambda: comm.all_reduce(x[0]),
        "all_reduce, bytes": lambda: comm.all_reduce(b"12345678", "max"),
        "broadcast, in place": lambda: comm.broadcast(x),
        "reduce": lambda: comm.reduce(x),
        "all_gather, `out=`": lambda: comm.all_gather(x, out=whole),
        "all_gather, in place": lambda: comm.all_gather(own, out=whole),
        "reduce_scatter, `out=`": lambda: comm.reduce_scatter(whole, out=out),
        "reduce_scatter, in place": lambda: comm.reduce_scatter(whole, out=own),
        "gather": lambda: comm.gather(x),
        "scatter": lambda: comm.scatter(whole),
        "all_to_all": lambda: comm.all_to_all(whole),
        "all_gather_v": lambda: comm.all_gather_v(x),
        "all_to_all_v": lambda: comm.all_to_all_v(whole, sizes),
        "send and recv, there and back": lambda: there_and_back(comm, x, out),
        "check": lambda: comm.check(),
    }


def tensors(comm):
    if importlib.util.find_spec("torch") is None:
        return {}
    import torch

    x, out = torch.ones(COUNT), torch.empty(COUNT)
    gaps = torch.ones(COUNT, 2)[:, 0]
    parameter = torch.nn.Parameter(x, requires_grad=False)
    return {
        "all_reduce of tensors, a new result": lambda: comm.all_reduce(x),
        "all_reduce of tensors, `out=`": lambda: comm.all_reduce(x, out=out),
        "all_reduce of tensors, an input with gaps": lambda: comm.all_reduce(gaps, out=out),
        "all_reduce of tensors, a `Parameter`": lambda: comm.all_reduce(parameter, out=out),
    }


def microseconds(comm, call, runs=11):
    """Return the median over runs of the time of a call, on the slowest rank."""
    for _ in range(20):
        call()
    start = time.perf_counter()
    for _ in range(20):
        call()
    calls = int(comm.all_reduce(np.array(max(5, 5e-3 * 20 / (time.perf_counter() - start))), "min"))
    return float(np.median(batches(comm, call, calls, runs))) * 1e6


def rank(comm):
    """Return the microseconds of every kind of call."""
    rows = arrays(comm) | tensors(comm)
    return {name: microseconds(comm, call) for name, call in rows.items()}


def main():
    parser = pages.arguments(__doc__)
    parser.add_argument("-n", type=int, default=2, help="ranks (2)")
    parser.add_argument("--save", action="store_true", help="write calls.md and .json in results")
    args = parser.parse_args()
    found = start.measure(__file__, args.n)
    lines = pages.table(["call", "us"], [[name, f"{us:.2f}"] for name, us in found.items()])
    if args.save:
        about = f"{args.n} ranks, arrays of {4 * COUNT} bytes, a registered one of {REGISTERED}."
        pages.write("calls", "Calls of a few bytes", about, lines, us=found)
    else:
        print("\n".join(lines))


if __name__ == "__main__":
    start.main(main, rank)
