"""The fused kernels for a device, compiled for the host, against those of the CPU, bit for bit."""

import sys

import ml_dtypes
import numpy as np
import pytest

import oracle
from cuda.host_cupy import DeviceArray
from pycoll import kernels
from pycoll.errors import ArgumentError

TYPES = {
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float32": np.dtype(np.float32),
    "float64": np.dtype(np.float64),
}
LOW = [TYPES["float16"], TYPES["bfloat16"]]
# Gradient, state, copy: all that there are.
STEPS = [
    *((g, TYPES["float32"], c) for g in [*LOW, TYPES["float32"]] for c in (None, *LOW)),
    (TYPES["float64"], TYPES["float64"], None),
]
SIZES = [0, 1, 2, 3, 4, 5, 31, 32, 33, 255, 1023, 1024, 1025, 4099]
MISALIGNED = [(0, 0, 0, 0), (1, 1, 1, 1), (3, 3, 3, 3), (0, 1, 2, 3), (5, 5, 5, 6)]
KINDS = ["sgd", "momentum", "nesterov", "adamw"]


def ends_of_the_range(dtype):
    """Return numbers that are easily got wrong: NaN, infinities, subnormals, the largest."""
    info = ml_dtypes.finfo(dtype)
    largest, normal, tiny = info.max, info.smallest_normal, info.smallest_subnormal
    values = [0.0, np.nan, np.inf, largest, normal, tiny, normal - tiny, 1.0, 1 + info.eps]
    return np.array([*values, *(-np.array(values, dtype))], dtype)


def numbers(rng, dtype, size):
    """Return numbers of many magnitudes, those at the ends of the range among them."""
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        x = (rng.standard_normal(size) * np.exp2(rng.integers(-18, 12, size))).astype(dtype)
    ends = ends_of_the_range(dtype)
    at = rng.permutation(size)[: len(ends)]
    x[at[: len(ends)]] = rng.permutation(ends)[: len(at)]
    return x


class Pair:
    """A vector twice: on the host, and on the device `offset` elements from an aligned place."""

    def __init__(self, values, offset=0):
        self.host = values
        around = np.zeros(values.nbytes + 64 + offset * values.itemsize, np.uint8)
        start = -around.ctypes.data % 64 + offset * values.itemsize
        whole = around[start : start + values.nbytes].view(values.dtype)
        whole[...] = values
        self._around, self._inside = around, slice(start, start + values.nbytes)
        self.device = DeviceArray(whole)

    def check(self):
        """Compare the bits, and see that nothing was written beside the vector."""
        assert oracle.differences(self.device.get(), self.host) == ""
        if self.host.dtype == TYPES["bfloat16"]:  # its NaNs too are all alike
            assert self.device.get().tobytes() == self.host.tobytes()
        self._around[self._inside] = 0
        assert not self._around.any()


def step(kind, vectors, where, **options):
    """Take one step with the vectors of the host or those of the device."""
    param, grad, first, second, copy = (v and getattr(v, where) for v in vectors)
    scalars = {"rate": 0.013, "scale": 0.37, "copy": copy} | options
    with np.errstate(all="ignore"):
        if kind == "adamw":
            more = {"keep": 0.999, "beta1": 0.9, "beta2": 0.99, "root": 1.3, "eps": 1e-8}
            kernels.adamw(param, grad, first, second, **(more | scalars))
        else:
            moments = None if kind == "sgd" else first
            how = {"beta": 0.9, "decay": 0.03, "nesterov": kind == "nesterov"}
            kernels.sgd(param, grad, moments, **(how | scalars))


def vectors_of(rng, size, grad, state, copy, offsets=(0, 0, 0, 0)):
    """Return parameter, gradient, two states and the copy, as pairs."""
    made = [numbers(rng, dtype, size) for dtype in (state, grad, state, state)]
    made[3] = abs(made[3])
    pairs = [Pair(x, offset) for x, offset in zip(made, offsets, strict=True)]
    return [*pairs, copy and Pair(np.full(size, 7, copy), offsets[1])]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_has_the_bits_of_the_host(host_kernels, kind, size):
    rng = np.random.default_rng(size)
    for grad, state, copy in STEPS:
        vectors = vectors_of(rng, size, grad, state, copy)
        for _ in range(2):
            step(kind, vectors, "host")
            step(kind, vectors, "device")
        for v in vectors:
            if v is not None:
                v.check()


