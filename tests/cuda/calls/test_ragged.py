"""The v-variants on devices: of virtual ranks and of a communicator, against NumPy."""

import numpy as np
import pytest

import oracle
from cuda.host_cupy import DeviceArray
from cuda.memory_wire import Binding
from pycoll import virtual_ranks
from pycoll.config import Config
from pycoll.cuda.transports import nccl
from pycoll.errors import ArgumentError, MismatchError, PeerRejected
from pycoll.testing import run_processes, run_threads

WORLD = Config(timeout_s=10, heap_bytes=1 << 28, device_heap_bytes=1 << 20)


def rows_of(n, seed=0, most=400):
    """Return rows of each rank, one of them none, and a matrix of rows from each to each."""
    rng = np.random.default_rng(seed)
    rows = rng.integers(1, most, n)
    rows[-1] = 0 if n > 1 else rows[-1]
    matrix = rng.integers(0, most, (n, n))
    matrix[0, -1] = 0
    return rows.tolist(), matrix


def blocks(n, rows, dtype="float32", seed=0):
    rng = np.random.default_rng(seed)
    return [oracle.exact(rng, dtype, 3 * k).reshape(k, 3) for k in rows]


def exchanged(parts, matrix):
    n = len(parts)
    starts = np.cumsum(matrix, axis=1) - matrix
    cut = [
        [parts[s][starts[s, d] : starts[s, d] + matrix[s, d]] for d in range(n)] for s in range(n)
    ]
    return [np.concatenate([cut[s][d] for s in range(n)]) for d in range(n)]


def same(got, want):
    return oracle.differences(np.ravel(got), np.ravel(want)) == "" and got.shape == want.shape


@pytest.mark.parametrize("n", [1, 2, 3, 5, 8])
def test_virtual_ranks(host_kernels, n):
    rows, matrix = rows_of(n)
    parts, whole = blocks(n, rows), blocks(n, [sum(rows)] * n, "bfloat16")
    sent = blocks(n, matrix.sum(axis=1).tolist(), "int32")
    with virtual_ranks(n) as ranks:
        gathered = ranks.all_gather_v([DeviceArray(p.copy()) for p in parts])
        assert all(same(x.get(), np.concatenate(parts)) for x in gathered)
        for order in ("tree", "rank"):
            total = oracle.reduce([w.ravel() for w in whole], "sum", order).reshape(-1, 3)
            got = ranks.reduce_scatter_v([DeviceArray(w.copy()) for w in whole], rows, order=order)
            ends = np.cumsum(rows)
            for r in range(n):
                assert same(got[r].get(), total[ends[r] - rows[r] : ends[r]])
        out = [DeviceArray(np.zeros((k, 3), "i4")) for k in matrix.sum(axis=0)]
        got = ranks.all_to_all_v([DeviceArray(s.copy()) for s in sent], matrix, out=out)
        assert all(a is b for a, b in zip(got, out, strict=True))
        for x, want in zip(got, exchanged(sent, matrix), strict=True):
            assert same(x.get(), want)
    assert len(host_kernels.launches) == 4


def test_nothing_at_all(host_kernels):
    def rank(comm):
        x = DeviceArray(np.ones((0, 3), "f4"))
        zeros = [0] * comm.world_size
        results = [comm.all_gather_v(x), comm.reduce_scatter_v(x, zeros)]
        return [y.get().shape for y in [*results, comm.all_to_all_v(x, zeros)]]

    assert run_threads(2, rank, config=WORLD) == [[(0, 3)] * 3] * 2
    with virtual_ranks(2) as ranks:
        xs = [DeviceArray(np.ones((0, 3), "f4")) for _ in "ab"]
        assert [x.get().shape for x in ranks.all_gather_v(xs)] == [(0, 3)] * 2


