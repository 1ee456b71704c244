"""The in-order binary tree and its twin."""

import numpy as np
import pytest

from pycoll.algorithms.double_tree import node


@pytest.mark.parametrize("n", range(2, 65))
def test_it_is_a_binary_tree_in_order(n):
    places = np.arange(n)
    tree = node(places, n)
    found = []
    for place in places:
        for has, child in ((tree.has_left, tree.left), (tree.has_right, tree.right)):
            if has[place]:
                assert tree.parent[child[place]] == place
                assert tree.depth[child[place]] == tree.depth[place] + 1
                found.append(child[place])
    assert sorted(found) == list(range(1, n))
    assert tree.depth.max() <= (n - 1).bit_length()
    assert np.all(tree.left[tree.has_left] < places[tree.has_left])
    assert np.all(tree.right[tree.has_right] > places[tree.has_right])


@pytest.mark.parametrize("n", range(2, 65))
def test_inner_in_one_tree_means_leaf_in_the_other(n):
    ranks = np.arange(n)
    twin = n - 1 - ranks if n % 2 == 0 else (ranks - 1) % n
    inner = [tree.has_left | tree.has_right for tree in (node(ranks, n), node(twin, n))]
    both = np.flatnonzero(inner[0] & inner[1])
    assert both.tolist() == ([] if n % 2 == 0 else [0])


@pytest.mark.parametrize("n", [2, 3, 12, 33])
def test_one_place_at_a_time(n):
    table = node(np.arange(n), n)
    for place in range(n):
        for one, all_of_them in zip(node(place, n), table, strict=True):
            assert one == all_of_them[place]
