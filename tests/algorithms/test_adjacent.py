"""Adjacent fold: virtual ranks of worlds that are not powers of two."""

import numpy as np
import pytest

from pycoll.algorithms.adjacent import adjacent, doublings, power_of_two


@pytest.mark.parametrize("n", range(1, 65))
def test_virtual_ranks_keep_the_order(n):
    world = adjacent(np.arange(n), n)
    acting = np.arange(n)[world.acts]
    assert world.p == power_of_two(n) == len(acting)
    np.testing.assert_array_equal(world.virtual[world.acts], np.arange(world.p))
    np.testing.assert_array_equal(world.first(np.arange(world.p)), acting)
    assert world.first(world.p) == n
    np.testing.assert_array_equal(world.spare, ~world.acts)
    spare = np.arange(n)[world.spare]
    np.testing.assert_array_equal(spare % 2, 1)
    np.testing.assert_array_equal(world.virtual[spare], world.virtual[spare - 1])


@pytest.mark.parametrize("n", range(2, 65))
def test_sizes_are_those_that_occur(n):
    world = adjacent(np.arange(n), n)
    first = world.first(np.arange(0, world.p + 1, 2))
    assert set(world.sizes) == set(np.diff(first))


def test_powers_of_two():
    assert [power_of_two(n) for n in (1, 2, 3, 4, 7, 8, 9)] == [1, 2, 2, 4, 4, 8, 8]
    assert [doublings(n) for n in (1, 2, 3, 4, 5)] == [[], [1], [1, 2], [1, 2], [1, 2, 4]]
