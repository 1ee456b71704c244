"""The receive schedule of the circulant broadcast."""

import numpy as np
import pytest

from pycoll.algorithms.circulant import base_block, receive_schedule, skips


def test_skips_halve():
    assert skips(1) == [1]
    assert skips(17) == [1, 2, 3, 5, 9, 17]
    assert skips(64) == [1, 2, 4, 8, 16, 32, 64]


def test_base_blocks():
    expected = [5, 0, 1, 2, 0, 3, 0, 1, 2, 4, 0, 1, 2, 0, 3, 0, 1]  # root, 1, 2, 3, 3 + 1, 5, ...
    assert base_block(np.arange(17), 17).tolist() == expected


@pytest.mark.parametrize("n", [*range(2, 130), 255, 256, 257, 1000, 1023, 1024, 1025, 4097])
def test_blocks_are_different_and_there_in_time(n):
    """The conditions under which k blocks arrive in k - 1 + q rounds, whatever k is."""
    skip = skips(n)
    q = len(skip) - 1
    everyone = np.arange(n)
    blocks, base = receive_schedule(everyone, n), base_block(everyone, n)
    others = everyone[1:]
    in_phase = np.where(blocks == base, base - q, blocks)
    np.testing.assert_array_equal(np.sort(in_phase[:, others], axis=0).T, [range(-q, 0)] * (n - 1))
    assert np.all(np.sum(blocks[:, others] == base[others], axis=0) == 1)
    for j in range(q):
        sender = (others - skip[j]) % n
        wanted = blocks[j, others]
        there = (sender == 0) | (wanted == base[sender] - q)
        there |= np.any(blocks[:j, sender] == wanted, axis=0)
        assert np.all(there), f"round {j}"


@pytest.mark.parametrize("n", [1, 2, 5, 12, 33])
def test_any_shape_of_places(n):
    table = receive_schedule(np.arange(n), n)
    for place in range(n):
        np.testing.assert_array_equal(receive_schedule(place, n), table[:, place])
    np.testing.assert_array_equal(
        receive_schedule(np.arange(n).reshape(1, n), n), table[:, np.newaxis]
    )
