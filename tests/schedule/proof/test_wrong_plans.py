"""The verifier says what is wrong with wrong schedules and wrong plans."""

import dataclasses

import numpy as np
import pytest

from pycoll.algorithms import find
from pycoll.errors import ScheduleError
from pycoll.schedule.ir import IN, OUT, TMP, algorithm, at, fold
from pycoll.schedule.lowering.compile import peer_plans
from pycoll.schedule.lowering.plan import DONE
from pycoll.schedule.proof.bounds import Joined, check_contacts
from pycoll.schedule.proof.verify import prove, verify
from schedule.assemble import IN as A
from schedule.assemble import OUT as B
from schedule.assemble import STAGING, assemble, schedule_of

# --- Wrong schedules ------------------------------------------------------------------------------


def wrong(collective, rounds, n, text, **options):
    schedule = schedule_of(collective, rounds, n, **options)
    with pytest.raises(ScheduleError, match=text) as caught:
        prove(schedule)
    return str(caught.value)


def test_double_counting():
    def rounds(rank, n):
        yield fold([at(rank, IN), at(rank - 1, IN)], to=at(rank, TMP))
        yield fold([at(rank, TMP), at(rank - 1, TMP)], to=at(rank, OUT))

    text = wrong("all_reduce", rounds, 3, "each once, but holds", chunks=1, slots=1)
    assert "rank 0, at the end: out[0:0] (chunk 0)" in text
    assert "rank 2 2 times" in text


def test_missing_contribution():
    def rounds(rank, n):
        yield fold([at(rank, IN), at(rank - 1, IN)], to=at(rank, OUT))

    wrong("all_reduce", rounds, 3, "nothing from rank 1", chunks=1)


def test_mixed_chunks():
    def rounds(rank, n):
        yield fold([at(0, IN, rank), at(1, IN, rank + 1)], to=at(rank, OUT, rank))

    wrong("reduce_scatter", rounds, 2, "chunks mixed")


def test_wrong_block():
    def rounds(rank, n):
        for peer in range(n):
            yield fold(at(peer, IN, peer), to=at(rank, OUT, peer + 1))

    wrong("all_gather", rounds, 3, r"should hold the input in\[0:0\], but holds")


def test_a_stay_in_the_place_of_a_shorter_chunk():
    def rounds(rank, n):
        yield fold([at(peer, IN, 0) for peer in range(n)], to=at(rank, OUT, 1))
        yield fold(at(rank, OUT, 1), to=at(rank, OUT, 0))
        yield fold([at(peer, IN, 1) for peer in range(n)], to=at(rank, OUT, 1))

    text = wrong("all_reduce", rounds, 3, "which may be shorter", chunks=2, in_place=False)
    assert "round 0: stores the sum of chunk 0 in out[0:1], the place of chunk 1" in text


def test_a_stay_in_the_place_of_another_rank():
    def rounds(rank, n):
        yield fold(at(rank, IN, rank), to=at(rank, OUT, rank + 1))
        yield fold(at(rank, OUT, rank + 1), to=at(rank, OUT, rank))
        for step in range(1, n):
            peer = rank + step
            yield fold(at(peer, OUT, peer), to=at(rank, OUT, peer))

    prove(schedule_of("all_gather", rounds, 3, in_place=False))  # blocks are equally long


def test_an_input_that_is_read_late():
    def rounds(rank, n):
        peer = np.where(rank < 2, 1 - rank, rank)
        yield fold(at(peer, IN), to=at(rank, TMP, 0))
        yield fold(at(rank, TMP, 0), to=at(rank, OUT))
        yield fold(at(rank, IN), to=at(rank, TMP, 1))  # in place that of the peer
        yield fold([at(i, TMP, 1) for i in (2, 0, 1)], to=at(rank, OUT))

    # Right where all ranks work in place, and where none does. Were it rank 0 alone, the input of
    # rank 1 would be counted twice.
    text = wrong("all_reduce", rounds, 3, "but ranks may differ in that", chunks=1, slots=2)
    assert "round 2: reads in[0:0], which holds the input in[1:0] where IN and OUT are one" in text
    prove(schedule_of("all_reduce", rounds, 3, chunks=1, slots=2, in_place=False))


