"""Random numbers by global position: parts agree with the whole, and the statistics are right."""

import math
import statistics

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pycoll.errors import ArgumentError
from pycoll.parallel import random
from pycoll.parallel.random import Key

KEY = Key(7).fold("layer", "weight")


@st.composite
def parts(draw):
    shape = draw(st.lists(st.integers(1, 9), min_size=1, max_size=4))
    part = []
    for count in shape:
        start = draw(st.integers(0, count))
        part.append(slice(start, draw(st.integers(start, count))))
    return shape, part[: draw(st.integers(0, len(shape)))]


@settings(max_examples=200, deadline=None)
@given(parts(), st.sampled_from([random.words, random.normal, random.uniform]))
def test_a_part_is_a_part_of_the_whole(case, function):
    shape, part = case
    whole = function(KEY, shape)
    assert np.array_equal(function(KEY, shape, part), whole[tuple(part)])


def test_words_are_philox():
    flat = random.words(KEY, (10,))
    philox = np.random.Philox(key=KEY.number(), counter=0)
    assert flat.tolist() == philox.random_raw(10).tolist()
    far = 4 * 10**15 + 1  # no loop goes there
    philox = np.random.Philox(key=KEY.number(), counter=10**15)
    assert random.words(KEY, (far + 9,), [slice(far, far + 3)]).tolist() == (
        philox.random_raw(4)[1:].tolist()
    )


def test_the_same_numbers_for_ever():
    """A change of these breaks every stored experiment."""
    assert hex(Key(0).fold("a", 1).number()) == "0x69b425b0eaa52837e4f645bc57833def"
    assert random.words(Key(0), (2,)).tolist() == [17494197706396558252, 10455916937358959473]
    shown = [x.hex() for x in random.normal(Key(0), (2,)).tolist()]
    assert shown == ["0x1.a111d3dd68dc6p+0", "0x1.58a0617f45671p-3"]


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("axis", [0, 1])
def test_initialisers_make_parts(world_size, axis):
    whole = random.normal(KEY, (8, 12), std=0.02)
    shape = [8, 12]
    shape[axis] //= world_size
    pieces = [
        random.normal_init(KEY, 0.02, axis, rank, world_size)(tuple(shape))
        for rank in range(world_size)
    ]
    assert np.array_equal(np.concatenate(pieces, axis), whole)
    assert np.array_equal(random.normal_init(KEY, 0.02)((8, 12)), whole)


def test_keys_differ():
    keys = [Key(0), Key(1), Key(0).fold("a"), Key(0).fold("a", "b"), Key(0).fold("a.b"), KEY]
    keys += [Key(0).fold("dropout", step) for step in range(100)]
    assert len({random.words(key, (1,)).item() for key in keys}) == len(keys)
    assert Key(0).fold("a").fold("b", 3) == Key(0).fold("a", "b", 3)
    assert KEY.name == "layer.weight"


def test_normal_is_normal():
    """Moments within five standard errors, and quantiles as Python's own inverse has them."""
    n = 200_000
    x = random.normal(KEY, (n,))
    moments = [np.mean(x**k) for k in (1, 2, 3, 4)]
    errors = [math.sqrt(v / n) for v in (1, 2, 15, 96)]
    assert np.all(np.abs(np.subtract(moments, [0, 1, 0, 3])) < 5 * np.array(errors))
    inverse = statistics.NormalDist().inv_cdf
    u = np.array([2**-53, 1e-12, 1e-9, 1e-4, 0.0749, 0.075, 0.3, 0.5, 0.925, 0.9251, 1 - 1e-9])
    want = [inverse(value) for value in u]
    np.testing.assert_allclose(random._percentage_point(u), want, rtol=1e-14, atol=0)
    assert np.abs(np.corrcoef(x[:-1], x[1:])[0, 1]) < 5 / math.sqrt(n)


def test_own_logarithm():
    x = np.concatenate([np.geomspace(1e-300, 1, 10_001), 1 - np.geomspace(1e-16, 0.5, 999)])
    np.testing.assert_allclose(random._log(x), np.log(x), rtol=4e-16, atol=1e-18)


def test_uniform_and_integers():
    for dtype in (np.float32, np.float64):
        x = random.uniform(KEY, (100_000,), dtype=dtype)
        assert x.dtype == dtype
        assert 0 <= x.min() < 1e-3 < 0.999 < x.max() < 1
        assert abs(x.mean() - 0.5) < 5 * math.sqrt(1 / 12 / len(x))
    counts = np.bincount(random.integers(KEY, 7, (70_000,)), minlength=7)
    assert len(counts) == 7
    assert np.sum((counts - 10_000) ** 2 / 10_000) < 33  # chi square, 6 degrees: p < 1e-5


@pytest.mark.parametrize("drop", [0.0, 0.1, 0.5])
def test_masks(drop):
    keep = random.keep_mask(KEY, drop, (100, 1000))
    assert keep.dtype == bool
    error = math.sqrt(drop * (1 - drop) / keep.size)
    assert abs(keep.mean() - (1 - drop)) <= 5 * error


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: random.words(KEY, (4, 4), [slice(0, 5)]), "axis 0 of shape"),
        (lambda: random.words(KEY, (4,), [slice(0, 4, 2)]), "axis 0"),
        (lambda: random.words(KEY, (4,), [slice(0, 4)] * 2), "2 slices"),
        (lambda: random.keep_mask(KEY, 1.0, (4,)), "drop=1.0"),
        (lambda: random.integers(KEY, 0, (4,)), "high=0"),
    ],
)
def test_refusals(call, text):
    with pytest.raises(ArgumentError, match=text):
        call()
