"""Virtual ranks, as far as Python goes: plans and pointers handed over, results and errors back."""

import sys
import weakref

import numpy as np
import pytest

import oracle
import pycoll
from cuda.host_cupy import DeviceArray
from pycoll.algorithms import ALGORITHMS
from pycoll.cuda import missing
from pycoll.cuda.calls.virtual import VirtualRanks
from pycoll.errors import ArgumentError, CollTimeout, CommClosed, CudaUnavailable
from pycoll.schedule.language.collectives import COLLECTIVES

OFFERED = [a for a in ALGORITHMS if hasattr(VirtualRanks, a.collective)]
NAMES = [f"{a.collective}/{a.name}" for a in OFFERED]


def parts_of(collective, n, name="float32", block=19):
    rng = np.random.default_rng(n)
    shares = collective in ("reduce_scatter", "scatter", "all_to_all")
    return [oracle.random(rng, name, block * n if shares else block) for _ in range(n)]


@pytest.mark.parametrize("entry", OFFERED, ids=NAMES)
@pytest.mark.parametrize("place", ["new", "out", "in_place"])
def test_every_algorithm(host_kernels, entry, place):
    for n in {"new": (1, 4), "out": (5,), "in_place": (2, 3)}[place]:
        if not entry.worlds(n):
            continue
        root = n // 2
        parts = parts_of(entry.collective, n)
        promise = COLLECTIVES[entry.collective]
        name = "int32" if entry.order == "any" else "float32"  # any order is right for integers
        parts = parts_of(entry.collective, n, name)
        order = "rank" if entry.order == "rank" else "tree"
        want = oracle.expected(entry.collective, parts, order=order, root=root)
        xs = [DeviceArray(part.copy()) for part in parts]
        options = {"root": root} if promise.rooted else {}
        if place == "in_place":
            if entry.collective not in ("all_reduce", "broadcast", "reduce"):
                continue
            options["out"] = xs
        elif place == "out":
            options["out"] = [
                DeviceArray(np.zeros_like(parts[0], shape=None if w is None else w.shape))
                for w in want
            ]
        with pycoll.virtual_ranks(n) as ranks:
            got = getattr(ranks, entry.collective)(xs, algorithm=entry, **options)
        for r in range(n):
            if want[r] is None:
                assert got[r] is None
                continue
            assert oracle.differences(got[r].get(), want[r]) == "", (n, r)
            if place != "in_place" and not (place == "new" and entry.collective == "broadcast"):
                assert oracle.differences(xs[r].get(), parts[r]) == "", "the input was changed"
            if place != "new":
                assert got[r] is options["out"][r]


@pytest.mark.parametrize(
    ("name", "op"),
    [
        ("float16", "avg"),
        ("bfloat16", "avg"),
        ("uint8", "avg"),
        ("int32", "max"),
        ("float8_e5m2", "sum"),
        ("float8_e4m3fn", "avg"),
    ],
)
def test_types_and_operations(host_kernels, name, op):
    parts = parts_of("all_reduce", 4, name)
    want = oracle.reduce(parts, op)
    with pycoll.virtual_ranks(4) as ranks:
        for got in ranks.all_reduce([DeviceArray(p) for p in parts], op):
            assert oracle.differences(got.get(), want) == ""


def test_a_stacked_array(host_kernels):
    parts = np.array(parts_of("all_reduce", 3))
    with pycoll.virtual_ranks(3) as ranks:
        x = DeviceArray(parts.copy())
        total = ranks.all_reduce(x)
        assert total.shape == parts.shape
        assert all(
            oracle.differences(t, oracle.reduce(list(parts), "sum")) == "" for t in total.get()
        )
        assert ranks.all_reduce(x, out=x) is x
        assert oracle.differences(x.get(), total.get()) == ""
        x = DeviceArray(parts.copy())
        assert ranks.all_gather(x).shape == (3, 3 * 19)
        assert ranks.reduce(x, root=1).shape == (19,)
        assert oracle.differences(ranks.broadcast(x, root=2).get()[0], parts[2]) == ""


