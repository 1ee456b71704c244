"""Kernels and plans of the device library, compiled for the host: every algorithm, to the bit."""

import zlib
from ctypes import c_uint32, c_uint64

import numpy as np
import pytest

import oracle
from device_library import (
    DIRECT,
    INTERPRET,
    LOW_LATENCY,
    DeviceError,
    Library,
    World,
    host_library,
    plans_of,
    pointers,
    spec_of,
)
from pycoll.algorithms import ALGORITHMS, find
from pycoll.schedule.language.collectives import COLLECTIVES, OWN
from pycoll.testing import run_threads
from pycoll.types import DType, ReduceOp

NAMES = [f"{a.collective}/{a.name}" for a in ALGORITHMS]
GUARD = 0xA5


@pytest.fixture(scope="module")
def library():
    return Library(host_library())


def inputs(entry, n, dtype, length, root, data=oracle.random, salt=0):
    """Return one array per rank, with what the collective takes from each."""
    seed = zlib.crc32(repr((entry.name, n, dtype, length, salt)).encode())
    rng = np.random.default_rng(seed)
    promise = COLLECTIVES[entry.collective]
    whole = length if promise.in_layout == OWN else length * n
    return [data(rng, dtype, whole) for _ in range(n)]


class Call:
    """One call: its arrays, what must come out, and the specs of all ranks."""

    def __init__(
        self,
        entry,
        n,
        dtype,
        length,
        *,
        op="sum",
        direct=True,
        in_place=False,
        salt=0,
        offset=0,
        **params,
    ):
        promise = COLLECTIVES[entry.collective]
        same = promise.in_layout == promise.out_layout
        self.in_place = in_place and entry.in_place and same
        # 16-bit partial sums are rounded wherever they are stored
        once = oracle.dtype(dtype).itemsize != 2 or entry.schedule(n, **params).reduces_at_once
        exact = promise.reduces and not (once and entry.order in ("tree", "rank"))
        data = oracle.exact if exact else oracle.random
        root = params.get("root", 0)
        parts = inputs(entry, n, dtype, length, root, data, salt)
        order = "rank" if entry.order == "rank" else "tree"
        self.want = oracle.expected(entry.collective, parts, op, order, root)
        if entry.collective == "exscan":  # what the first rank gets is no work of a plan
            self.want[0] = None
        share = parts[0].size if promise.in_layout == OWN else parts[0].size // n
        nout = share if promise.out_layout == OWN else share * n
        self.ins = [placed(part, part.size, offset) for part in parts]
        self.outs = [placed(None, nout, offset, parts[0].dtype) for _ in range(n)]
        if self.in_place:
            self.outs = self.ins
        plans = plans_of(entry, n, direct=direct, in_place=self.in_place, **params)
        self.specs = [spec_of(plan, dtype_of(parts), op, share * n) for plan in plans]

    def check(self):
        for rank, (out, want) in enumerate(zip(self.outs, self.want, strict=True)):
            if want is not None:
                wrong = oracle.differences(out[: want.size], want)
                assert not wrong, f"rank {rank}: {wrong}"
            assert np.all(out[-4:].view(np.uint8) == GUARD), f"rank {rank}: wrote past the end"


def dtype_of(parts):
    return parts[0].dtype


def placed(values, size, offset, dtype=None):
    """Return an array with a guard behind it, `offset` elements from a multiple of 16 bytes."""
    dtype = dtype or values.dtype
    whole = np.full((size + offset + 4) * dtype.itemsize + 16, GUARD, np.uint8)
    first = -whole.ctypes.data % 16 + offset * dtype.itemsize
    array = whole[first : first + (size + 4) * dtype.itemsize].view(dtype)
    if values is not None:
        array[:size] = values
    return array


def run(library, world, calls, seed, **options):
    """Queue the calls, run them, and check every result."""
    library.schedule(seed)
    for call in calls:
        world.launch(world.call(call.specs), call.ins, call.outs, **options)
    world.synchronize()
    assert world.failed() == []
    for call in calls:
        call.check()


@pytest.mark.parametrize("entry", ALGORITHMS, ids=NAMES)
def test_every_algorithm(library, entry):
    for n in range(1, 9):
        if not entry.worlds(n):
            continue
        root = {"root": n - 1} if "root" in entry.params else {}
        for peers in (False, True):
            dtype = ["float32", "bfloat16", "int8"][(n + peers) % 3]
            calls = [
                Call(entry, n, dtype, 1 + 13 * n % 29, direct=True, **root),
                Call(entry, n, dtype, 40, direct=True, in_place=True, salt=1, offset=1, **root),
                Call(entry, n, dtype, 21, direct=False, salt=2, **root),
            ]
            with World(library, n, peers=peers) as world:
                run(library, world, calls, seed=n, lanes=1 + n % 2)