@pytest.mark.parametrize("offsets", MISALIGNED)
@pytest.mark.parametrize("kind", KINDS)
def test_vectors_may_begin_anywhere(host_kernels, kind, offsets):
    rng = np.random.default_rng(1)
    for size in (1, 3, 7, 1021):
        for grad, state, copy in STEPS:
            vectors = vectors_of(rng, size, grad, state, copy, offsets)
            step(kind, vectors, "host")
            step(kind, vectors, "device")
            for v in vectors:
                if v is not None:
                    v.check()


def test_scalars_are_rounded_first(host_kernels):
    """Those of float32 lose digits that would change results."""
    rng = np.random.default_rng(2)
    for kind in KINDS:
        for scalars in ({"rate": 1 / 3}, {"scale": 1 / 7}, {"rate": 1e-30, "scale": 1e30}):
            vectors = vectors_of(rng, 999, *STEPS[6][:2], None)
            step(kind, vectors, "host", **scalars)
            step(kind, vectors, "device", **scalars)
            for v in vectors[:4]:
                v.check()


@pytest.mark.parametrize("offset", [0, 1, 3])
@pytest.mark.parametrize("name", TYPES)
def test_unscale_and_count(host_kernels, name, offset):
    wide = TYPES["float64" if name == "float64" else "float32"]
    for size in SIZES:
        x = Pair(numbers(np.random.default_rng(size), TYPES[name], size), offset)
        for scale in (1 / 3, 1e30):
            out = Pair(np.zeros(size, wide), 2 * offset)
            with np.errstate(all="ignore"):
                expected = kernels.unscale(x.host, out.host, scale)
            assert kernels.unscale(x.device, out.device, scale) == expected
            assert size < 1023 or expected >= 4
            out.check()
        assert kernels.count_nonfinite(x.device) == kernels.count_nonfinite(x.host)
        x.check()


def test_unscale_in_place(host_kernels):
    x = Pair(numbers(np.random.default_rng(4), TYPES["float32"], 1000))
    with np.errstate(all="ignore"):
        expected = kernels.unscale(x.host, x.host, 0.1)
    assert kernels.unscale(x.device, x.device, 0.1) == expected
    x.check()


def test_what_is_counted_is_counted_in_every_place(host_kernels):
    for name, dtype in TYPES.items():
        for at in range(40):
            x = np.zeros(40, dtype)
            x[at] = -np.inf if at % 2 else np.nan
            assert kernels.count_nonfinite(DeviceArray(x)) == 1, (name, at)
            x[at] = ml_dtypes.finfo(dtype).max
            assert kernels.count_nonfinite(DeviceArray(x)) == 0, (name, at)


@pytest.mark.parametrize("offset", [0, 1, 3])
@pytest.mark.parametrize("name", TYPES)
def test_sums_of_squares_have_the_limbs_of_the_host(host_kernels, name, offset):
    mine, other = kernels.new_exact_sum(), kernels.new_exact_sum()
    for size in SIZES:
        rng = np.random.default_rng(size)
        x = Pair(numbers(rng, TYPES[name], size), offset)
        if name == "float64":  # of all magnitudes, squares that overflow among them
            with np.errstate(all="ignore"):
                x.host *= np.exp2(rng.integers(-600, 600, size))
            x.device[...] = DeviceArray(x.host)
        with np.errstate(all="ignore"):
            expected = kernels.add_squares(x.host, other)
        assert kernels.add_squares(x.device, mine) == expected
        np.testing.assert_array_equal(mine, other)
    assert (mine[:-1] >= 0).all()
    assert (mine[:-1] < 1 << 32).all()


def test_squares_of_all_exponents(host_kernels):
    """Every power of two alone, so that no limb hides what another one lacks."""
    for name, dtype in TYPES.items():
        bits = np.arange(1 << 16, dtype=np.uint16)
        if dtype.itemsize == 2:
            every = bits[:: 1 << 4].view(dtype)
        else:
            every = (bits[:: 1 << 4].astype(f"u{dtype.itemsize}") << (8 * dtype.itemsize - 16)) + 1
            every = every.view(dtype)
        for x in every[:: 8 if name == "float64" else 32]:
            mine, other = kernels.new_exact_sum(), kernels.new_exact_sum()
            one = np.array([x], dtype)
            with np.errstate(all="ignore"):
                expected = kernels.add_squares(one, other)
            assert kernels.add_squares(DeviceArray(one), mine) == expected, (name, x)
            np.testing.assert_array_equal(mine, other)


