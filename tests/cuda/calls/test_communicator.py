"""Device arrays in calls of a communicator, as far as Python goes; ranks are threads."""

import gc
import threading

import ml_dtypes
import numpy as np
import pytest

import oracle
from cuda.host_cupy import DeviceArray, Stream
from cuda.memory_wire import Binding
from pycoll.algorithms import ALGORITHMS
from pycoll.config import Config
from pycoll.cuda.transports import nccl
from pycoll.errors import ArgumentError, CudaUnavailable, MismatchError, PeerRejected
from pycoll.runtime.calls.prepared import CallRequest
from pycoll.runtime.selection import select
from pycoll.schedule.ir import IN, OUT, algorithm, at, fold
from pycoll.schedule.language.collectives import COLLECTIVES
from pycoll.testing import run_threads
from pycoll.types import Kind

PEERS = Config(timeout_s=10, heap_bytes=1 << 28, device_heap_bytes=1 << 20)
MESSAGES = Config(timeout_s=10, heap_bytes=1 << 28, device_transport="nccl")


@pytest.fixture(params=["peers", "messages"])
def world(request, host_kernels, monkeypatch):
    """Return a configuration in which ranks reach each other's memory, or send messages."""
    monkeypatch.setattr(nccl, "find_binding", lambda: Binding)
    monkeypatch.setattr(nccl, "environment", dict)
    return PEERS if request.param == "peers" else MESSAGES


@pytest.mark.parametrize("entry", ALGORITHMS, ids=lambda a: f"{a.collective}/{a.name}")
def test_every_algorithm(world, entry):
    """Over peers all of them; over messages some, as test_program.py has all."""
    if world is MESSAGES and entry.name not in ("ring", "halving_doubling", "direct", "bruck"):
        return
    n = 3 if entry.worlds(3) else 4
    promise = COLLECTIVES[entry.collective]
    rng = np.random.default_rng(1)
    shares = entry.collective in ("reduce_scatter", "scatter", "all_to_all")
    name = "int32" if entry.order == "any" else "float32"
    parts = [oracle.random(rng, name, 3000 * n if shares else 3001) for _ in range(n)]
    order = "rank" if entry.order == "rank" else "tree"
    want = oracle.expected(entry.collective, parts, order=order, root=1)

    def rank(comm):
        options = {"root": 1} if promise.rooted else {}
        symmetric = comm.empty(parts[0].shape, parts[0].dtype, device="cuda")
        symmetric._values[:] = parts[comm.rank]
        results = []
        for x in (DeviceArray(parts[comm.rank].copy()), symmetric):
            results.append(getattr(comm, entry.collective)(x, algorithm=entry, **options))
            if entry.collective in ("all_reduce", "broadcast"):  # in place
                getattr(comm, entry.collective)(x, algorithm=entry, out=x, **options)
                results.append(x)
        return [None if got is None else got.get() for got in results]

    for r, results in enumerate(run_threads(n, rank, config=world)):
        for got in results:
            assert (got is None) == (want[r] is None)
            assert got is None or oracle.differences(got, want[r]) == ""


def test_scans_of_few_bits_are_rounded_once_on_the_device(world, monkeypatch):
    """Whatever the number of ranks: only arrays of the host are made wider for a call."""
    monkeypatch.setattr(select, "FEW_N", 2)
    parts = [oracle.random(np.random.default_rng(r), "float16", 33) for r in range(4)]
    want = oracle.expected("scan", parts, order="rank")

    def rank(comm):
        return comm.scan(DeviceArray(parts[comm.rank].copy())).get()

    for r, got in enumerate(run_threads(4, rank, config=world)):
        assert oracle.differences(got, want[r]) == ""


def test_background_calls_and_streams(world, host_kernels):
    def rank(comm):
        x = DeviceArray(np.full(8, comm.rank + 1.0))
        work = comm.all_reduce(x, async_op=True)
        first = work.wait()
        assert work.done()
        second = comm.all_reduce(x, stream=Stream(3))
        third = comm.all_reduce(x, stream=4)
        return [a.get().tolist() for a in (first, second, third, work.synchronize())]

    assert run_threads(2, rank, config=world) == [[[3.0] * 8] * 4] * 2
    if world is PEERS:
        assert {stream for stream, _ in host_kernels.launches} == {77, 3, 4}