@pytest.mark.parametrize("dtype", oracle.DTYPES)
def test_folds_have_the_bits_of_the_processor(library, dtype):
    rng = np.random.default_rng(5)
    library.schedule(3)
    for op in oracle.ops(dtype) if dtype not in oracle.FLOATS8 else ("sum", "avg"):
        for nsrc, ndst, count, offset in [
            (1, 2, 7, 0), (2, 1, 130, 0), (2, 2, 300, 1), (3, 1, 77, 0), (5, 2, 90, 3),
            (8, 1, 33, 0), (13, 1, 40, 1),
        ]:  # fmt: skip
            for order in ("tree", "rank"):
                fold_once(library, rng, dtype, op, nsrc, ndst, count, offset, order)


@pytest.mark.parametrize("dtype", oracle.FLOATS8)
def test_all_pairs_of_8_bit_floats(library, dtype):
    codes = np.arange(256, dtype=np.uint8)
    parts = [c.view(oracle.dtype(dtype)) for c in (np.repeat(codes, 256), np.tile(codes, 256))]
    out = np.empty_like(parts[0])
    for op in ("sum", "avg"):  # on devices they have no others
        library.fold(
            int(DType[dtype.upper()]), int(ReduceOp[op.upper()]), 0, c_uint32(2 * (op == "avg")),
            pointers(parts), 2, pointers([out]), 1, c_uint64(out.size), None,
        )  # fmt: skip
        want = oracle.reduce(parts, op)
        want.view(np.uint8)[np.isnan(want)] = oracle.NAN8[dtype]
        assert out.tobytes() == want.tobytes(), op


@pytest.mark.parametrize("op", ["and", "or", "xor", "min", "max"])
def test_bytes_of_booleans_that_are_neither_0_nor_1(library, op):
    """Whatever is not 0 is true, and a result has 0 and 1; a copy keeps the bytes."""
    library.schedule(3)
    for nsrc, count, offset in [
        (1, 9, 0),
        (2, 1, 0),
        (2, 131, 1),
        (3, 77, 0),
        (5, 90, 3),
        (13, 40, 1),
    ]:
        odd, true = zip(*(oracle.odd_booleans(r, count) for r in range(nsrc)), strict=True)
        srcs = [placed(part, count, offset * (i % 2)) for i, part in enumerate(odd)]
        out = placed(None, count, 0, odd[0].dtype)
        library.fold(
            int(DType.BOOL), int(ReduceOp[op.upper()]), 0, c_uint32(0), pointers(srcs), nsrc,
            pointers([out]), 1, c_uint64(count), None,
        )  # fmt: skip
        want = oracle.reduce(true, op) if nsrc > 1 else odd[0]
        assert out[:count].tobytes() == want.tobytes(), (nsrc, count)


def fold_once(library, rng, dtype, op, nsrc, ndst, count, offset, order):
    """Compare one fold with NumPy; the second source lies elsewhere modulo 16 bytes if offset."""
    parts = [oracle.random(rng, dtype, count) for _ in range(nsrc)]
    if dtype in oracle.FLOATS:
        special = oracle.special(dtype)
        for i, part in enumerate(parts):
            part[: len(special)] = np.roll(special, i)[:count]
    srcs = [placed(part, count, offset * (i % 2)) for i, part in enumerate(parts)]
    dsts = [placed(None, count, 0, parts[0].dtype) for _ in range(ndst)]
    library.fold(
        int(DType[dtype.upper()]), int(ReduceOp[op.upper()]), int(order == "tree"),
        c_uint32(nsrc if op == "avg" else 0), pointers(srcs), nsrc, pointers(dsts), ndst,
        c_uint64(count), None,
    )  # fmt: skip
    want = oracle.reduce(parts, op, order) if nsrc > 1 else parts[0]
    for dst in dsts:
        wrong = oracle.differences(dst[:count], want)
        assert not wrong, f"{op} of {nsrc} in {order} order: {wrong}"
        assert np.all(dst[count:].view(np.uint8) == GUARD)