def test_reading_what_nobody_wrote():
    def rounds(rank, n):
        yield fold(at(rank - 1, TMP), to=at(rank, OUT))

    wrong("all_reduce", rounds, 2, "which nobody has written", chunks=1, slots=1)


def test_different_orders_on_different_ranks():
    def rounds(rank, n):
        yield fold([at(rank - i, IN) for i in range(n)], to=at(rank, OUT))

    wrong("all_reduce", rounds, 3, "differ in their bits", chunks=1, in_place=False)


def test_declared_order():
    def rounds(rank, n):
        yield fold([at(i, IN) for i in range(n)], to=at(rank, OUT))

    wrong("all_reduce", rounds, 4, "declares .* 'tree'", chunks=1, in_place=False, order="tree")


def test_one_shot_in_place_conflicts():
    def rounds(rank, n):
        yield fold([at(i, IN) for i in range(n)], to=at(rank, OUT))

    wrong("all_reduce", rounds, 4, "one of them writes it", chunks=1)


def test_not_everybody_talks():
    def rounds(rank, n):
        yield fold(at(rank ^ 1, IN, rank ^ 1), to=at(rank, OUT, rank ^ 1))
        yield fold(at(rank, IN, rank), to=at(rank, OUT, rank))

    schedule = schedule_of("all_gather", rounds, 4)
    plans = peer_plans(schedule, direct=True)
    with pytest.raises(ScheduleError, match="rank 2 is in no contact with rank 0"):
        check_contacts(Joined(plans, "plan"))


def test_input_of_a_rank_without_one():
    def rounds(rank, n, root):
        yield fold(at(1, IN), to=at(rank, OUT))

    schedule = algorithm("broadcast", "wrong", chunks=1, root=0)(rounds).schedule(2)
    with pytest.raises(ScheduleError, match=r"in\[1:0\], which the rank does not hold"):
        prove(schedule)


def test_inputs_are_not_written():
    def rounds(rank, n):
        yield fold([at(rank, IN), at(rank, IN)], to=at(rank, IN))

    wrong("all_reduce", rounds, 2, "inputs are never written", chunks=1)


# --- Wrong plans ----------------------------------------------------------------------------------


def pair(programs, *, collective="all_reduce", **options):
    """Plans of two ranks for a schedule of one chunk."""
    entry = algorithm(collective, "hand", chunks=1)(lambda rank, n: iter(()))
    schedule = entry.schedule(2)
    return [assemble(schedule, r, lines, **options) for r, lines in enumerate(programs)]


def one_shot(rank):
    """A right one-shot all-reduce of two ranks, with its waits."""
    fold = ("fold", [(0, A, 0), (1, A, 0)], [(rank, B, 0)])
    other = 1 - rank
    return [("signal", 1), ("wait", other, 1), fold, ("signal", DONE), ("wait", other, DONE)]


def test_a_plan_written_by_hand_is_accepted():
    outcome = verify(pair([one_shot(0), one_shot(1)]))
    assert outcome.orders == {"tree", "rank", "any"}


def test_one_shot_in_place_is_a_race():
    with pytest.raises(ScheduleError, match=r"race: rank .* in/out\[.:0\].*nothing orders them"):
        verify(pair([one_shot(0), one_shot(1)]), in_place=True)


def test_a_race_that_only_separate_arrays_have():
    """In place the root's copy stores nothing, but elsewhere the other reads what it stores."""
    schedule = find("broadcast", "direct").schedule(2)

    def programs(step):
        keep = [("signal", 1), ("fold", [(0, A, 0)], [(0, B, 0)]), ("signal", 2)]
        read = [("signal", 1), ("wait", 0, step), ("fold", [(0, B, 0)], [(1, B, 0)])]
        ends = [("signal", DONE), ("wait", 1, DONE)], [("signal", DONE), ("wait", 0, DONE)]
        return [assemble(schedule, r, [*(keep, read)[r], *ends[r]]) for r in (0, 1)]

    assert verify(programs(2), in_place=True).roundings == 0
    text = r"race: rank .* out\[0:0\].*nothing orders them"
    with pytest.raises(ScheduleError, match=text):
        verify(programs(1), in_place=True)


