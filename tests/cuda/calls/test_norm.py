"""all_reduce + residual + RMSNorm of virtual ranks, over kernels compiled for the host."""

import numpy as np
import pytest

import oracle
import pycoll
from cuda.host_cupy import DeviceArray, Stream
from pycoll.config import Config
from pycoll.errors import ArgumentError, CollTimeout, PeerRejected
from pycoll.runtime.arrays.rms_norm import reference
from pycoll.testing import run_threads
from pycoll.types import DType

TYPES = ["float32", "float16", "bfloat16"]
EPS = 1e-5


def rows_of(n, name, hidden, rows=3, seed=0):
    """Return the inputs of all ranks, a weight and a residual."""
    rng = np.random.default_rng([seed, n, hidden])
    xs = [oracle.random(rng, name, (rows, hidden)) for _ in range(n)]
    return xs, oracle.random(rng, name, hidden), oracle.random(rng, name, (rows, hidden))


def wanted(xs, weight, residual, order="tree", eps=EPS):
    """Return y and h of the formula over the sum of the oracle."""
    s = oracle.reduce(xs, "sum", order) if len(xs) > 1 else xs[0]
    y, h = reference(s, weight, residual, eps, DType[s.dtype.name.upper()])
    return y.view(s.dtype), h.view(s.dtype)


def same(got, want):
    return all(oracle.differences(g.get(), want) == "" for g in got)


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("n", range(1, 9))
def test_bits_are_those_of_the_formula(host_kernels, name, n):
    with pycoll.virtual_ranks(n) as ranks:
        for hidden, order, adds in (
            (1, "tree", True),
            (37, "rank", False),
            (96, "tree", False),
            (104, "rank", True),
            (4096 + 64, "tree", True),
        ):
            xs, weight, residual = rows_of(n, name, hidden)
            y, h = wanted(xs, weight, residual if adds else None, order)
            more = [DeviceArray(residual.copy()) for _ in xs] if adds else None
            for algorithm in ("one_shot", "two_shot_push"):
                given = [DeviceArray(x.copy()) for x in xs], DeviceArray(weight), more, EPS
                got = ranks.all_reduce_rms_norm(*given, order=order, algorithm=algorithm)
                if adds:
                    assert same(got[1], h), (hidden, algorithm)
                assert same(got[0] if adds else got, y), (hidden, algorithm)


def test_rows_in_place_and_stacked(host_kernels):
    n, (xs, weight, residual) = 3, rows_of(3, "float16", 72, rows=7)
    y, h = wanted(xs, weight, residual)
    with pycoll.virtual_ranks(n) as ranks:
        x, more = DeviceArray(np.array(xs)), DeviceArray(np.array([residual] * n))
        w = DeviceArray(weight)
        made = ranks.all_reduce_rms_norm(x, w, more, EPS)
        assert [m.shape for m in made] == [(3, 7, 72)] * 2
        assert same(made[0], y)
        assert same(made[1], h)
        got = ranks.all_reduce_rms_norm(x, w, more, EPS, out=x, residual_out=more)
        assert got[0] is x
        assert got[1] is more
        assert same(x, y)
        assert same(more, h)
        assert ranks.all_reduce_rms_norm(x[:, :0], w, stream=Stream(9)).shape == (3, 0, 72)
    assert [stream for stream, _ in host_kernels.launches] == [0, 0, 9]


def test_vectors_and_single_elements_have_the_same_bits(host_kernels):
    """An array that begins elsewhere than at a multiple of 16 bytes changes nothing."""
    xs, weight, residual = rows_of(2, "bfloat16", 80)
    y, h = wanted(xs, weight, residual)

    def apart(x, offset):
        whole = np.zeros(x.size + 16, x.dtype)
        first = -whole.ctypes.data % 16 // x.itemsize + offset
        whole[first : first + x.size] = x.reshape(-1)
        return DeviceArray(whole[first : first + x.size].reshape(x.shape))

    with pycoll.virtual_ranks(2) as ranks:
        for which in range(4):
            odd = [int(which == i) for i in range(4)]
            given = [apart(x, odd[r]) for r, x in enumerate(xs)]
            more = [apart(residual, odd[3]) for _ in xs]
            got = ranks.all_reduce_rms_norm(given, apart(weight, odd[2]), more, EPS)
            assert same(got[0], y)
            assert same(got[1], h)


def test_small_calls_are_made_by_every_rank_and_large_ones_shared(host_kernels, monkeypatch):
    from pycoll.cuda.calls.norm import NormCall

    pushed = []
    norm = NormCall.norm
    monkeypatch.setattr(
        NormCall, "norm", lambda self: (pushed.append(norm(self).push), norm(self))[1]
    )
    with pycoll.virtual_ranks(2) as ranks:
        for rows in (16, 17):
            xs = [DeviceArray(np.ones((rows, 1024), np.float32)) for _ in range(2)]
            ranks.all_reduce_rms_norm(xs, DeviceArray(np.ones(1024, np.float32)))
    assert pushed == [0, 1]