def test_a_call_that_does_not_match_launches_nothing(world, host_kernels):
    def rank(comm):
        with pytest.raises(MismatchError, match=r"field 'op' differs"):
            comm.all_reduce(DeviceArray(np.ones(4)), "sum" if comm.rank else "max")
        with pytest.raises(MismatchError, match=r"rank 1: all_reduce\(float64\[6\]"):
            comm.all_reduce(DeviceArray(np.ones(6 if comm.rank else 4)))
        launched = len(host_kernels.launches)
        return launched, comm.all_reduce(DeviceArray(np.ones(4))).get().tolist()

    results = run_threads(2, rank, config=world)
    assert [values for _, values in results] == [[2.0] * 4] * 2  # still usable
    assert results[0][0] == 0


def test_own_algorithms_of_one_name_that_differ(world, host_kernels):
    def in_order(ranks):
        @algorithm("all_reduce", "in order", chunks=1, in_place=False)
        def made(rank, n):
            yield fold([at(peer, IN) for peer in ranks], to=at(rank, OUT))

        return made

    def rank(comm):
        mine = in_order([0, 1, 2] if comm.rank else [2, 1, 0])
        with pytest.raises(MismatchError, match="differs; nothing was launched"):
            comm.all_reduce(DeviceArray(np.ones(4)), algorithm=mine)
        launched = len(host_kernels.launches)
        return launched, comm.all_reduce(
            DeviceArray(np.ones(4)), algorithm=in_order([1, 0, 2])
        ).get()

    results = run_threads(3, rank, config=world)
    assert [values.tolist() for _, values in results] == [[3.0] * 4] * 3
    assert results[0][0] == 0


def test_bad_arguments_reach_nobody(world):
    def rank(comm):
        good = DeviceArray(np.ones(4))
        narrow = DeviceArray(np.ones(4, ml_dtypes.float8_e5m2))
        cases = [
            ({"x": good, "op": "and"}, ArgumentError, "integers"),
            ({"x": good, "out": np.ones(4)}, ArgumentError, "host memory"),
            ({"x": good, "out": DeviceArray(np.ones(5))}, ArgumentError, "this call writes shape"),
            ({"x": narrow, "op": "max"}, ArgumentError, "max of float8_e5m2 has no kernel"),
            ({"x": good, "timeout": 0}, ArgumentError, "seconds above 0"),
            ({"x": np.ones(4), "stream": 0}, ArgumentError, "this call has none"),
        ]
        for options, error, text in cases:
            expected = (
                pytest.raises(error, match=text) if comm.rank else pytest.raises(PeerRejected)
            )
            with expected:
                comm.all_reduce(**(options if comm.rank else {"x": good}))
        return comm.all_reduce(good).get().tolist()

    assert run_threads(2, rank, config=world) == [[2.0] * 4] * 2


def test_symmetric_memory_is_worked_on_in_place(host_kernels):
    """Arrays in the heap go into a direct plan, others through cells; the heap reuses memory."""
    specs = []

    def rank(comm):
        x = comm.empty(70000, device="cuda")  # too many for packets, which need no heap
        x._values[:] = comm.rank
        start = x.data.ptr
        comm.all_reduce(x, out=x)
        x = DeviceArray(x.get())
        again = comm.empty((7, 10000), "f4", device="cuda:0").data.ptr
        with pytest.raises(MemoryError, match="device_heap_bytes"):
            comm.empty(1 << 20, device="cuda")
        with pytest.raises(ArgumentError, match="'cuda:0'"):
            comm.empty(1, device="cuda:1")
        total = comm.all_reduce(x).get()[0]
        specs.extend(spec.direct for spec in comm._session.device.transport._calls._calls)
        return x.get()[0], start == again, total

    assert run_threads(2, rank, config=PEERS) == [(1.0, True, 2.0)] * 2
    assert sorted(specs) == [False, False, True, True]


def test_blocks_move_in_place_in_symmetric_memory(host_kernels):
    """What is made on the way lies in the heap too, so every rank's call is a direct one."""

    def rank(comm):
        x = comm.empty(6000, "i4", device="cuda")
        x._values[:] = np.arange(6000) + 10000 * comm.rank
        comm.all_to_all(x, out=x)
        moved = x.get()
        comm.all_gather(x[comm.rank * 2000 : (comm.rank + 1) * 2000], out=x)
        direct = [call.direct for call in comm._session.device.transport._calls._calls]
        return moved, x.get(), direct

    blocks = np.arange(6000).reshape(3, 2000)
    moved = [np.concatenate([blocks[r] + 10000 * s for s in range(3)]) for r in range(3)]
    gathered = np.concatenate([moved[r][r * 2000 : (r + 1) * 2000] for r in range(3)])
    for r, (first, second, direct) in enumerate(run_threads(3, rank, config=PEERS)):
        assert (first == moved[r]).all()
        assert (second == gathered).all()
        assert all(direct)


