"""The stated formula of RMSNorm: each operation, in the stated order, one number at a time."""

import math

import numpy as np
import pytest

import oracle
from pycoll.errors import ArgumentError
from pycoll.runtime.arrays.host_arrays import view
from pycoll.runtime.arrays.rms_norm import (
    LANES,
    UNIT,
    check_eps,
    check_norm,
    check_order,
    reference,
)
from pycoll.types import DType

TYPES = ["float32", "float16", "bfloat16"]
F = np.float32


def halves(values):
    """Add numbers along a binary tree, by recursion."""
    if len(values) == 1:
        return values[0]
    middle = len(values) // 2
    return F(halves(values[:middle]) + halves(values[middle:]))


def row_by_hand(s, weight, residual, eps):
    """Normalise one row, one scalar of float32 after the other."""
    kind, hidden = s.dtype, len(s)
    pairs = zip(s, s if residual is None else residual, strict=True)
    h = s if residual is None else [kind.type(F(F(a) + F(b))) for a, b in pairs]
    units = -(-hidden // UNIT)
    squares = [F(F(v) * F(v)) for v in h] + [F(0)] * (units * UNIT - hidden)
    lanes = [F(0)] * LANES
    for unit in range(units):
        part = halves(squares[unit * UNIT : (unit + 1) * UNIT])
        lanes[unit % LANES] = F(lanes[unit % LANES] + part)
    root = F(np.sqrt(F(F(halves(lanes) / F(hidden)) + F(eps))))
    y = [kind.type(F(F(F(v) / root) * F(w))) for v, w in zip(h, weight, strict=True)]
    return np.array(y, kind), np.array(h, kind)


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("hidden", [1, 7, 96, 4096, 8299])
def test_each_number_is_that_of_the_formula(name, hidden):
    rng = np.random.default_rng(hidden)
    dtype = DType[name.upper()]
    for adds in (False, True):
        s, weight, residual = (oracle.random(rng, name, k) for k in ((2, hidden), hidden, hidden))
        residual = np.stack([residual, residual[::-1]]) if adds else None
        y, h = reference(s, weight, residual, 1e-5, dtype)
        for row in range(2):
            with np.errstate(all="ignore"):
                more = None if residual is None else residual[row]
                wants = row_by_hand(s[row], weight, more, 1e-5)
            for got, want in zip((y, h), wants, strict=True):
                assert oracle.differences(got[row].view(want.dtype), want) == ""


def test_it_is_the_root_mean_square():
    rng = np.random.default_rng(0)
    s, weight = rng.standard_normal((3, 5000)).astype(F), rng.standard_normal(5000).astype(F)
    wide = s.astype(np.float64)
    want = wide / np.sqrt((wide**2).mean(axis=1, keepdims=True) + 1e-6) * weight
    got, h = reference(s, weight, None, 1e-6, DType.FLOAT32)
    np.testing.assert_allclose(got, want, rtol=1e-6)
    assert h is s


@pytest.mark.parametrize("name", TYPES)
def test_special_values(name):
    """A row with a NaN or an infinity is one of NaNs and zeros; one of zeros stays what it is."""
    s = np.zeros((4, 64), oracle.dtype(name))
    s[0, 5], s[1, 9] = math.nan, math.inf
    s[3, :12] = oracle.special(name)
    weight = np.ones(64, s.dtype)
    y, _ = reference(s, weight, None, 1e-6, DType[name.upper()])
    y = y.view(s.dtype)
    assert np.isnan(y[0].astype(F)).all()
    assert np.isnan(F(y[1, 9]))
    assert (np.delete(y[1], 9) == 0).all()
    assert y[2].tobytes() == s[2].tobytes()
    assert np.isnan(y[3].astype(F)).all()


def arrays(hidden=6, name="float32", rows=4):
    return np.ones((rows, hidden), oracle.dtype(name)), np.ones(hidden, oracle.dtype(name))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"x": np.ones((2, 6))}, r"x is float64\[2, 6\]; accepted are rows"),
        ({"x": np.ones((2, 0), F)}, r"x is float32\[2, 0\]"),
        ({"x": F(3)}, r"x is float32\[\]"),
        ({"x": [1.0]}, "x is a list"),
        ({"weight": np.ones(5, F)}, r"weight is float32\[5\].*float32\[6\]"),
        ({"weight": np.ones(6)}, "weight is float64"),
        ({"weight": None}, "weight is None"),
        ({"weight": np.ones(12, F)[::2]}, "weight is not C-contiguous"),
        ({"residual": np.ones((3, 6), F)}, r"residual is float32\[3, 6\].*float32\[4, 6\]"),
        ({"residual": np.ones((4, 6), np.float16)}, "residual is float16"),
        ({"out": np.ones((4, 5), F)}, "out has shape"),
        ({"out": np.ones((4, 6), np.float16)}, "out has dtype float16"),
        ({"residual_out": np.ones((4, 6), F)}, "no residual"),
    ],
)
def test_what_cannot_be_used_is_refused(change, text):
    x, weight = arrays()
    given = {"x": x, "weight": weight, "residual": None, "out": None, "residual_out": None}
    with pytest.raises(ArgumentError, match=text):
        check_norm(view, **(given | change))


def test_outputs_lie_apart():
    whole = np.ones(200, F)
    x, residual, out, kept = (whole[48 * i :][:24].reshape(4, 6) for i in range(4))
    weight = whole[192:198]
    for y, h in ((out, kept), (x, residual), (out, None), (None, kept)):
        check_norm(view, x, weight, residual, y, h)
    shifted = whole[6:30].reshape(4, 6)
    for y, h, text in (
        (residual, kept, "out overlaps residual"),
        (out, x, "residual_out overlaps x"),
        (out, out, "out overlaps residual_out"),
        (shifted, kept, "out overlaps x"),
        (whole[176:].reshape(4, 6), kept, "out overlaps weight"),
    ):
        with pytest.raises(ArgumentError, match=text):
            check_norm(view, x, weight, residual, y, h)


def test_numbers_that_cannot_be_used_are_refused():
    assert check_eps(0) == 0
    for eps in (-1e-6, math.nan, math.inf, "x", None):
        with pytest.raises(ArgumentError, match="eps="):
            check_eps(eps)
    assert [check_order(o) for o in (None, "tree", "rank")] == ["tree", "tree", "rank"]
    with pytest.raises(ArgumentError, match="accepted: 'tree', 'rank'"):
        check_order("any")