def test_small_and_large_arrays_have_the_default_order(host_kernels):
    for count in (64, 40000):
        parts = [oracle.random(np.random.default_rng(r), "float32", count) for r in range(5)]
        with pycoll.virtual_ranks(5) as ranks:
            xs = [DeviceArray(p) for p in parts]
            for order in ("tree", "rank"):
                got = ranks.all_reduce(xs, order=order)
                assert oracle.differences(got[3].get(), oracle.reduce(parts, "sum", order)) == ""
            assert ranks.bind("all_reduce", xs).spec.algorithm.name == (
                "one_shot" if count == 64 else "two_shot_push"
            )


def test_a_prepared_collective_is_launched_many_times(host_kernels):
    with pycoll.virtual_ranks(2) as ranks:
        xs = [DeviceArray(np.full(8, r + 1.0)) for r in range(2)]
        launch = ranks.bind("all_reduce", xs, out=xs)
        for _ in range(3):
            launch()
        launch(float("inf"))
        ranks.synchronize()
        assert xs[0].get().tolist() == [24.0] * 8
        assert [limit for _, limit in host_kernels.launches] == [60 * 10**9] * 3 + [10**18]
        with pytest.raises(ArgumentError, match="seconds above 0"):
            launch(float("nan"))


def test_a_launch_reads_its_arrays_anew(host_kernels):
    """Also where an algorithm that does not work in place gets a copy of the input."""
    with pycoll.virtual_ranks(3) as ranks:
        xs = [DeviceArray(np.full(6, r + 1.0)) for r in range(3)]
        for name, want in (("one_shot", 54.0), ("ring", 1458.0)):
            launch = ranks.bind("all_reduce", xs, out=xs, algorithm=name)
            for _ in range(3):
                launch()
            assert [x.get()[0] for x in xs] == [want] * 3
        strided = [DeviceArray(np.ones(12)[::2]) for _ in range(3)]
        launch = ranks.bind("all_reduce", strided)
        assert launch()[0].get().tolist() == [3.0] * 6
        with pytest.raises(ArgumentError, match="contiguous"):
            launch()


def test_a_rank_that_does_not_come_is_named(host_kernels):
    with pycoll.virtual_ranks(3) as ranks:
        xs = [DeviceArray(np.ones(8)) for _ in range(3)]
        ranks.bind("all_reduce", xs)(0.5, absent=0b010)
        # Who began later follows the first to give up, and may be the one that is told.
        with pytest.raises(CollTimeout, match=r"waiting 0\.[45]\d* s for rank 1 at step 1 of call"):
            ranks.synchronize()
        with pytest.raises(CollTimeout):
            ranks.all_reduce(xs)
        ranks.reset()
        assert ranks.all_reduce(xs)[2].get().tolist() == [3.0] * 8


@pytest.mark.parametrize(
    "name", ["ring", "halving_doubling", "two_shot_push", "recursive_doubling"]
)
@pytest.mark.parametrize("n", [3, 4, 8])
def test_a_rank_that_others_wait_for_across_others_is_named(host_kernels, n, name):
    with pycoll.virtual_ranks(n) as ranks:
        xs = [DeviceArray(np.ones(64)) for _ in range(n)]
        for gone in range(n):
            ranks.bind("all_reduce", xs, algorithm=name)(0.1, absent=1 << gone)
            with pytest.raises(CollTimeout, match=f"for rank {gone} at step"):
                ranks.synchronize()
            ranks.reset()


def test_outputs_of_ranks_lie_apart(host_kernels):
    whole = DeviceArray(np.ones(30, np.float32))
    with pycoll.virtual_ranks(2) as ranks:
        for out in ([whole[:10], whole[9:19]], [whole[15:25], whole[:10]]):
            with pytest.raises(ArgumentError, match=r"the output of rank \d overlaps"):
                ranks.all_reduce([whole[:10], whole[20:]], out=out)
        ranks.all_reduce([whole[:10], whole[:10]], out=[whole[10:20], whole[20:]])
        with pytest.raises(ArgumentError, match="accepted: all_reduce"):
            ranks.bind("all_reduced", [whole, whole])
    assert whole.get().tolist() == [1.0] * 10 + [2.0] * 20