def test_missing_entry_wait():
    program = one_shot(0)
    del program[1]
    text = r"rank 0, round 0, reads in\[1:0\] before rank 1 has entered"
    with pytest.raises(ScheduleError, match=text):
        verify(pair([program, one_shot(1)]))


def test_missing_exit_wait():
    text = r"rank 1, round 0, reads in\[0:0\] when rank 0 may have returned"
    with pytest.raises(ScheduleError, match=text):
        verify(pair([one_shot(0)[:-1], one_shot(1)]))


def test_crossed_waits_deadlock():
    first, second = (
        [("signal", 1), ("wait", 1 - r, 2), one_shot(r)[2], ("signal", 2), *one_shot(r)[3:]]
        for r in range(2)
    )
    text = "deadlock: rank 0, round 0, waits for step 2 of rank 1; rank 1, round 0, waits"
    with pytest.raises(ScheduleError, match=text):
        verify(pair([first, second]))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (("signal", 0), "signal has a step out of range"),
        (("signal", 1), "publishes step 1 after step 1; steps must increase"),
        (("wait", 0, 1), "waits for its own rank"),
        (("wait", 2, 1), "names a rank that does not exist"),
        (("fold", [(0, A, 0)], [(0, B, 1)]), r"out\[0:1\], outside"),
        (("fold", [(0, A, 0)], [(0, STAGING, 0)]), r"slot\[0:0\], outside"),
        (("fold", [(0, A, 0)], []), "lacks sources or destinations"),
        (("send", 1, (0, A, 0)), "needs a message transport"),
    ],
)
def test_one_bad_instruction(change, text):
    program = one_shot(0)
    program.insert(2, change)
    with pytest.raises(ScheduleError, match=text):
        verify(pair([program, one_shot(1)]))


def test_a_step_that_is_never_published():
    program = [("signal", 1), ("wait", 0, 5), ("fold", [(1, A, 0)], [(1, B, 0)])]
    with pytest.raises(ScheduleError, match="waits for step 5 of rank 0, which never publishes it"):
        verify(pair([program[:1], program], direct=False))


def test_done_is_the_end():
    program = one_shot(0)
    with pytest.raises(ScheduleError, match="rank 0 never publishes that it is done"):
        verify(pair([[line for line in program if line != ("signal", DONE)], one_shot(1)]))
    with pytest.raises(ScheduleError, match="comes after the rank said that it is done"):
        verify(pair([[*program, program[2]], one_shot(1)]))


def test_staged_plans_leave_arrays_of_others_alone():
    with pytest.raises(ScheduleError, match=r"in\[1:0\], which belongs to another rank"):
        verify(pair([one_shot(0), one_shot(1)], direct=False))


def test_overlapping_copy():
    entry = algorithm("all_gather", "hand")(lambda rank, n: iter(()))
    schedule = entry.schedule(1)
    plan = assemble(
        dataclasses.replace(schedule, algorithm=dataclasses.replace(entry, chunks=lambda n: 3)),
        0,
        [("signal", 1), ("fold", [(0, A, 0)], [(0, B, 1)])],
        direct=False,
    )
    plan.code["count"][1] = 2
    with pytest.raises(ScheduleError, match=r"one fold touches in/out\[0:1\] twice"):
        verify([plan], in_place=True)


def test_average_is_divided_once():
    plans = peer_plans(find("all_reduce", "two_shot_push").schedule(3), direct=True)
    assert plans[0].scales_in_fold
    plans[1].code["flags"] = 1
    with pytest.raises(ScheduleError, match="would not be divided for the average"):
        verify(plans)
    spare = peer_plans(find("all_reduce", "halving_doubling").schedule(5), direct=True)
    assert not any(plan.scales_in_fold for plan in spare)
