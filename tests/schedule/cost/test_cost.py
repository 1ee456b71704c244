"""Costs: counts against formulas, against the lowered table, and by hand."""

import numpy as np
import pytest

from pycoll.algorithms import ALGORITHMS, find
from pycoll.config import Config
from pycoll.errors import ScheduleError
from pycoll.schedule.cost.cost import (
    Machine,
    Traffic,
    busbw_factor,
    cost,
    staging,
    traffic,
)
from pycoll.schedule.language.collectives import COLLECTIVES
from pycoll.schedule.lowering.stage import SlotMap, stage
from pycoll.schedule.lowering.table import build_table

EVERY = [pytest.param(a, id=f"{a.collective}-{a.name}") for a in ALGORITHMS]
WORLDS = (1, 2, 3, 4, 5, 6, 7, 8, 11)


def schedules(algorithm, worlds=WORLDS):
    """Make the schedules of an algorithm in the worlds that it is defined for."""
    found = [algorithm.schedule(n) for n in worlds if algorithm.worlds(n)]
    if "root" in algorithm.params:
        found.append(algorithm.schedule(5 if algorithm.worlds(5) else 4, root=3))
    return found


def per_owner(table):
    """Count loads and stores of each rank in a table."""
    moved = np.bincount(table.owner, table.nsrc + table.ndst, table.n)
    return moved.astype(int)


@pytest.mark.parametrize("algorithm", EVERY)
def test_counts_are_those_of_the_table(algorithm):
    for schedule in schedules(algorithm):
        table = build_table(schedule)
        owner, write = table.owner[table.unit], table.is_write
        away = owner != table.rank
        n, unit = schedule.n, max(1, schedule.chunks)
        sent = np.bincount(np.where(write, owner, table.rank)[away], minlength=n)
        received = np.bincount(np.where(write, table.rank, owner)[away], minlength=n)
        spent = cost(schedule)
        assert [v * unit for v in spent.sent] == [sent.max(), sent.sum()]
        assert [v * unit for v in spent.received] == [received.max(), received.sum()]
        assert spent.loaded.total * unit == table.nsrc.sum()
        assert spent.stored.total * unit == table.ndst.sum()
        assert spent.reduced.total * unit == (table.nsrc - 1).sum()
        assert spent.lines == table.lines
        assert spent.rounds == len(np.unique(table.line_round[table.line[table.unit[away]]]))


@pytest.mark.parametrize("algorithm", EVERY)
def test_staging_is_what_the_transformation_adds(algorithm):
    for schedule in schedules(algorithm):
        table = build_table(schedule)
        lowered, _ = stage(table, schedule)
        copies = staging(schedule)
        added = 2 * copies.copied_in + 2 * copies.copied_out + copies.twice
        assert (per_owner(lowered) - per_owner(table)).tolist() == added.tolist(), str(schedule)
        rounds = list(traffic(schedule))
        moved = sum((t.loaded + t.stored for t in rounds), np.zeros(schedule.n, int))
        assert moved.tolist() == per_owner(table).tolist()


def volume(name, n, direct):
    """Bytes that all ranks load and store, in full vectors."""
    schedule = find("all_reduce", name).schedule(n)
    spent = cost(schedule)
    moved = spent.loaded.total + spent.stored.total
    if direct:
        return moved
    copies = staging(schedule)
    extra = 2 * copies.copied_in + 2 * copies.copied_out + copies.twice
    return moved + int(extra.sum()) / schedule.chunks


@pytest.mark.parametrize("n", [2, 4, 8])
def test_memory_traffic_of_all_reduce(n):
    assert volume("two_shot_push", n, direct=True) == 2 * n  # the lower bound
    assert volume("two_shot_pull", n, direct=True) == 3 * n - 1
    assert volume("one_shot", n, direct=True) == n * n + n
    assert volume("two_shot_pull", n, direct=False) == 5 * n - 2
    assert volume("one_shot", n, direct=False) == n * n + 3 * n


