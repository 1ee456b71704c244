"""Moves of virtual ranks: by kernels, by copies on the stream, in packets; and messages.

Times are those of launches inside a CUDA graph. Bytes are those that all ranks read and write.
"""

import model
import numpy as np
from common import MIB, open_stage, ramps, seconds_of

import pycoll
from pycoll.cuda.device.library import BEST, COPIES, INTERPRET, LOW_LATENCY
from pycoll.errors import CollError

WORLDS = (2, 4, 8)
SIZES = (1, 64, 256)  # MiB of the result of a rank
WAYS = {
    "all_gather": [("direct_push", BEST), ("direct_pull", BEST), ("direct_pull", COPIES)],
    "broadcast": [("direct", BEST), ("direct", COPIES)],
}
# Copies that may go in packets, by bytes from one rank to one other.
SMALL = {"all_gather": "direct_push", "all_to_all": "direct", "broadcast": "direct"}
SMALL_BYTES = (8, 512, 4 << 10, 16 << 10, 32 << 10)


def measure(writer, cupy, ranks, collective, algorithm, method, nbytes):
    """Check and time one way; a row."""
    n = ranks.world_size
    whole = collective == "all_gather"
    made = "copies" if method == COPIES else "kernel"
    facts = {"n": n, "nbytes": nbytes, "collective": collective, "algorithm": algorithm}
    facts |= {"made_by": made, "seconds": None}
    x, _ = ramps(cupy, n, nbytes // 4 // (n if whole else 1))
    out = cupy.empty((n, nbytes // 4), cupy.float32)
    launch = ranks.bind(collective, x, out=out, algorithm=algorithm)
    try:
        seconds = seconds_of(cupy, lambda stream: launch(5, stream=stream, method=method), 5)
        out.fill(np.nan)
        launch(5, method=method)
        ranks.synchronize(10)
    except CollError as error:
        writer.row("move", False, **facts, error=str(error))
        return
    right = bool((out == (x.reshape(-1) if whole else x[0])).all())
    facts |= {"seconds": seconds, "tb_s": 2 * n * nbytes / seconds / 1e12}
    writer.row("move", right, **facts)


def shift(writer, cupy, ranks, nbytes):
    """Check and time a message of every rank to the next one; a row."""
    n = ranks.world_size
    facts = {"n": n, "nbytes": nbytes, "collective": "sendrecv", "algorithm": "to the next rank"}
    facts |= {"made_by": "kernel", "seconds": None}
    x, _ = ramps(cupy, n, nbytes // 4)
    out, dsts = cupy.empty((n, nbytes // 4), cupy.float32), [(rank + 1) % n for rank in range(n)]

    def body(stream):
        ranks.sendrecv(list(x), dsts, out=list(out), stream=stream, timeout=5)

    try:
        seconds = seconds_of(cupy, body, 5)
        out.fill(np.nan)
        body(None)
        ranks.synchronize(10)
    except CollError as error:
        writer.row("move", False, **facts, error=str(error))
        return
    right = all(bool((out[dst] == x[rank]).all()) for rank, dst in enumerate(dsts))
    facts |= {"seconds": seconds, "tb_s": 2 * n * nbytes / seconds / 1e12}
    writer.row("move", right, **facts)


def is_moved(out, x, collective):
    """Whether every rank has what the collective gives it of the ranks' vectors."""
    if collective == "all_to_all":
        got, given = (array.reshape(len(x), len(x), -1) for array in (out, x))
        return all(bool((got[:, rank] == given[rank]).all()) for rank in range(len(x)))
    return bool((out == (x.reshape(-1) if collective == "all_gather" else x[0])).all())


def small(writer, cupy, ranks, collective, sent):
    """Check and time a small call as its plan says, and in packets; a row for both."""
    n = ranks.world_size
    x, _ = ramps(cupy, n, sent // 4 * (n if collective == "all_to_all" else 1))
    out = cupy.empty((n, sent // 4 * (1 if collective == "broadcast" else n)), cupy.float32)
    facts = {"n": n, "nbytes": sent, "collective": collective, "right": True}
    senders = 1 if collective == "broadcast" else n
    facts["predicted"] = model.packets_seconds(n, sent, senders)
    launch = ranks.bind(collective, x, out=out, algorithm=SMALL[collective])
    for way, method in (("interpreted", INTERPRET), ("packets", LOW_LATENCY)):
        try:
            facts[way] = seconds_of(cupy, lambda s, m=method: launch(5, stream=s, method=m), 20)
            out.fill(np.nan)
            launch(5, method=method)
            ranks.synchronize(10)
        except CollError as error:
            writer.row("small move", False, **facts, error=str(error))
            return
        facts["right"] &= is_moved(out, x, collective)
    writer.row("small move", None if facts["right"] else False, **facts)


def main():
    writer, cupy = open_stage()
    for n in WORLDS:
        for collective in SMALL:
            with pycoll.virtual_ranks(n) as ranks:
                for sent in SMALL_BYTES:
                    small(writer, cupy, ranks, collective, sent)
        for size in SIZES:
            for collective, ways in WAYS.items():
                for algorithm, method in ways:
                    with pycoll.virtual_ranks(n) as ranks:
                        measure(writer, cupy, ranks, collective, algorithm, method, size * MIB)
            with pycoll.virtual_ranks(n) as ranks:
                shift(writer, cupy, ranks, size * MIB)


if __name__ == "__main__":
    main()