@pytest.mark.parametrize(
    ("dtype", "value", "size"),
    [(np.float32, 1.9999999, 1 << 20), (np.float64, 1.9999999999999998, 1 << 16)],
)
def test_many_squares_overflow_no_limb(host_kernels, dtype, value, size):
    """Of every alignment to the limbs: the upper one of two grows fastest."""
    for exponent in range(16 if dtype == np.float64 else 4):
        x = np.full(size, value * 2.0 ** (exponent * (1 if dtype == np.float64 else 4)), dtype)
        mine, other = kernels.new_exact_sum(), kernels.new_exact_sum()
        kernels.add_squares(x, other)
        kernels.add_squares(DeviceArray(x), mine)
        np.testing.assert_array_equal(mine, other)


@pytest.mark.parametrize("name", ["param", "grad", "first", "second", "copy"])
def test_vectors_of_a_step_lie_on_one_device(host_kernels, name):
    for most in ("device", "host"):
        few = {"device": "host", "host": "device"}[most]
        made = vectors_of(np.random.default_rng(0), 8, *STEPS[1])
        names = ["param", "grad", "first", "second", "copy"]
        given = {
            k: getattr(v, few if k == name else most) for k, v in zip(names, made, strict=True)
        }
        odd = "(param|grad|first|second|copy)" if most == "host" else name
        with pytest.raises(ArgumentError, match=f"{odd} lies in host memory"):
            kernels.adamw(**given, rate=1, keep=1, beta1=0.9, beta2=0.9, root=1, eps=1)


def test_bad_vectors_are_refused(host_kernels, monkeypatch):
    x, y, wide = (DeviceArray(np.zeros(n, t)) for n, t in ((4, "f4"), (8, "f4"), (4, "f8")))
    given = {"rate": 1, "beta": 0, "decay": 0}
    with pytest.raises(ArgumentError, match="grad has 8 elements, the parameter 4"):
        kernels.sgd(x, y, None, **given)
    with pytest.raises(ArgumentError, match="an optimizer state is float64, the parameter float32"):
        kernels.sgd(x, x, wide, **given)
    with pytest.raises(ArgumentError, match="no optimizer step for"):
        kernels.sgd(x, wide, None, **given)
    with pytest.raises(ArgumentError, match="no optimizer step for"):
        kernels.sgd(x, x, None, copy=x, **given)
    for bad in (y[::2], DeviceArray(np.zeros(4, np.int32))):
        with pytest.raises(ArgumentError, match=r"x is .*accepted are contiguous arrays"):
            kernels.count_nonfinite(bad)
    with pytest.raises(ArgumentError, match="out is float64"):
        kernels.unscale(x, wide, 1.0)
    for limbs in (x, np.zeros(70, np.int32), np.zeros(140, np.int64)[::2], [0] * 70):
        with pytest.raises(ArgumentError, match=r"limbs is an? .*new_exact_sum"):
            kernels.add_squares(x, limbs)
    with pytest.raises(ArgumentError, match="70 limbs"):
        kernels.add_squares(x, np.zeros(71, np.int64))
    slipped = np.zeros(33, np.uint8)[1:].view(np.float32)
    with pytest.raises(ArgumentError, match="not a multiple of the element size 4"):
        kernels.count_nonfinite(DeviceArray(slipped))
    monkeypatch.setattr(DeviceArray, "__dlpack_device__", lambda self: (2, 1))
    with pytest.raises(ArgumentError, match=r"x lies on device 1, .*Device\(1\)\.use\(\)"):
        kernels.count_nonfinite(x)


class Foreign:
    """An array that is not CuPy's."""

    def __init__(self, values):
        self._values = values
        self.__cuda_array_interface__ = {**values.__array_interface__, "version": 3}


def test_arrays_of_other_libraries(host_kernels, monkeypatch):
    """Nobody knows on which stream they are used next, so a step waits until it is done."""
    module, waits = sys.modules["cupy"], []
    facts = type("Facts", (), {"device": 0})
    monkeypatch.setattr(
        module.cuda.runtime, "pointerGetAttributes", lambda pointer: facts, raising=False
    )
    call = host_kernels.call

    def noted(name, *arguments):
        waits.append(name)
        call(name, *arguments)

    monkeypatch.setattr(host_kernels, "call", noted)
    x, g = np.ones(5, np.float32), np.full(5, 2, np.float32)
    kernels.sgd(Foreign(x), Foreign(g), None, rate=0.25, beta=0, decay=0)
    assert x.tolist() == [0.5] * 5
    assert waits == ["optim_step", "synchronize"]
    kernels.sgd(DeviceArray(x), DeviceArray(g), None, rate=0.25, beta=0, decay=0)
    assert waits == ["optim_step", "synchronize", "optim_step"]
    assert kernels.count_nonfinite(Foreign(x)) == 0
