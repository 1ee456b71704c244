"""The same on a real device; skipped where there is none. `benchmarks/gpu/run.sh` does more."""

import gc

import numpy as np
import pytest

import oracle
import pycoll
from pycoll import kernels
from pycoll.algorithms import ALGORITHMS
from pycoll.cuda.device import arrays
from pycoll.errors import CollTimeout

NAMES = [f"{a.collective}/{a.name}" for a in ALGORITHMS if a.collective == "all_reduce"]


@pytest.mark.parametrize("entry", NAMES)
@pytest.mark.parametrize("n", [2, 4, 8])
def test_virtual_ranks(device, n, entry):
    name = entry.partition("/")[2]
    chosen = next(a for a in ALGORITHMS if (a.collective, a.name) == ("all_reduce", name))
    if not chosen.worlds(n):
        pytest.skip(f"{name} is not defined for {n} ranks")
    rng = np.random.default_rng(n)
    kind = "int32" if chosen.order == "any" else "float32"
    parts = [oracle.random(rng, kind, 10007) for _ in range(n)]
    want = oracle.reduce(parts, "sum", "rank" if chosen.order == "rank" else "tree")
    with pycoll.virtual_ranks(n) as ranks:
        xs = [device.asarray(part) for part in parts]
        outs = [device.full_like(x, 99) for x in xs]
        for got in ranks.all_reduce(xs, out=outs, algorithm=name, timeout=10):
            assert oracle.differences(got.get(), want) == ""
        ranks.synchronize(20)


def test_a_stacked_array_on_a_stream_of_its_own(device):
    stream = device.cuda.Stream(non_blocking=True)
    with pycoll.virtual_ranks(4) as ranks:
        with stream:
            x = device.ones((4, 1 << 20), device.float32)
            total = ranks.all_reduce(x)
        stream.synchronize()
        assert bool((total == 4).all())


def test_a_stream_of_the_callers_outlives_what_looked_at_it(device):
    stream = device.cuda.Stream(non_blocking=True)
    with arrays.external(stream.ptr):
        pass
    gc.collect()
    stream.synchronize()
    assert stream.is_non_blocking


def test_a_rank_that_does_not_come(device):
    with pycoll.virtual_ranks(3) as ranks:
        xs = [device.ones(100, device.float32) for _ in range(3)]
        ranks.bind("all_reduce", xs, algorithm="ring")(0.05, absent=0b010)
        with pytest.raises(CollTimeout, match="for rank 1"):
            ranks.synchronize(10)
        ranks.reset()
        assert bool((ranks.all_reduce(xs)[0] == 3).all())
        ranks.synchronize(10)


def test_optimizer_steps_have_the_bits_of_the_host(device):
    rng = np.random.default_rng(0)
    grad = rng.standard_normal(10007).astype(np.float16)
    values = [grad, *(abs(rng.standard_normal(10007)).astype(np.float32) for _ in range(3))]
    moved = [device.asarray(x) for x in values]
    for g, param, first, second in (values, moved):
        kernels.sgd(param[1:], g[1:], first[1:], rate=0.01, beta=0.9, decay=0.1, nesterov=True)
        scalars = {"rate": 0.01, "beta1": 0.9, "beta2": 0.99, "root": 1.1, "eps": 1e-8}
        kernels.adamw(param, g, first, second, keep=0.99, scale=1 / 3, **scalars)
    for x, y in zip(values, moved, strict=True):
        assert oracle.differences(y.get(), x) == ""


def test_checks_and_sums_of_squares_are_those_of_the_host(device):
    rng = np.random.default_rng(0)
    x = rng.standard_normal(100_003) * np.exp2(rng.uniform(-50, 50, 100_003))
    for dtype in (np.float32, np.float64):
        host = x.astype(dtype)
        host[::1000] = np.inf
        moved, limbs = device.asarray(host), [kernels.new_exact_sum() for _ in range(2)]
        for start in (0, 1):
            counts = [
                (
                    kernels.count_nonfinite(v),
                    kernels.unscale(v, v, 0.5),
                    kernels.add_squares(v, total),
                )
                for v, total in ((host[start:], limbs[0]), (moved[start:], limbs[1]))
            ]
            assert counts[0] == counts[1]
        assert oracle.differences(moved.get(), host) == ""
        np.testing.assert_array_equal(*limbs)


def test_a_communicator_of_one_rank(device):
    with pycoll.init() as comm:
        x = comm.empty(1000, device.float32, device="cuda")
        x[...] = 3
        assert bool((comm.all_reduce(x) == 3).all())
        assert comm.all_reduce(x, async_op=True).synchronize(10).shape == (1000,)