def test_memory_is_freed_when_all_ranks_have_closed(host_kernels):
    """But not before, as peers may have it mapped; and arrays outlive their communicator."""
    first_closed = threading.Event()
    owned = []

    def rank(comm):
        x = comm.empty(100, device="cuda")
        comm.all_reduce(x, out=x)
        if comm.rank:
            first_closed.wait(10)
            owned.append(len(host_kernels.owned))
            return x
        comm.close()
        first_closed.set()
        return None

    results = run_threads(2, rank, config=PEERS)
    assert owned == [5]  # cells and heaps, and that of the first as mapped by the second
    assert len(host_kernels.owned) == 1
    del results
    gc.collect()
    assert not host_kernels.owned


def test_native_collectives_of_nccl(host_kernels, monkeypatch):
    monkeypatch.setattr(nccl, "find_binding", lambda: Binding)
    monkeypatch.setattr(nccl, "environment", dict)

    def rank(comm):
        x = DeviceArray(np.ones(6, np.float32))
        with pytest.raises(ArgumentError, match="promise no order"):
            comm.all_reduce(x, order="tree", algorithm="native")
        with pytest.raises(ArgumentError, match="no sum of int16"):
            comm.all_reduce(DeviceArray(np.ones(2, np.int16)), algorithm="native")
        comm.all_reduce(x, "avg", algorithm="native")
        comm.reduce_scatter(x, algorithm="native")
        comm.all_gather(x, algorithm="native")
        comm.reduce(x, "max", root=1, algorithm="native")
        comm.all_to_all(x, algorithm="native")
        return comm._session.device.transport._comm.calls

    expected = [
        ("ALL_REDUCE", 6, 7, (4,)),
        ("REDUCE_SCATTER", 3, 7, (0,)),
        ("ALL_GATHER", 24, 0, ()),
        ("REDUCE", 6, 7, (2, 1)),
        ("ALL_TO_ALL", 12, 0, ()),
    ]
    assert run_threads(2, rank, config=MESSAGES) == [expected] * 2


def test_peer_memory_has_no_native_collectives(host_kernels):
    def rank(comm):
        with pytest.raises(ArgumentError, match="device_transport='nccl'"):
            comm.all_reduce(DeviceArray(np.ones(4)), algorithm="native")

    run_threads(2, rank, config=PEERS)


def test_without_cuda_every_rank_hears_what_is_missing():
    """No device library, driver or CuPy: an error before anything reaches a peer, then usable."""
    from pycoll.cuda import missing

    if not missing():
        pytest.skip("nothing is missing here")

    def rank(comm):
        with pytest.raises(CudaUnavailable if comm.rank else PeerRejected, match=r"CUDA|cuda"):
            comm.all_reduce(DeviceArray(np.ones(4)) if comm.rank else np.ones(4))
        with pytest.raises(CudaUnavailable, match="pycoll doctor"):
            comm.empty(4, device="cuda")
        return comm.all_reduce(np.ones(2)).tolist()

    assert run_threads(2, rank) == [[2.0, 2.0]] * 2


