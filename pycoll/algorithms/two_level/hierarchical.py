"""Hierarchies: an all-reduce over n = groups * local ranks as a product of smaller collectives.

Rank ``group * local + i`` is number i of its group. Inside the groups the vector is
reduce-scattered; number i of each group then all-reduces its share with its counterparts; inside
the groups the shares are gathered. What runs across groups may be such a product again: with
``local2`` groups to a group of groups, and ``local3`` of these to a larger one, there are four
levels; 0 is no such level. m is the size of the full vector.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial, update_wrapper

from pycoll.algorithms import direct, halving_doubling, ring
from pycoll.errors import ScheduleError
from pycoll.schedule.ir import IN, OUT, TMP, Algorithm, algorithm, at

_SCATTER, _GATHER = direct.reduce_scatter[0], direct.all_gather_push  # inside the groups


def group_size(n: int, local: int, allowed: Callable[[int], bool]) -> int:
    """Check the size of the groups, or choose it.

    Args:
        n: World size.
        local: Size of a group; 0 stands for the largest that is possible and at most sqrt(n).
        allowed: Tells which sizes are allowed.

    Raises:
        ScheduleError: If the size is not allowed, or groups of it do not divide the world.
    """
    if local == 0:
        sizes = range(1, math.isqrt(n) + 1)
        return max(size for size in sizes if n % size == 0 and allowed(size))
    if local < 0 or n % local or not allowed(local):
        possible = [size for size in range(1, n + 1) if n % size == 0 and allowed(size)]
        raise ScheduleError(f"{n} ranks make no groups of {local}; possible: {possible}")
    return local


def _rounds(rank, n, local, local2, local3, *, beyond, allowed):
    """Reduce-scatter inside groups of ``local`` ranks, all-reduce across, all-gather inside.

    Cost: rounds of the three; bytes per rank 2 (local - 1) / local * m, and those of the
    all-reduce across on m / local.
    Source: Cho, Finkler, Serrano, Kung and Hunter, "BlueConnect: decomposing all-reduce for
    deep learning on heterogeneous network hierarchy", MLSys 2019.
    """
    local = group_size(n, local, allowed)
    outer = beyond(n // local, local2, local3)
    share, group, me = outer.chunks, rank // local, rank % local
    first = rank - me

    def inside(piece, source=IN):
        buffer = source if piece.buffer == IN else piece.buffer
        return at(first + piece.rank % local, buffer, piece.chunk * share)

    def between(piece):
        peer = piece.rank % outer.n * local + me
        if piece.buffer == TMP:
            return at(peer, TMP, piece.chunk)
        return at(peer, OUT, me * share + piece.chunk % share)

    for folds in _SCATTER.schedule(local).rounds(me):
        yield [f.placed(inside, share) for f in folds]
    for folds in outer.rounds(group):
        yield [f.placed(between) for f in folds]
    for folds in _GATHER.schedule(local).rounds(me):
        yield [f.placed(lambda piece: inside(piece, OUT), share) for f in folds]


def _product(
    name: str,
    across: Algorithm,
    *,
    order: str = "any",
    allowed: Callable[[int], bool] = lambda size: True,
) -> Algorithm:
    """Compose an all-reduce.

    Args:
        name: Name of the composition.
        across: All-reduce across the groups, in place, where no fold wraps around the last chunk.
        order: Reduction order of the whole.
        allowed: Tells which group sizes are allowed.
    """

    def beyond(groups, local2, local3):
        if not local2 and not local3:
            return across.schedule(groups)
        return anywhere.schedule(groups, local=local2 or 1, local2=local3)

    def chunks(n, local, local2, local3):
        local = group_size(n, local, allowed)
        return local * beyond(n // local, local2, local3).chunks

    def slots(n, local, local2, local3):
        local = group_size(n, local, allowed)
        outer = beyond(n // local, local2, local3)
        inner = max(_SCATTER.schedule(local).slots, _GATHER.schedule(local).slots)
        return max(inner * outer.chunks, outer.slots)

    rounds = update_wrapper(partial(_rounds, beyond=beyond, allowed=allowed), _rounds)
    product = algorithm(
        "all_reduce",
        name,
        chunks=chunks,
        slots=slots,
        order=order,
        worlds=lambda n: group_size(n, 0, allowed) > 1,
        local=0,
        local2=0,
        local3=0,
    )(rounds)
    anywhere = replace(product, worlds=lambda groups: True)  # sizes are given, or refused
    return product


hierarchical: Algorithm = _product("hierarchical", halving_doubling.all_reduce)
hierarchical_ring: Algorithm = _product("hierarchical_ring", ring.all_reduce)
# Trees nest: groups of 2, 4, 8, ... ranks give the in-order tree.
hierarchical_tree: Algorithm = _product(
    "hierarchical_tree",
    halving_doubling.all_reduce,
    order="tree",
    allowed=lambda size: size & (size - 1) == 0,
)
