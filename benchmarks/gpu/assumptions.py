"""What kernels take for granted and only a device can show; see docs/cuda-assumptions.md.

Each row is one assumption, tried so that it shows when it does not hold.
"""

import multiprocessing
import time

import numpy as np
from common import MIB, data, dtypes, graph_of, open_stage, same_bits, to_device

import pycoll
from pycoll.config import Config
from pycoll.testing import run_threads

ALGORITHMS = ("one_shot", "two_shot_push", "two_shot_pull", "ring", "halving_doubling", "circulant")
CHECKS = (
    *("special_values", "unaligned", "reused_memory", "many_epochs", "stress", "many_elements"),
    "beside_another_process",
)
OPS = ("sum", "max", "min", "prod", "avg")
STRESS_S = 10.0
SPECIAL = (np.nan, np.inf, -np.inf, -0.0, 0.0, 1e-45, -1e-45, 1e-38, 65504.0, 3e38, 1.0)


def on_cpu(xs, op="sum", algorithm=None):
    """Return what the engine on the CPU gives."""
    config = Config(timeout_s=30, heap_bytes=1 << 26)

    def rank(comm):
        return comm.all_reduce(xs[comm.rank], op, algorithm=algorithm)

    return run_threads(len(xs), rank, config=config)[0]


def many_elements(writer, cupy):
    """More than 2^31 elements: no index is a 32-bit number."""
    count = (1 << 31) + 5
    for name in ("two_shot_push", "ring"):
        with pycoll.virtual_ranks(2) as ranks:
            x = cupy.empty((2, count), cupy.uint8)
            x[0], x[1] = 1, 2
            places = [0, 1, count // 2, (1 << 31) - 1, 1 << 31, count - 1]
            for place in places:
                x[:, place] = place % 50
            out = cupy.zeros_like(x)
            ranks.all_reduce(x, out=out, algorithm=name, timeout=20)
            ranks.synchronize(30)
            wrong = [p for p in places if out[:, p].get().tolist() != [2 * (p % 50)] * 2]
            rest = int((out != 3).sum()) - 2 * sum(2 * (p % 50) != 3 for p in places)
        writer.row("assumption", not wrong and not rest, what="2^31 elements", algorithm=name)


def special_values(writer, cupy):
    """NaN, infinities, signed zeros and subnormals give what they give on the CPU."""
    for dtype in (d for d in dtypes() if d.kind != "i"):
        with np.errstate(all="ignore"):
            values = np.array(SPECIAL, np.float32).astype(dtype)
        for n in (2, 8):
            rng = np.random.default_rng(n)
            xs = [rng.choice(values, 4099) for _ in range(n)]
            for op in OPS if dtype.itemsize > 1 else ("sum", "avg"):  # there are no others
                with np.errstate(all="ignore"):
                    want = on_cpu(xs, op)
                with pycoll.virtual_ranks(n) as ranks:
                    got = ranks.all_reduce([to_device(cupy, x) for x in xs], op, timeout=5)
                    ranks.synchronize(10)
                    got = got[0].get()
                odd = np.isnan(want.astype(np.float32))
                same = np.array_equal(odd, np.isnan(got.astype(np.float32)))
                same = same and same_bits(got[~odd], want[~odd])
                writer.row("assumption", same, what="special values", dtype=dtype.name, n=n, op=op)


def unaligned(writer, cupy):
    """Arrays that begin anywhere: alike, and each elsewhere."""
    for dtype in dtypes():
        for shifts in ((1, 1, 1, 1), (0, 1, 2, 3), (3, 3, 0, 5)):
            xs = data(4, (5003,), dtype)
            spaces = [to_device(cupy, np.zeros(5003 + 8, dtype)) for _ in range(8)]
            places = [s[k : k + 5003] for s, k in zip(spaces, 2 * shifts, strict=True)]
            for place, x in zip(places, xs, strict=False):
                place[...] = to_device(cupy, x)
            with pycoll.virtual_ranks(4) as ranks:
                good = True
                for name in ALGORITHMS:
                    ranks.all_reduce(places[:4], out=places[4:], algorithm=name, timeout=5)
                    ranks.synchronize(10)
                    want = on_cpu(xs, algorithm=name)
                    good &= all(same_bits(p.get(), want) for p in places[4:])
            writer.row("assumption", good, what="unaligned arrays", dtype=dtype.name, shifts=shifts)


def reused_memory(writer, cupy):
    """An input that is let go of right after its call is not given to others before its end."""
    wrong = 0
    with pycoll.virtual_ranks(4) as ranks:
        other = cupy.cuda.Stream(non_blocking=True)
        for turn in range(50):
            x = cupy.full((4, 1 << 20), turn, cupy.float32)
            got = ranks.all_reduce(x, timeout=5)
            del x
            with other:
                cupy.full((4, 1 << 20), -1, cupy.float32)  # where the pool has room
            wrong += int((got != 4 * turn).sum())
        ranks.synchronize(10)
    writer.row("assumption", not wrong, what="reused memory", wrong=wrong)


def _load(until):
    import cupy

    x = cupy.ones((4096, 4096), cupy.float32)
    while time.time() < until.value:
        for _ in range(20):
            x @ x
        cupy.cuda.Stream.null.synchronize()


def beside_another_process(writer, cupy):
    """Blocks of a launch are there at once, also while another process uses the device."""
    context = multiprocessing.get_context("spawn")
    until = context.Value("d", time.time() + 60)
    other = context.Process(target=_load, args=(until,))
    other.start()
    time.sleep(4)
    with pycoll.virtual_ranks(8) as ranks:
        x, out = cupy.ones((8, MIB // 4), cupy.float32), cupy.zeros((8, MIB // 4), cupy.float32)
        start, wrong = time.monotonic(), 0
        for _ in range(50):
            out.fill(0)
            ranks.all_reduce(x, out=out, algorithm="ring", timeout=20)
            wrong += int((out != 8).sum())
        ranks.synchronize(30)
        spent = time.monotonic() - start
    until.value = 0
    other.join(30)
    writer.row("assumption", not wrong, what="another process", seconds=round(spent, 3), calls=50)


def many_epochs(writer, cupy):
    """Positions wrap after 65,536 calls, and flags that have grown old are not taken for new."""
    with pycoll.virtual_ranks(4) as ranks:
        x, large = cupy.ones((4, 300), cupy.float32), cupy.ones((4, 1 << 20), cupy.float32)
        out, sums = cupy.zeros_like(x), cupy.zeros_like(large)

        def body(stream):
            ranks.all_reduce(x, out=out, algorithm="ring", stream=stream, timeout=5)

        graph, stream = graph_of(cupy, body, 200)
        wrong = 0
        for turn in range(350):  # 70,000 calls of few blocks
            graph.launch(stream)
            if turn % 70 == 0:
                stream.synchronize()
                sums.fill(0)
                ranks.all_reduce(large, out=sums, timeout=5)  # blocks that waited all the time
                wrong += int((sums != 4).sum()) + int((out != 4).sum())
                out.fill(0)
                cupy.cuda.Stream.null.synchronize()
        stream.synchronize()
        ranks.synchronize(20)
    writer.row("assumption", not wrong, what="65,536 calls", calls=70_000, wrong=wrong)


def stress(writer, cupy):
    """Flags order data: calls of many sizes on changing data, each compared on the device."""
    counts = [1, 5, 31, 257, 1000, 4099, 20_011, 100_003, 1 << 18]
    calls = dict.fromkeys(ALGORITHMS, 0)
    wrong = {name: cupy.zeros((), cupy.int64) for name in ALGORITHMS}
    for n in (2, 4, 8):
        with pycoll.virtual_ranks(n) as ranks:
            launches = []
            for count in counts:
                x, out = cupy.zeros((n, count), cupy.int32), cupy.zeros((n, count), cupy.int32)
                base = cupy.arange(n * count, dtype=cupy.int32).reshape(n, count) % 1021
                for name in ALGORITHMS:
                    launch = ranks.bind("all_reduce", x, out=out, algorithm=name)
                    launches.append((name, launch, base, x, out))
            until, turn = time.monotonic() + STRESS_S / 3, 0
            while time.monotonic() < until:
                for name, launch, base, x, out in launches:
                    cupy.add(base, turn, out=x)
                    out.fill(-1)
                    launch(5)
                    wrong[name] += (out != x.sum(axis=0, dtype=cupy.int32)).sum()
                    calls[name] += 1
                turn += 1
            ranks.synchronize(20)
    for name in ALGORITHMS:
        bad = int(wrong[name])
        writer.row("assumption", not bad, what="order of memory", algorithm=name, calls=calls[name])


def main():
    writer, cupy = open_stage()
    for name in CHECKS:
        try:
            globals()[name](writer, cupy)
        except Exception as error:  # the others are still of interest
            writer.row("assumption", False, what=name, error=str(error)[:500])


if __name__ == "__main__":
    main()