def test_what_virtual_ranks_refuse(host_kernels):
    xs = [DeviceArray(np.ones((3, 2))), DeviceArray(np.ones((2, 2)))]
    odd = [xs[0], DeviceArray(np.ones((2, 3)))]
    with virtual_ranks(2) as ranks:
        for call, text in (
            (lambda: ranks.all_gather_v(xs[:1]), "list of 2 arrays"),
            (lambda: ranks.all_gather_v(odd), "rows of one shape"),
            (lambda: ranks.all_gather_v(xs, out=xs), "out has shape|writes shape"),
            (lambda: ranks.reduce_scatter_v(xs, [2, 1]), "add up to 3, but x has 2 rows"),
            (lambda: ranks.all_to_all_v(xs, [[1, 2], [1, 2]]), "add up to 3, but x has 2 rows"),
            (lambda: ranks.all_to_all_v(xs, [1, 2]), "from each rank to each"),
        ):
            with pytest.raises(ArgumentError, match=text):
                call()
        big = DeviceArray(np.ones((10, 2)))
        with pytest.raises(ArgumentError, match="overlaps an array of the call"):
            ranks.all_gather_v(xs, out=[big[:5], big[1:6]])
    assert host_kernels.launches == []


@pytest.mark.parametrize("run", [run_threads, run_processes])
@pytest.mark.parametrize("n", [2, 3])
def test_a_communicator(host_kernels, n, run):
    """Also out of place, in place, on arrays that are not contiguous, and repeated."""
    rows, matrix = rows_of(n, most=9000)
    parts, whole = blocks(n, rows), blocks(n, [sum(rows)] * n)
    sent = blocks(n, matrix.sum(axis=1).tolist(), "int32")
    ends = np.cumsum(rows)
    total = oracle.reduce([w.ravel() for w in whole], "sum", "tree").reshape(-1, 3)
    moved = exchanged(sent, matrix)

    def rank(comm):
        r = comm.rank
        mine = slice(ends[r] - rows[r], ends[r])
        out = DeviceArray(np.zeros((sum(rows), 3), "f4"))
        for _ in range(2):
            assert same(
                comm.all_gather_v(DeviceArray(parts[r].copy())).get(), np.concatenate(parts)
            )
        out[mine] = DeviceArray(parts[r])
        assert comm.all_gather_v(out[mine], out=out) is out
        assert same(out.get(), np.concatenate(parts))
        got = comm.gather_v(DeviceArray(parts[r].copy()), 1)
        assert got is None if r != 1 else same(got.get(), np.concatenate(parts))
        x = DeviceArray(np.asfortranarray(whole[r]))
        assert same(comm.reduce_scatter_v(x, rows).get(), total[mine])
        if r == 0:
            got = comm.scatter_v(DeviceArray(total.copy()), rows)
        else:
            got = comm.scatter_v(DeviceArray(total[:0].copy()), rows)
        assert same(got.get(), total[mine])
        got = comm.all_to_all_v(DeviceArray(sent[r].copy()), matrix[r].tolist())
        assert same(got.get(), moved[r])
        return True

    assert run(n, rank, config=WORLD) == [True] * n


def test_what_a_communicator_refuses(host_kernels):
    def rank(comm):
        x = DeviceArray(np.ones((4, 2), "f4"))
        with pytest.raises(MismatchError, match="'counts' differs"):
            comm.reduce_scatter_v(x, [4, 0] if comm.rank else [1, 3])
        with pytest.raises(MismatchError, match="'op' differs"):
            comm.reduce_scatter_v(x, [1, 3], "sum" if comm.rank else "max")
        bad = pytest.raises(ArgumentError, match="host memory")
        with bad if comm.rank else pytest.raises(PeerRejected):
            comm.all_gather_v(x, out=np.ones((8, 2), "f4") if comm.rank else None)
        launched = len(host_kernels.launches)
        return launched, comm.all_gather_v(x).get().sum()

    assert [total for _, total in run_threads(2, rank, config=WORLD)] == [16, 16]


def test_not_over_messages(host_kernels, monkeypatch):
    monkeypatch.setattr(nccl, "find_binding", lambda: Binding)
    monkeypatch.setattr(nccl, "environment", dict)
    config = Config(timeout_s=10, heap_bytes=1 << 28, device_transport="nccl")

    def rank(comm):
        with pytest.raises(ArgumentError, match="need device_transport='cuda'"):
            comm.all_gather_v(DeviceArray(np.ones((comm.rank, 2))))

    run_threads(2, rank, config=config)
