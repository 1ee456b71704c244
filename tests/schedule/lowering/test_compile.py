"""Compiling for peer memory: one rank's plan, conflicts, sizes."""

import numpy as np
import pytest

from pycoll.algorithms import ALGORITHMS, find
from pycoll.errors import ScheduleError
from pycoll.schedule.ir import IN, OUT, TMP, at, fold
from pycoll.schedule.lowering.compile import peer_plan, peer_plans
from pycoll.schedule.lowering.plan import Opcode, step_of
from samples import sample
from schedule.assemble import schedule_of

NAMES = [f"{a.collective}/{a.name}" for a in ALGORITHMS]


def lowerings(entry):
    yield {"direct": True}
    yield {"direct": False}
    if entry.in_place:
        yield {"direct": True, "in_place": True}


@pytest.mark.parametrize("entry", ALGORITHMS, ids=NAMES)
def test_plan_of_one_rank_is_that_of_all(entry):
    for n in sample(range(1, 17), (*range(1, 9), 12, 15)):
        if not entry.worlds(n):
            continue
        schedule = entry.schedule(n, **({"root": n // 2} if "root" in entry.params else {}))
        for options in lowerings(entry):
            plans = peer_plans(schedule, **options)
            for rank in range(n) if n < sample(9, 5) else (0, n // 2, n - 1):
                plan = peer_plan(schedule, rank, **options)
                assert plan.slots == plans[rank].slots
                assert np.array_equal(plan.code, plans[rank].code), (n, rank, options)
                assert np.array_equal(plan.operands, plans[rank].operands), (n, rank, options)


@pytest.mark.parametrize(
    ("sources", "target"),
    [
        (lambda r: [at(r, IN)], lambda r: at(0, OUT)),  # two ranks write one piece
        (lambda r: [at(r - 1, OUT)], lambda r: at(r, OUT)),  # a piece is read and written
        (lambda r: [at(r - 1, TMP)], lambda r: at(r, TMP)),
    ],
)
def test_conflict_in_one_round(sources, target):
    def rounds(rank, n):
        yield fold(at(rank, IN), to=[at(rank, OUT), at(rank, TMP)])
        yield fold(sources(rank), to=target(rank))

    schedule = schedule_of("all_reduce", rounds, 3, chunks=1, slots=1)
    for direct in (True, False):
        with pytest.raises(
            ScheduleError, match=r"round 1 rank \d .* touch chunk \d of .* one of them writes"
        ):
            peer_plans(schedule, direct=direct)


def test_a_fold_may_store_where_it_has_read():
    def rounds(rank, n):
        yield fold([at(rank, IN), at(rank - 1, IN)], to=at(rank, OUT))
        yield fold([at(rank, OUT), at(rank, IN)], to=at(rank, OUT))

    peer_plans(schedule_of("all_reduce", rounds, 3, chunks=1, in_place=False), direct=True)


def test_in_place_is_refused_where_it_does_not_work():
    schedule = find("all_reduce", "one_shot").schedule(4)
    with pytest.raises(ScheduleError, match="does not work in place"):
        peer_plan(schedule, 0, direct=True, in_place=True)


def test_a_copy_onto_itself_waits_for_nobody():
    """In place the root's copy stores nothing, so it does not wait for those who read its input."""
    for n in (2, 5):
        schedule = find("broadcast", "direct").schedule(n)
        plan = peer_plan(schedule, 0, direct=True, in_place=True)
        kinds = [Opcode.SIGNAL, Opcode.FOLD, Opcode.SIGNAL, *[Opcode.WAIT] * (n - 1)]
        assert plan.code["op"].tolist() == kinds


def test_who_reads_a_kept_chunk_waits_for_it():
    """In one memory the chunk would be there at once, but ranks may differ in that."""

    def rounds(rank, n):
        yield fold(at(0, IN), to=at(0, OUT), where=rank == 0)
        yield fold(at(0, OUT), to=at(1, OUT), where=rank == 1)

    schedule = schedule_of("broadcast", rounds, 2, chunks=1)
    plan = peer_plan(schedule, 1, direct=True, in_place=True)
    waits = plan.code[plan.code["op"] == Opcode.WAIT]
    assert (0, step_of(0)) in list(zip(waits["peer"].tolist(), waits["arg"].tolist(), strict=True))


def test_slot_out_of_range():
    def rounds(rank, n):
        yield fold(at(rank, IN), to=at(rank, TMP, 1))

    schedule = schedule_of("all_reduce", rounds, 3, chunks=1, slots=1)
    with pytest.raises(ScheduleError, match="rank 0, round 0: scratch slot 1 on rank 0 is outside"):
        peer_plans(schedule, direct=True)


@pytest.mark.parametrize("direct", [True, False])
def test_size_of_a_plan_depends_on_the_schedule_only(direct):
    """A plan names chunks, never bytes; a ring at n ranks has a few records a line."""
    for n in (8, 64, 512):
        plan = peer_plan(find("all_reduce", "ring").schedule(n), 3, direct=direct)
        assert plan.code.nbytes + plan.operands.nbytes <= 160 * 2 * (n - 1) + 400
    plan = peer_plan(find("all_reduce", "halving_doubling").schedule(512), 3, direct=direct)
    assert plan.code.nbytes + plan.operands.nbytes <= 3_000


def test_ranks_without_folds_copy_in_and_wait():
    """The root reads what the others have: they lay it out, and return only when it is done."""
    schedule = find("reduce", "direct").schedule(4)
    staged = peer_plan(schedule, 2, direct=False)
    assert staged.code["op"].tolist() == [Opcode.FOLD, Opcode.SIGNAL]
    direct = peer_plan(schedule, 2, direct=True, in_place=True)
    assert direct.code["op"].tolist() == [Opcode.SIGNAL, Opcode.SIGNAL, Opcode.WAIT]


@pytest.mark.parametrize(
    ("name", "n", "folds"),
    [("ring", 1024, 2046), ("halving_doubling", 1024, 20), ("halving_doubling", 1000, 2)],
)
@pytest.mark.parametrize("direct", [True, False])
def test_a_rank_of_a_large_world_has_the_folds_of_the_formula(name, n, folds, direct):
    plan = peer_plan(find("all_reduce", name).schedule(n), 5, direct=direct)
    copies_in = 0 if direct else 1
    assert np.sum(plan.code["op"] == Opcode.FOLD) == folds + copies_in
