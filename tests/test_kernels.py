"""The fused kernels against the same formulas in NumPy, bit for bit, on every instruction set."""

import math

import ml_dtypes
import numpy as np
import pytest

from pycoll import _C, kernels
from pycoll.errors import ArgumentError
from pycoll.parallel.optim import SGD, AdamW, UpdateArgs

ISAS = ["base", "avx2", "avx512"]
SIZES = [1, 3, 16, 17, 1000, 4099]
TYPES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32}
OPTIMIZERS = [AdamW(), SGD(), SGD(momentum=0.9), SGD(momentum=0.9, nesterov=True, weight_decay=0.1)]


@pytest.fixture(params=ISAS)
def isa(request):
    before = _C.optim_isa()
    if not _C.optim_force_isa(request.param):
        pytest.skip(f"this CPU has no {request.param}")
    yield request.param
    _C.optim_force_isa(before)


def vectors(size, grad, wide, copy, slots, seed):
    rng = np.random.default_rng(seed)

    def normal(dtype, scale=1.0):
        return (rng.standard_normal(size) * scale).astype(dtype)

    named = {name: abs(normal(wide)) for name in slots}
    low = None if copy is None else np.zeros(size, copy)
    return UpdateArgs(3, 0.01, normal(wide), normal(grad, 0.3), named, 0.37, seed % 2 == 0, low)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=repr)
def test_steps_have_the_bits_of_array_operations(isa, optimizer, size):
    pairs = [
        (g, np.float32, c) for g in TYPES.values() for c in (None, np.float16, TYPES["bfloat16"])
    ]
    for i, (grad, wide, copy) in enumerate([*pairs, (np.float64, np.float64, None)]):
        fused, plain = (vectors(size, grad, wide, copy, optimizer.slots, i) for _ in range(2))
        optimizer.update(fused)
        optimizer.update(plain, fused=False)
        np.testing.assert_array_equal(fused.param, plain.param)
        for name in optimizer.slots:
            np.testing.assert_array_equal(fused.slots[name], plain.slots[name])
        if copy is not None:
            np.testing.assert_array_equal(fused.copy.view(np.uint16), plain.copy.view(np.uint16))


@pytest.mark.parametrize("name", [*TYPES, "float64"])
def test_unscale_and_check(isa, name):
    dtype = TYPES.get(name, np.float64)
    wide = np.float64 if name == "float64" else np.float32
    for size in SIZES:
        x = np.random.default_rng(size).standard_normal(size).astype(dtype)
        x[:: max(1, size // 5)] = np.inf
        x[size // 2] = np.nan
        out = np.empty(size, wide)
        count = kernels.unscale(x, out, 1 / 3)
        expected = x.astype(wide) * wide(1 / 3)
        np.testing.assert_array_equal(out, expected)
        assert count == np.count_nonzero(~np.isfinite(expected))
        assert kernels.count_nonfinite(x) == count


def test_unscale_counts_what_overflows(isa):
    assert kernels.unscale(np.full(5, 3e38, np.float32), np.empty(5, np.float32), 10.0) == 5


@pytest.mark.parametrize("name", [*TYPES, "float64"])
@pytest.mark.parametrize("spread", [0, 30, 100, 300])
def test_sums_of_squares_are_exact(isa, name, spread):
    dtype = TYPES.get(name, np.float64)
    rng = np.random.default_rng(spread)
    for size in SIZES:
        with np.errstate(over="ignore", under="ignore"):
            exponents = rng.uniform(-spread, spread, size) / (1 if name == "float64" else 10)
            x = (rng.standard_normal(size) * 2.0**exponents).astype(dtype)
        x[~np.isfinite(x)] = 1
        wide = x.astype(np.float64)
        whole = kernels.new_exact_sum()
        assert kernels.add_squares(x, whole) == 0
        assert kernels.exact_sum(whole) == math.fsum(wide * wide)
        parts = [kernels.new_exact_sum() for _ in range(3)]
        for part, piece in zip(parts, np.array_split(x, 3), strict=True):
            kernels.add_squares(np.ascontiguousarray(piece), part)
        assert kernels.exact_sum(sum(parts)) == kernels.exact_sum(whole)


def test_sums_of_squares_at_the_ends_of_the_range(isa):
    for values in ([1e150, 1.0, 1e-150], [5e-324, 1e-160], [1.3e154, 1.0], [0.0, -0.0]):
        x, limbs = np.array(values), kernels.new_exact_sum()
        kernels.add_squares(x, limbs)
        with np.errstate(under="ignore"):
            assert kernels.exact_sum(limbs) == math.fsum(x * x)
    limbs = kernels.new_exact_sum()
    assert kernels.add_squares(np.array([1.0, np.inf, -np.inf, np.nan, 2.0]), limbs) == 3
    assert kernels.exact_sum(limbs) == 5.0
    for _ in range(3):
        kernels.add_squares(np.full(1, 1.3e154), limbs)
    assert kernels.exact_sum(limbs) == math.inf


def test_many_squares_do_not_overflow_a_limb():
    x, limbs = np.full(1 << 20, 1.9999999, np.float32), kernels.new_exact_sum()
    kernels.add_squares(x, limbs)
    assert kernels.exact_sum(limbs) == float(x[0]) ** 2 * (1 << 20)
    assert (limbs[:-1] >= 0).all()
    assert (limbs[:-1] < 1 << 32).all()


def test_bad_vectors_are_refused():
    x, y = np.zeros(4, np.float32), np.zeros(8, np.float32)
    with pytest.raises(ArgumentError, match="grad has 8 elements, the parameter 4"):
        kernels.sgd(x, y, None, rate=1, beta=0, decay=0)
    with pytest.raises(ArgumentError, match="accepted are contiguous arrays"):
        kernels.count_nonfinite(y[::2])
    with pytest.raises(ArgumentError, match="accepted are contiguous arrays"):
        kernels.count_nonfinite(np.zeros(4, np.int32))
    with pytest.raises(ArgumentError, match="out is float64"):
        kernels.unscale(x, np.zeros(4), 1.0)
    with pytest.raises(ArgumentError, match="an optimizer state is float64"):
        kernels.sgd(x, x.copy(), np.zeros(4), rate=1, beta=0, decay=0)


def test_steps_agree_with_torch():
    torch = pytest.importorskip("torch", reason="compares with PyTorch's optimizers")
    rng = np.random.default_rng(0)
    for make, ours in [
        (lambda p: torch.optim.AdamW([p], lr=0.01), AdamW(lr=0.01)),
        (lambda p: torch.optim.SGD([p], lr=0.1, momentum=0.9), SGD(0.1, 0.9)),
        (
            lambda p: torch.optim.SGD([p], 0.1, 0.9, weight_decay=0.1, nesterov=True),
            SGD(0.1, 0.9, True, 0.1),
        ),
    ]:
        p = rng.standard_normal(100)
        theirs = torch.nn.Parameter(torch.tensor(p))
        optimizer, slots = make(theirs), {name: np.zeros(100) for name in ours.slots}
        for step in range(1, 21):
            g = rng.standard_normal(100)
            theirs.grad = torch.tensor(g)
            optimizer.step()
            ours.update(UpdateArgs(step, ours.lr, p, g, slots))
        np.testing.assert_allclose(p, theirs.detach().numpy(), rtol=1e-12)