def test_no_reduction_moves_less_than_it_must():
    for algorithm in ALGORITHMS:
        if algorithm.worlds(8) and COLLECTIVES[algorithm.collective].reduces:
            spent = cost(algorithm.schedule(8))
            assert spent.reduced.total >= (6 if algorithm.collective == "exscan" else 7)
            assert spent.critical >= spent.per_rank


def test_bus_bandwidth_factors():
    assert [busbw_factor("all_reduce", n) for n in (1, 2, 8)] == [0, 1, 1.75]
    for collective in ("reduce_scatter", "all_gather", "all_to_all", "gather", "scatter"):
        assert busbw_factor(collective, 4) == 0.75
    assert busbw_factor("broadcast", 4) == busbw_factor("reduce", 4) == 1
    assert all(busbw_factor(collective, 2) for collective in COLLECTIVES)
    with pytest.raises(ScheduleError, match="barrier"):
        busbw_factor("barrier", 2)


def test_prediction_by_hand():
    schedule = find("all_reduce", "two_shot_push").schedule(2)
    machine = Machine(alpha=100, sigma=10, beta=2, gamma=1, bus=0, call=5000, cell_bytes=64)
    # Each rank loads 2 halves, stores 2 halves, folds 1; it waits before the fold and at the end.
    assert machine.predict(schedule, 8, True) == 5000 + 8 * 2 * 2 + 4 * 1 + 2 * 110
    # Staged, half an input is copied in and half an output out.
    once = 5000 + (8 + 4 + 4) * 2 * 2 + 4 * 1 + 2 * 110
    assert machine.predict(schedule, 8, False) == once
    slots = SlotMap(schedule).slots
    segments = slots * 64 // 64
    assert segments > 1
    assert machine.predict(schedule, 128, False) == 5000 + 16 * (once - 5220) + segments * 220
    shared = Machine(alpha=0, sigma=0, beta=2, gamma=0, bus=3, call=0)
    assert shared.predict(schedule, 8, True) == 3 * 32


def test_copies_overlap_with_the_rounds_of_others():
    """Staged, rank 1 lays out the next input while the root folds this one."""
    schedule = find("reduce", "direct").schedule(2)
    machine = Machine(alpha=0, sigma=0, beta=2, gamma=1, bus=0, call=0)
    fold = 8 * 3 * 2 + 8 * 1  # the root loads two inputs and stores the result
    assert machine.predict(schedule, 8, True) == fold
    assert machine.predict(schedule, 8, False) == fold
    assert Machine(alpha=0, sigma=0, bus=1, call=0).predict(schedule, 8, False) == 8 * 3 + 8 * 2
    push = find("reduce", "two_shot_push").schedule(2)  # the root copies half in and half out
    assert machine.predict(push, 8, False) == (8 + 4 + 8 + 8) * 2 + 4


@pytest.mark.parametrize("algorithm", EVERY)
def test_predictions_grow_with_size(algorithm):
    for n in (2, 5, 8):
        if algorithm.worlds(n):
            schedule = algorithm.schedule(n)
            for direct in (True, False):
                times = [Machine().predict(schedule, 1 << k, direct) for k in (3, 12, 20, 26)]
                assert times == sorted(times)
                assert 0 < times[0] < times[-1]
            assert Machine().predict(schedule, 1 << 26, True) <= times[-1]


def test_traffic_tells_ranks_apart():
    (folds, *_) = find("broadcast", "direct").schedule(4).rounds(np.arange(4))
    moved = Traffic(folds, np.arange(4))
    assert moved.sent.tolist() == [3, 0, 0, 0]
    assert moved.received.tolist() == [0, 1, 1, 1]
    assert moved.waits.tolist() == [0, 1, 1, 1]


def test_the_usual_machine_has_the_usual_cells():
    assert Machine().cell_bytes == Config().cell_bytes