@pytest.mark.parametrize(
    ("ranks", "version", "expected"),
    [
        (1, 23203, {}),
        (4, 23203, {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_MAX_CTAS": "4"}),
        (2, 22809, {"NCCL_HOSTID": "pycoll-rank-1", "NCCL_SOCKET_IFNAME": "lo"}),
    ],
)
def test_ranks_that_share_a_device_tell_nccl(ranks, version, expected):
    environ = {}
    nccl.share_device(environ, ranks, version, 1)
    assert environ == expected
    environ = dict.fromkeys(expected, "mine")
    nccl.share_device(environ, ranks, version, 1)
    assert set(environ.values()) <= {"mine"}


def test_a_call_made_before_is_checked_against_what_differs(world):
    """Prepared once; another size, type, place or operation, or a bad one, is prepared anew."""

    def rank(comm):
        results, seen = [], []
        for dtype, count in (("float32", 100), ("float32", 40), ("int32", 100), ("float32", 100)):
            x = DeviceArray(np.arange(count).astype(dtype) + comm.rank)
            out, heap = DeviceArray(np.zeros(count, dtype)), comm.empty(count, dtype, device="cuda")
            for target in (out, heap, out):
                for op in ("sum", "max", "sum"):
                    comm.all_reduce(x, op, out=target)
                    results.append(target.get())
                    seen.append((np.arange(count).astype(dtype), op))
            with pytest.raises(ArgumentError):
                comm.all_reduce(x, ["sum"], out=out)
            x._values.flags.writeable = False
            with pytest.raises(ArgumentError):
                comm.all_reduce(x, out=x)
        return results, seen

    for results, seen in run_threads(2, rank, config=world, timeout=60):
        for got, (x, op) in zip(results, seen, strict=True):
            assert np.array_equal(got, x + x + 1 if op == "sum" else x + 1)


def test_small_sums_need_no_heap(host_kernels):
    """They travel in packets: any array, in place too, and no heap is made for them."""

    def rank(comm):
        results = []
        for dtype in ("float32", "float16", "int64"):
            for count in (1, 33, 2048):
                x = DeviceArray(np.arange(count).astype(dtype) + comm.rank)
                results.append((comm.all_reduce(x).get(), comm.all_reduce(x, "avg", order="rank")))
                comm.all_reduce(x, out=x)
                assert (x.get() == results[-1][0]).all()
        side = comm._session.device_side()
        assert not side.transport.memory.base
        x, out = DeviceArray(np.ones(33, "f4")), DeviceArray(np.ones(33, "f4"))
        request = CallRequest(Kind.ALL_REDUCE)
        prepared, *_ = side._prepare(request, x, out, None, None)
        assert prepared.spec.direct
        again, *_ = side._prepare(request, x, out, None, None)
        assert (again.in_ptr, again.out_ptr) == (x.data.ptr, out.data.ptr)
        assert len(side._made._calls) > 0
        return [(total, mean.get()) for total, mean in results]

    found = run_threads(3, rank, config=PEERS, timeout=60)
    cases = [(d, c) for d in ("float32", "float16", "int64") for c in (1, 33, 2048)]
    for results in found:
        for (dtype, count), (total, mean) in zip(cases, results, strict=True):
            xs = [np.arange(count).astype(dtype) + r for r in range(3)]
            want = oracle.expected("all_reduce", xs, order="tree")[0]
            assert oracle.differences(total, want) == ""
            want = oracle.expected("all_reduce", xs, order="rank", op="avg")[0]
            assert oracle.differences(mean, want) == ""


def test_small_copies_need_no_heap(host_kernels):
    """all_gather, all_to_all and broadcast in packets: any arrays of any type, in place too."""

    def rank(comm):
        n, me, results = comm.world_size, comm.rank, []
        for dtype in ("float32", "int8", ml_dtypes.bfloat16):
            for count in (1, 33, 2048):
                x = np.arange(n * count).astype(dtype) + np.array(me, dtype)
                results.append([comm.all_gather(DeviceArray(x[:count].copy())).get()])
                out = DeviceArray(np.tile(x[:count], n))
                comm.all_gather(out[me * count : (me + 1) * count], out=out)
                results[-1].append(out.get())
                results[-1].append(comm.all_to_all(DeviceArray(x.copy())).get())
                y = DeviceArray(x.copy())
                comm.broadcast(y, n - 1)
                results[-1].append(y.get())
        assert not comm._session.device_side().transport.memory.base
        return results

    found = run_threads(3, rank, config=PEERS, timeout=60)
    cases = [(d, c) for d in ("float32", "int8", ml_dtypes.bfloat16) for c in (1, 33, 2048)]
    for me, results in enumerate(found):
        for (dtype, count), got in zip(cases, results, strict=True):
            xs = [np.arange(3 * count).astype(dtype) + np.array(r, dtype) for r in range(3)]
            gathered = np.concatenate([x[:count] for x in xs])
            moved = np.concatenate([x[me * count : (me + 1) * count] for x in xs])
            for one, want in zip(got, (gathered, gathered, moved, xs[2]), strict=True):
                assert one.dtype == want.dtype
                assert one.tobytes() == want.tobytes()
