"""Lowering to matched messages."""

import numpy as np
import pytest

from pycoll.algorithms import ALGORITHMS, find
from pycoll.errors import ScheduleError
from pycoll.schedule.ir import algorithm
from pycoll.schedule.language.collectives import COLLECTIVES
from pycoll.schedule.lowering.extent import extent_of
from pycoll.schedule.lowering.messages import message_plan, message_plans
from pycoll.schedule.lowering.plan import ALL, Opcode
from pycoll.schedule.proof.verify import verify
from samples import sample
from schedule.assemble import IN as A
from schedule.assemble import OUT as B
from schedule.assemble import assemble

NAMES = [f"{a.collective}/{a.name}" for a in ALGORITHMS]


@pytest.mark.parametrize("entry", ALGORITHMS, ids=NAMES)
def test_plan_of_one_rank_is_that_of_all(entry):
    for n in sample(range(1, 17), (*range(1, 9), 12, 15)):
        if not entry.worlds(n):
            continue
        schedule = entry.schedule(n, **({"root": n // 2} if "root" in entry.params else {}))
        plans = message_plans(schedule)
        for rank in range(n) if n < sample(9, 5) else (0, n // 2, n - 1):
            plan = message_plan(schedule, rank)
            assert plan.slots == plans[rank].slots
            assert np.array_equal(plan.code, plans[rank].code), (n, rank)
            assert np.array_equal(plan.operands, plans[rank].operands), (n, rank)


@pytest.mark.parametrize("entry", ALGORITHMS, ids=NAMES)
def test_the_extent_is_that_of_all_ranks(entry):
    """Whatever a rank does itself, and wherever its arrays are."""
    for n in sample(range(1, 18), (*range(1, 9), 12, 17)):
        if not entry.worlds(n):
            continue
        schedule = entry.schedule(n, **({"root": n // 2} if "root" in entry.params else {}))
        extent = extent_of(schedule)
        plans = [p for apart in (False, True) for p in message_plans(schedule, apart=apart)]
        moves = [p.code["count"][np.isin(p.code["op"], (Opcode.SEND, Opcode.RECV))] for p in plans]
        longest = max(int(counts.max(initial=0)) for counts in moves)
        assert longest <= extent.message <= 2 * longest, n  # blocks at the end of the vector
        most = max(p.slots for p in plans)
        assert most / 2 <= extent.slots <= 2 * most, n


@pytest.mark.parametrize(
    ("collective", "name", "sent"),
    [
        ("all_reduce", "ring", 2 * 7),
        ("all_reduce", "two_shot_push", 2 * 7),
        ("all_gather", "ring", 7),
        ("all_gather", "direct_push", 7),
        ("all_to_all", "direct", 7),
        ("reduce_scatter", "direct", 7),
    ],
)
def test_a_rank_sends_each_piece_once_per_consumer(collective, name, sent):
    for plan in message_plans(find(collective, name).schedule(8)):
        sends = plan.code[plan.code["op"] == Opcode.SEND]
        assert np.sum(sends["count"]) == sent


def test_copies_need_no_slots_and_a_ring_needs_one():
    for collective in ("all_gather", "broadcast"):
        assert {plan.slots for plan in message_plans(find(collective, "ring").schedule(9))} == {0}
    plans = message_plans(find("all_reduce", "ring").schedule(9))
    assert {plan.slots for plan in plans} == {1}


def test_a_round_has_two_phases():
    """Two-shot push: fetch all inputs, fold, send all results."""
    code = message_plan(find("all_reduce", "two_shot_push").schedule(3), 0).code
    names = [Opcode(op).name for op in code["op"]]
    assert sorted(names[:4]) == ["RECV", "RECV", "SEND", "SEND"]
    assert names[4:6] == ["WAIT", "FOLD"]
    assert sorted(names[6:10]) == ["RECV", "RECV", "SEND", "SEND"]
    assert names[10:] == ["WAIT"]
    assert code["peer"][4] == ALL


def hand(programs, **options):
    entry = algorithm("all_reduce", "hand", chunks=1)(lambda rank, n: iter(()))
    schedule = entry.schedule(2)
    return [
        assemble(schedule, r, lines, direct=False, messages=True, **options)
        for r, lines in enumerate(programs)
    ]


def exchange(rank):
    other = 1 - rank
    pieces = [(rank, A, 0), (rank, 2, 0)]
    inputs = pieces if rank == 0 else pieces[::-1]
    return [
        ("send", other, (rank, A, 0)),
        ("recv", other, (rank, 2, 0)),
        ("complete",),
        ("fold", inputs, [(rank, B, 0)]),
    ]


def with_averages(plans):
    for plan in plans:
        plan.code["flags"] = 2
    return plans


def test_an_exchange_written_by_hand_is_accepted():
    plans = with_averages(hand([exchange(0), exchange(1)], slots=1))
    assert verify(plans, in_place=True).order == "tree"


def test_sending_before_receiving_deadlocks_without_buffers():
    programs = [exchange(0), exchange(1)]
    for program in programs:
        program.insert(1, ("complete",))
    with pytest.raises(ScheduleError, match="deadlock without buffering: rank 0 for rank 1"):
        verify(hand(programs, slots=1))


def test_unmatched_and_unequal_messages():
    programs = [exchange(0), exchange(1)]
    del programs[1][1]
    text = "rank 0 sends 1 messages to rank 1, which receives 0"
    with pytest.raises(ScheduleError, match=text):
        verify(hand(programs, slots=1))
    plans = hand([exchange(0), exchange(1)], slots=2)
    plans[0].code["count"][1] = 2
    with pytest.raises(ScheduleError, match="with count 1, but that expects count 2"):
        verify(plans)


def test_folding_while_messages_are_under_way():
    programs = [exchange(0), exchange(1)]
    programs[0][2], programs[0][3] = programs[0][3], programs[0][2]
    with pytest.raises(ScheduleError, match="fold comes while messages are under way"):
        verify(hand(programs, slots=1))
    programs[0][2:] = programs[0][2:3]
    with pytest.raises(ScheduleError, match=r"is never waited for|under way"):
        verify(hand(programs, slots=1))


def test_receiving_into_what_is_being_sent():
    programs = [
        [("send", 1, (0, A, 0)), ("recv", 1, (0, B, 0)), ("complete",)],
        [("send", 0, (1, A, 0)), ("recv", 0, (1, B, 0)), ("complete",)],
    ]
    with pytest.raises(ScheduleError, match=r"receives into in/out\[.:0\] while another message"):
        verify(hand(programs), in_place=True)


@pytest.mark.parametrize(
    ("name", "n", "messages"), [("ring", 1024, 2046), ("halving_doubling", 1024, 20)]
)
def test_a_rank_of_a_large_world_has_the_messages_of_the_formula(name, n, messages):
    plan = message_plan(find("all_reduce", name).schedule(n), 5)
    for op in (Opcode.SEND, Opcode.RECV):
        assert np.sum(plan.code["op"] == op) == messages


@pytest.mark.parametrize("n", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("collective", ["all_reduce", "broadcast", "reduce"])
def test_every_algorithm_works_in_place_over_messages(collective, n):
    """What is sent has left before anything is folded, even where shared memory needs staging."""
    for entry in ALGORITHMS:
        if entry.collective == collective and entry.worlds(n):
            verify(message_plans(entry.schedule(n)), in_place=True)


def in_turn(schedule):
    """Return plans of ranks whose arrays share memory, or do not, in turn."""
    both = message_plans(schedule), message_plans(schedule, apart=True)
    return [both[rank % 2][rank] for rank in range(schedule.n)]


@pytest.mark.parametrize("entry", [a for a in ALGORITHMS if COLLECTIVES[a.collective].reduces])
def test_a_rank_may_work_in_place_while_others_do_not(entry):
    for n in filter(entry.worlds, range(1, 9)):
        assert verify(in_turn(entry.schedule(n))) == verify(message_plans(entry.schedule(n)))


def test_what_is_received_first_comes_to_where_the_result_will_be():
    schedule = find("reduce", "direct").schedule(3)
    together, apart = (message_plan(schedule, 0, apart=apart) for apart in (False, True))
    assert (together.slots, apart.slots) == (2, 1)
    assert "recv x1 out[0:0] from rank 1" in apart.listing()
    assert "in[0:0] + out[0:0] + staging[0:0] -> out[0:0]" in apart.listing()


def test_arrays_that_share_memory_would_be_overwritten():
    plans = message_plans(find("reduce", "direct").schedule(3), apart=True)
    assert verify(plans, in_place=False).order == "tree"
    with pytest.raises(ScheduleError, match="holds rank 1 2 times; nothing from rank 0"):
        verify(plans, in_place=True)
