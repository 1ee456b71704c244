"""Folds over many chunks are cut only where others begin or end: the plans are the same."""

import numpy as np
import pytest

from pycoll.algorithms import find
from pycoll.schedule.ir import ACC, IN, OUT, TMP, algorithm, at, fold
from pycoll.schedule.lowering.compile import peer_plan, peer_plans
from pycoll.schedule.lowering.messages import message_plan, message_plans
from pycoll.schedule.lowering.near import near_table

CHUNKS, SLOTS = 30, 12


def random_algorithm(seed, n, buffers):
    """Folds of one rank a round, over any chunks of any ranks; some wrap around."""
    draw = np.random.default_rng(seed)

    def piece():
        buffer = buffers[draw.integers(len(buffers))]
        return draw.integers(n), buffer, draw.integers(CHUNKS)

    rounds = []
    for _ in range(10):
        count = int(draw.integers(1, 1 + (SLOTS if draw.integers(2) else CHUNKS)))
        pieces = [piece() for _ in range(draw.integers(2, 4))]
        most = SLOTS - min(count, SLOTS) + 1
        pieces = [
            (r, b, c % most if b == TMP else c) if b != TMP or count <= SLOTS else (r, OUT, c)
            for r, b, c in pieces
        ]
        if pieces[-1][1] == IN:
            pieces[-1] = (pieces[-1][0], OUT, pieces[-1][2])
        rounds.append((int(draw.integers(n)), count, pieces))

    @algorithm("all_reduce", f"random{seed}", chunks=CHUNKS, slots=SLOTS, in_place=False)
    def found(rank, n):
        for owner, count, pieces in rounds:
            *srcs, to = [at(int(r), b, int(c)) for r, b, c in pieces]
            yield fold(srcs, to=to, count=count, where=rank == owner)

    return found


def one_by_one(one, schedule, options):
    return [one(schedule, rank, **options) for rank in range(schedule.n)]


def compiled(one, everybody, schedule, **options):
    try:
        plans = everybody(schedule, **options)
    except Exception as error:  # folds that overlap themselves: refused alike
        with pytest.raises(type(error)):
            one_by_one(one, schedule, options)
        return 0
    for rank, mine in enumerate(one_by_one(one, schedule, options)):
        plan = plans[rank]
        assert np.array_equal(mine.code, plan.code), (rank, options)
        assert np.array_equal(mine.operands, plan.operands), (rank, options)
    return 1


@pytest.mark.parametrize("n", [2, 4])
def test_the_same_bytes_whatever_overlaps(n):
    accepted = 0
    for seed in range(40):
        schedule = random_algorithm(seed, n, (IN, OUT, TMP, ACC)).schedule(n)
        for direct in (True, False):
            accepted += compiled(peer_plan, peer_plans, schedule, direct=direct)
        schedule = random_algorithm(seed, n, (IN, OUT, TMP)).schedule(n)
        for apart in (True, False):
            accepted += compiled(message_plan, message_plans, schedule, apart=apart)
    assert accepted > 80


def test_what_is_listed_grows_with_the_folds_not_with_the_chunks():
    """One rank's part of halving and doubling: all of its folds are over one range of chunks."""
    entry = find("all_reduce", "halving_doubling")
    small, large = (len(near_table(entry.schedule(n), 5).owner) for n in (64, 4096))
    assert large < 10 * small  # of 64 times as many ranks