def test_a_rank_that_does_not_come_is_named(host_kernels):
    xs = [DeviceArray(np.ones((2, 8), np.float32)) for _ in range(3)]
    weight = DeviceArray(np.ones(8, np.float32))
    with pycoll.virtual_ranks(3) as ranks:
        for algorithm in ("one_shot", "two_shot_push"):
            ranks.all_reduce_rms_norm(xs, weight, timeout=0.1, algorithm=algorithm, absent=0b010)
            with pytest.raises(CollTimeout, match="for rank 1 at step 1 of call"):
                ranks.synchronize()
            ranks.reset()
        got = ranks.all_reduce_rms_norm(xs, weight)
        ranks.synchronize()
        assert same(got, wanted([x.get() for x in xs], weight.get(), None, eps=1e-6)[0])


ONE = np.ones((4, 6), np.float32)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"xs": [ONE, ONE]}, "x lies in host memory"),
        ({"xs": [DeviceArray(ONE)]}, "xs has 1 arrays for 2 ranks"),
        ({"xs": [DeviceArray(ONE), DeviceArray(ONE[:3])]}, "residual is float32"),
        ({"xs": [DeviceArray(ONE.T)] * 2}, "x is not C-contiguous"),
        ({"weight": DeviceArray(np.ones(5, np.float32))}, r"weight is float32\[5\]"),
        (
            {"residual": [DeviceArray(ONE), None], "residual_out": None},
            "residual is given for some ranks only",
        ),
        ({"residual": None}, "residual_out is given, but no residual"),
        ({"out": [DeviceArray(ONE)] * 2}, "out of rank 0 overlaps out of rank 1"),
        ({"algorithm": "ring"}, "algorithm='ring'; accepted: 'one_shot', 'two_shot_push'"),
        ({"order": "any"}, "order='any'"),
        ({"eps": -1}, "eps=-1"),
        ({"timeout": 0}, "seconds above 0"),
    ],
)
def test_what_cannot_be_used_is_refused_before_a_launch(host_kernels, change, text):
    def fresh():
        return [DeviceArray(ONE.copy()) for _ in range(2)]

    given = {"xs": fresh(), "weight": DeviceArray(ONE[0].copy()), "residual": fresh()}
    given |= {"residual_out": fresh()}
    with pycoll.virtual_ranks(2) as ranks, pytest.raises(ArgumentError, match=text):
        ranks.all_reduce_rms_norm(**(given | change))
    assert host_kernels.launches == []


def test_outputs_of_ranks_lie_apart(host_kernels):
    xs = [DeviceArray(ONE.copy()) for _ in range(2)]
    weight = DeviceArray(ONE[0].copy())
    with pycoll.virtual_ranks(2) as ranks:
        with pytest.raises(ArgumentError, match="out of rank 0 overlaps x of rank 1"):
            ranks.all_reduce_rms_norm(xs, weight, out=xs[::-1])
        with pytest.raises(ArgumentError, match="residual_out of rank 0 overlaps residual of rank"):
            ranks.all_reduce_rms_norm(xs, weight, [more := DeviceArray(ONE.copy())] * 2,
                                      residual_out=[more, DeviceArray(ONE.copy())])  # fmt: skip
        with pytest.raises(ArgumentError, match="does not work in place"):
            ranks.all_reduce_rms_norm(xs, weight, out=xs, algorithm="one_shot")
    assert host_kernels.launches == []


@pytest.mark.parametrize("name", TYPES)
def test_a_communicator_gives_the_same_bits_on_the_cpu_and_on_devices(host_kernels, name):
    n, (xs, weight, residual) = 3, rows_of(3, name, 100, rows=70)
    config = Config(timeout_s=10, heap_bytes=1 << 28, device_heap_bytes=1 << 20)
    y, h = wanted(xs, weight, residual, "rank")
    bare = wanted(xs, weight, None)[0]

    def rank(comm):
        found = []
        for make in (np.copy, lambda x: DeviceArray(x.copy())):
            x, w, more = make(xs[comm.rank]), make(weight), make(residual)
            found.append(comm.all_reduce_rms_norm(x, w, more, EPS, order="rank"))
            found.append((comm.all_reduce_rms_norm(x, w, eps=EPS), None))
            again = comm.all_reduce_rms_norm(
                x, w, more, EPS, order="rank", out=x, residual_out=more
            )
            assert again[0] is x
            assert again[1] is more
            found.append(again)
        return [[v if v is None else getattr(v, "get", lambda v=v: v)() for v in p] for p in found]

    for results in run_threads(n, rank, config=config):
        for i, (got, kept) in enumerate(results):
            assert oracle.differences(got, bare if i % 3 == 1 else y) == "", i
            if i % 3 != 1:
                assert oracle.differences(kept, h) == "", i


def test_what_one_rank_gets_wrong_is_refused_on_all(host_kernels):
    config = Config(timeout_s=10, heap_bytes=1 << 28, device_heap_bytes=1 << 20)

    def rank(comm):
        for make in (np.copy, lambda x: DeviceArray(x.copy())):
            weight = make(ONE[0] if comm.rank else ONE[0, :5])
            kind = PeerRejected if comm.rank else ArgumentError
            with pytest.raises(kind, match="weight is float32"):
                comm.all_reduce_rms_norm(make(ONE), weight)
            assert comm.all_reduce(np.ones(1))[0] == 2
        return True

    assert run_threads(2, rank, config=config) == [True, True]
