"""Ranks that do not come, and aborts: an error that names the rank, never a hang; then as new."""

import threading
import time
from ctypes import byref

import numpy as np
from common import methods_of, nonsense, open_stage

import pycoll
from pycoll.cuda.device.library import KernelError, library
from pycoll.errors import CollTimeout, Revoked

ALGORITHMS = ("ring", "halving_doubling", "two_shot_push", "two_shot_pull", "circulant", "one_shot")
WAIT_S = 0.05
END_S = 5.0


def waited(ranks):
    """Return how long the kernel of each rank has waited before it gave up, in ns by its clock."""
    record, found = KernelError(), []
    for rank in range(ranks.world_size):
        library().call("group_error", ranks._group, rank, byref(record))
        found.append(record.waited_ns)
    return found


def fault(writer, cupy, ranks, xs, name, absent, method):
    """Leave a rank out; the others have to give up, and work again after a reset."""
    start = time.monotonic()
    launch = ranks.bind("all_reduce", xs, algorithm=name)
    launch(WAIT_S, absent=1 << absent, method=method)
    text = ""
    try:
        ranks.synchronize(END_S)
    except CollTimeout as error:
        text = str(error)
    spent = time.monotonic() - start
    named, waits = f"for rank {absent}" in text, waited(ranks)
    ranks.reset()
    outs = [nonsense(cupy, x) for x in xs]
    got = ranks.all_reduce(xs, out=outs, algorithm=name, timeout=5)
    ranks.synchronize(END_S)
    n = len(xs)
    again = all(bool((g == np.float32(n * (n + 1) // 2)).all()) for g in got)
    facts = {"n": n, "algorithm": name, "absent": absent, "seconds": round(spent, 3)}
    facts["kernel"] = ranks.info(launch, method).kernel.decode()
    facts["waited_ns"] = waits
    writer.row("absent", named and again, named=named, works_again=again, text=text, **facts)


def aborted(writer, ranks, xs):
    """Abort from another thread while ranks wait."""
    threading.Timer(0.2, ranks.abort).start()
    start = time.monotonic()
    ranks.bind("all_reduce", xs, algorithm="ring")(30.0, absent=1)
    text = ""
    try:
        ranks.synchronize(END_S)
    except (Revoked, pycoll.CollError) as error:
        text = str(error)
    writer.row(
        "abort", bool(text), n=len(xs), seconds=round(time.monotonic() - start, 3), text=text
    )
    ranks.reset()


def main():
    writer, cupy = open_stage()
    for n in (2, 4, 8):
        with pycoll.virtual_ranks(n) as ranks:
            xs = [cupy.full(4099, r + 1, cupy.float32) for r in range(n)]
            for name in ALGORITHMS:
                for method in methods_of(ranks, ranks.bind("all_reduce", xs, algorithm=name)):
                    for absent in sorted({0, n // 2, n - 1}):
                        fault(writer, cupy, ranks, xs, name, absent, method)
            aborted(writer, ranks, xs)


if __name__ == "__main__":
    main()