@pytest.mark.parametrize(
    "name", ["one_shot", "one_shot_rank", "two_shot_push", "two_shot_push_rank"]
)
@pytest.mark.parametrize("dtype", ["float32", "float16", "uint64"])
def test_kernels_of_one_fold_agree_with_the_interpreter(library, name, dtype):
    entry = find("all_reduce", name)
    for n in (2, 3, 4, 8):
        for op in ("sum", "avg"):
            with World(library, n, peers=n == 3) as world:
                kind = name.split("_push")[0].removesuffix("_rank")
                kinds = {DIRECT: kind, LOW_LATENCY: "low_latency", INTERPRET: "interpret"}
                calls = [Call(entry, n, dtype, 75, op=op) for _ in kinds]
                library.schedule(n)
                for call, (method, kernel) in zip(calls, kinds.items(), strict=True):
                    handles = world.call(call.specs)
                    assert world.info(handles[0], method).kernel.decode().startswith(kernel)
                    world.launch(handles, call.ins, call.outs, method=method)
                world.synchronize()
                assert world.failed() == []
                for call in calls:
                    call.check()


def test_bits_are_those_of_the_engine_where_the_order_is_free(library):
    names = ["ring", "halving_doubling", "recursive_doubling", "circulant"]
    n, length = 5, 67
    rng = np.random.default_rng(1)
    parts = [oracle.random(rng, "float32", length * n) for _ in range(n)]

    def engine(comm):
        return [comm.all_reduce(parts[comm.rank], algorithm=name, order="any") for name in names]

    wanted = run_threads(n, engine)[0]
    for name, want in zip(names, wanted, strict=True):
        call = Call(find("all_reduce", name), n, "float32", length)
        call.ins = [placed(part, part.size, 0) for part in parts]
        call.want = [want] * n
        with World(library, n) as world:
            run(library, world, [call], seed=1)


@pytest.mark.parametrize("peers", [False, True])
@pytest.mark.parametrize("epoch", [0, 4090, 65530])
def test_calls_follow_each_other(library, peers, epoch):
    n, entries = (
        3,
        [
            find("all_reduce", "ring"),
            find("reduce_scatter", "ring"),
            find("broadcast", "binomial"),
            find("all_reduce", "recursive_doubling"),
        ],
    )
    with World(library, n, peers=peers, cell_bytes=256) as world:
        world.each("group_set_epoch", epoch)
        calls = [
            Call(entries[i % 4], n, "float32", 5 + 11 * (i % 5), direct=i % 3 > 0, salt=i)
            for i in range(12)
        ]
        library.schedule(epoch)
        for i, call in enumerate(calls):
            handle = world.call(call.specs)
            world.launch(handle, call.ins, call.outs, blocks=1 + 3 * i % 4, lanes=1 + i % 2)
        world.synchronize()
        assert world.failed() == []
        for call in calls:
            call.check()


def test_small_cells_are_used_again_and_again(library):
    for peers in (False, True):
        for seed in range(6):
            with World(library, 3, peers=peers, cell_bytes=512) as world:
                call = Call(find("all_reduce", "ring"), 3, "float32", 200, direct=False)
                assert world.info(world.call(call.specs)[0]).segments > 4
                run(library, world, [call], seed, blocks=3)


def test_averages(library):
    for name in ("ring", "two_shot_pull", "circulant"):
        for dtype in ("float64", "int16", "uint8"):
            with World(library, 3) as world:
                entry = find("all_reduce", name)
                run(library, world, [Call(entry, 3, dtype, 50, op="avg")], seed=2)


def test_lanes_as_threads(library):
    for name, peers in (("ring", True), ("two_shot_push", False), ("halving_doubling", True)):
        with World(library, 4, peers=peers) as world:
            calls = [Call(find("all_reduce", name), 4, "float32", 100, salt=i) for i in range(5)]
            run(library, world, calls, seed=-1, timeout_ms=60_000)


def test_peers_on_one_device_leave_room_for_each_other(library):
    """64 blocks fit on the device of the host library."""
    plans = plans_of(find("all_reduce", "ring"), 4)
    with World(library, 4, peers=True, max_blocks=64) as world:
        handle = world.call([spec_of(plan, "float32", count=1 << 22) for plan in plans])[0]
        assert (world.info(handle).max_blocks, world.info(handle).blocks) == (64, 64)
        world.each("group_share", 3)
        assert (world.info(handle).max_blocks, world.info(handle).blocks) == (21, 21)
        for ranks in (0, 5):
            with pytest.raises(DeviceError, match=f"{ranks} ranks on one device, of 4"):
                world.each("group_share", ranks)
    with World(library, 2) as world, pytest.raises(DeviceError, match="virtual ranks always"):
        world.each("group_share", 2)