@pytest.mark.parametrize(
    ("xs", "options", "text"),
    [
        ([np.ones(3), np.ones(3)], {}, "host memory"),
        ([DeviceArray(np.ones(3))], {}, "1 arrays for 2 ranks"),
        ([DeviceArray(np.ones(3)), DeviceArray(np.ones(4))], {}, "same shape"),
        ([DeviceArray(np.ones(3))] * 2, {"op": "plus"}, "op='plus'"),
        ([DeviceArray(np.ones(3))] * 2, {"algorithm": "rign"}, "did you mean 'ring'"),
        ([DeviceArray(np.ones(3))] * 2, {"algorithm": "native"}, "NCCL's own"),
        ([DeviceArray(np.ones(3))] * 2, {"stream": "x"}, "__cuda_stream__"),
        ([DeviceArray(np.ones(3))] * 2, {"timeout": -1}, "seconds above 0"),
        ([DeviceArray(np.ones(3))] * 2, {"timeout": float("nan")}, "seconds above 0"),
    ],
)
def test_bad_arguments(host_kernels, xs, options, text):
    with pycoll.virtual_ranks(2) as ranks, pytest.raises(ArgumentError, match=text):
        ranks.all_reduce(xs, **options)
    assert host_kernels.launches == []


def test_worlds_and_devices_that_do_not_exist(host_kernels):
    for n in (0, 65, 2.0, True):
        with pytest.raises(ArgumentError, match="1 to 64"):
            pycoll.virtual_ranks(n)
    with pytest.raises(ArgumentError, match="0 to 0"):
        pycoll.virtual_ranks(2, device=1)
    ranks = pycoll.virtual_ranks(2)
    ranks.close()
    ranks.close()
    with pytest.raises(CommClosed):
        ranks.all_reduce([DeviceArray(np.ones(3))] * 2)


def test_a_prepared_call_keeps_its_stream(host_kernels, monkeypatch):
    """CUDA may give the handle of a stream that has ended to another one, or end the process."""
    cuda = sys.modules["cupy"].cuda
    with pycoll.virtual_ranks(2) as ranks:
        xs = [DeviceArray(np.ones(3)) for _ in range(2)]
        given, current = cuda.Stream(8), cuda.Stream(9)
        seen = [weakref.ref(given), weakref.ref(current)]
        launches = [ranks.bind("all_reduce", xs, stream=given)]
        with monkeypatch.context() as patch:
            patch.setattr(cuda, "get_current_stream", seen[1])
            launches.append(ranks.bind("all_reduce", xs))
        del given, current
        assert [stream() is not None for stream in seen] == [True, True]
        for launch in launches:
            launch()
    assert [stream for stream, _ in host_kernels.launches] == [8, 9]


def test_what_was_prepared_ends_with_its_ranks(host_kernels):
    with pycoll.virtual_ranks(2) as ranks:
        launch = ranks.bind("all_reduce", [DeviceArray(np.ones(3)) for _ in range(2)])
        launch()
    launches = len(host_kernels.launches)
    calls = launch, ranks.check, ranks.synchronize, ranks.abort, ranks.reset
    for call in (*calls, lambda: ranks.info(launch)):
        with pytest.raises(CommClosed):
            call()
    assert len(host_kernels.launches) == launches


@pytest.mark.skipif(not missing(), reason="nothing is missing here")
def test_without_cuda_it_says_what_is_missing():
    with pytest.raises(CudaUnavailable, match=r"(?s)To use arrays on a CUDA device: .*doctor"):
        pycoll.virtual_ranks(2)


def test_calls_made_before(host_kernels):
    """The arrays of a call that is made again are read anew, and none is kept alive."""
    with pycoll.virtual_ranks(2) as ranks:
        x, out = DeviceArray(np.zeros((2, 33), np.float32)), DeviceArray(np.zeros((2, 33), "f4"))
        for turn in range(4):
            x._values[...] = [[turn], [10]]
            assert ranks.all_reduce(x, out=out) is out
            assert (out.get() == turn + 10).all()
            ranks.all_reduce(x, "max", out=out)
            assert (out.get() == 10).all()
        rows = [DeviceArray(np.full(5, r, np.int32)) for r in range(2)]
        for _ in range(2):
            ranks.all_reduce(rows, out=rows)
        assert [row.get().tolist() for row in rows] == [[2] * 5] * 2
        last = weakref.ref(x)
        del x
        ranks.all_reduce(rows, out=rows)
        assert last() is None
