"""The kernel of all_reduce + residual + RMSNorm under schedulers, in every form of a launch."""

import numpy as np
import pytest

import oracle
from device_library import (
    ARGUMENT,
    FOLLOWED,
    TIMEOUT,
    TOO_LARGE,
    DeviceError,
    Library,
    World,
    host_library,
    norm_of,
)
from pycoll.runtime.arrays.rms_norm import reference
from pycoll.types import DType


@pytest.fixture
def library():
    """Return the library; other tests of this process have their lanes as threads again."""
    made = Library(host_library())
    yield made
    made.schedule(-1)


class Rows:
    """One call: its arrays, and what must come out."""

    def __init__(self, n, name, rows, hidden, *, seed=0, push=False, in_place=False):
        rng = np.random.default_rng([seed, n, rows, hidden])
        self.push, self.weight = push, oracle.random(rng, name, hidden)
        self.ins = [oracle.random(rng, name, (rows, hidden)) for _ in range(n)]
        residual = oracle.random(rng, name, (rows, hidden))
        s = oracle.reduce(self.ins, "sum") if n > 1 else self.ins[0]
        dtype = DType[name.upper()]
        want = reference(s, self.weight, residual, 1e-6, dtype)
        self.want = [w.view(s.dtype).copy() for w in want]
        self.more = [residual.copy() for _ in range(n)]
        self.outs, self.kept = self.ins, self.more
        if not in_place:
            self.outs, self.kept = ([np.zeros_like(residual) for _ in range(n)] for _ in range(2))

    def norm(self):
        arrays = self.ins, self.weight, self.more, self.outs, self.kept
        return norm_of(*arrays, push=self.push)

    def is_right(self):
        return all(
            oracle.differences(got, want) == ""
            for all_ranks, want in zip((self.outs, self.kept), self.want, strict=True)
            for got in all_ranks
        )


@pytest.mark.parametrize("push", [False, True])
@pytest.mark.parametrize("n", [2, 3, 8])
def test_calls_behind_each_other_under_schedulers(library, n, push):
    for seed in range(4):
        library.schedule(seed)
        with World(library, n) as world:
            calls = [
                Rows(n, "float32", 5, 21, seed=seed, push=push),
                Rows(n, "bfloat16", 3, 48, seed=seed, push=True, in_place=True),
                Rows(n, "float16", 1, 40, seed=seed, push=push),
            ]
            for blocks, call in zip((2, 1, 3), calls, strict=True):
                world.rms_norm(call.norm(), blocks=blocks, lanes=1 + seed)
            world.synchronize()
            assert world.failed() == []
            assert all(call.is_right() for call in calls)


@pytest.mark.parametrize("hidden", [40, 8192 + 9, 8192 + 16])
def test_threads_and_blocks_do_not_matter(library, hidden):
    """Also where a thread holds some of its units, and makes others twice."""
    library.schedule(-1)
    for name in ("float32", "float16"):
        for lanes, blocks in ((1, 1), (3, 2), (7, 1), (16, 2)):
            with World(library, 2) as world:
                call = Rows(2, name, 2, hidden, push=lanes % 2 == 1, in_place=lanes % 2 == 1)
                world.rms_norm(call.norm(), lanes=lanes, blocks=blocks, timeout_ms=60_000)
                world.synchronize()
                assert call.is_right(), (name, lanes, blocks)


@pytest.mark.parametrize("push", [False, True])
def test_a_missing_rank_is_named(library, push):
    n, gone = 4, 2
    with World(library, n) as world:
        library.schedule(5)
        call = Rows(n, "float32", 6, 16, push=push)
        world.rms_norm(call.norm(), absent=1 << gone, timeout_ms=50)
        world.synchronize()
        records = [world.error(rank) for rank in world.failed()]
        assert [record.rank for record in records] == [0, 1, 3]
        assert {TIMEOUT} <= {record.kind for record in records} <= {TIMEOUT, FOLLOWED}
        assert {record.peer for record in records if record.kind == TIMEOUT} == {gone}
        assert all((out == 0).all() for out in call.outs), "rows were made without it"
        world.each("group_reset")
        world.rms_norm(call.norm())
        world.synchronize()
        assert world.failed() == []
        assert call.is_right()


def test_bad_launches_are_refused(library):
    call = Rows(2, "float32", 2, 8)
    with World(library, 2) as world, World(library, 2, peers=True) as peers:
        for options, status in (
            ({"blocks": 9}, ARGUMENT),
            ({"lanes": 17}, ARGUMENT),
            ({"blocks": -1}, ARGUMENT),
        ):
            with pytest.raises(DeviceError) as caught:
                world.rms_norm(call.norm(), **options)
            assert caught.value.status == status
        for change, text in (
            ({"dtype": int(DType.INT32)}, "no RMSNorm of dtype 2"),
            ({"dtype": 99}, "no RMSNorm of dtype 99"),
            ({"hidden": 0}, "no elements"),
            ({"weight": None}, "weight of rank 0 is null"),
            ({"weight": call.weight.ctypes.data + 2}, "not aligned"),
        ):
            norm = call.norm()
            for name, value in change.items():
                setattr(norm, name, value)
            with pytest.raises(DeviceError, match=text) as caught:
                world.rms_norm(norm)
            assert caught.value.status == ARGUMENT
        with pytest.raises(DeviceError, match="virtual ranks"):
            peers.rms_norm(call.norm())
    with World(library, 8, max_blocks=64) as world, pytest.raises(DeviceError) as caught:
        world.rms_norm(Rows(8, "float32", 99, 8).norm(), blocks=9)
    assert caught.value.status == TOO_LARGE
