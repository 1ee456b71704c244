"""Every pipeline schedule is proven, keeps what it states, and every wrong one is rejected."""

import random
from dataclasses import replace

import pytest

from parallel.pipeline.replay import Wrong, replay
from pycoll.errors import ScheduleError
from pycoll.parallel.pipeline import B, Costs, F, Op, W, pipeline, prove, simulate
from pycoll.parallel.pipeline.registry import SCHEDULES, find
from samples import sample

ALL = [*SCHEDULES, find("interleaved:3")]
MICROS = sample(range(1, 17), (1, 2, 3, 4, 5, 8, 11))
SIZES = [(p, m) for p in (1, 2, 3, 4, 8) for m in MICROS]
NAMES = [schedule.name for schedule in ALL]
FLUSHING = [schedule for schedule in ALL if schedule.steps == 1]


@pytest.mark.parametrize("schedule", ALL, ids=NAMES)
def test_it_is_proven_for_every_size_and_a_second_opinion_agrees(schedule):
    for p, m in SIZES:
        if m < schedule.least(p):
            with pytest.raises(ScheduleError, match=f"expected at least 1 stage and {p} micro"):
                schedule.program(p, m)
            continue
        proof = prove(schedule.program(p, m))
        replay(proof.program, seed=p * m)
        assert proof.bubble == simulate(proof.program).bubble <= schedule.bubble(p, m)
        if m % p == 0 or "interleaved" not in schedule.name:
            assert proof.bubble == schedule.bubble(p, m)
        for stage in range(p):
            assert proof.live[stage] <= schedule.live(stage, p, m)
            assert proof.versions[stage] <= schedule.versions(stage, p, m)


def fraction(name, p, m, costs=None):
    return simulate(find(name).program(p, m), costs).bubble_fraction


@pytest.mark.parametrize(("p", "m"), [(2, 4), (3, 7), (4, 8), (8, 16), (8, 5)])
def test_bubbles_are_those_of_the_formulas(p, m):
    whole = Costs(1, 2, 0)  # the backward pass in one piece, as automatic differentiation has it
    for name in ("gpipe", "1f1b"):
        assert fraction(name, p, m, whole) == pytest.approx((p - 1) / (m + p - 1), abs=1e-12)
        assert fraction(name, p, m) == pytest.approx(2 * (p - 1) / (3 * m + 2 * (p - 1)), abs=1e-12)
    assert fraction("naive", p, m, whole) == pytest.approx((p - 1) / p, abs=1e-12)
    if m >= p:
        assert fraction("zb_h1", p, m) == pytest.approx((p - 1) / (3 * m + p - 1), abs=1e-12)
        assert simulate(find("zb_v").program(p, m)).bubble == p - 1  # of chunks, half a stage each
    if m % p == 0:
        for v in (2, 3):
            timing = simulate(find(f"interleaved:{v}").program(p, m), whole)
            assert timing.bubble / 3 / v == pytest.approx((p - 1) / v, abs=1e-12)


@pytest.mark.parametrize(("p", "m"), [(2, 8), (4, 8), (8, 16)])
def test_zero_bubble_schedules_halve_the_bubble_within_the_memory_of_1f1b(p, m):
    plain, zero = prove(find("1f1b").program(p, m)), prove(find("zb_h1").program(p, m))
    assert simulate(zero.program).bubble <= simulate(plain.program).bubble / 2
    assert max(zero.live) == max(plain.live) == p


def test_versions_are_those_of_the_papers():
    p, m = 4, 8
    assert prove(find("pipedream").program(p, m)).versions == (4, 3, 2, 1)
    assert prove(find("pipedream_sync").program(p, m)).versions == (4, 4, 4, 4)
    assert prove(find("2bw").program(p, m)).versions == (2, 2, 2, 2)
    used = prove(find("2bw").program(p, m)).used
    assert {version for (_, op), version in used.items() if op.micro // m == 3} == {2}
    synchronous = prove(find("pipedream_sync").program(p, m)).used
    for i in range(4 * m):
        assert len({version for (_, op), version in synchronous.items() if op.micro == i}) == 1


def test_what_a_program_sends():
    assert prove(find("1f1b").program(4, 8)).transfers == (8, 16, 16, 8)
    assert prove(find("zb_v").program(4, 8)).transfers == (16, 32, 32, 16)


def altered(name, p, m, stage, change):
    program = find(name).program(p, m)
    ops = list(program.stages[stage])
    change(ops)
    return program.altered(stage, ops)


def swap(ops, first, second):
    i, j = ops.index(first), ops.index(second)
    ops[i], ops[j] = ops[j], ops[i]


def test_two_stages_that_both_send_first_are_rejected():
    """The order of pytorch#172668: each of two stages waits in a send for the other one."""
    wrong = program = find("1f1b").program(2, 4)
    order = {  # behind which computation, what
        0: (F(1, 0), [Op("SEND", 1, 0, "x"), Op("RECV", 0, 1, "dx")]),
        1: (B(0, 1), [Op("SEND", 0, 1, "dx"), Op("RECV", 1, 0, "x")]),
    }
    for stage, (after, transfers) in order.items():
        ops = [op for op in program.stages[stage] if op not in transfers]
        ops[ops.index(after) + 1 : ops.index(after) + 1] = transfers
        wrong = wrong.altered(stage, ops)
    with pytest.raises(ScheduleError) as caught:
        prove(wrong)
    assert "stages wait for each other, where no transfer is buffered" in str(caught.value)
    assert "stage 0 in SEND x1.0" in str(caught.value)
    assert "stage 1 in SEND dx0.1" in str(caught.value)
    with pytest.raises(Wrong):
        replay(wrong)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda ops: swap(ops, W(0, 1), B(0, 1)), "W0.1 comes before the result of B0.1 is there"),
        (lambda ops: ops.insert(ops.index(F(0, 1)) + 1, Op("FREE", 0, 1)), "which was freed"),
        (lambda ops: ops.remove(Op("FREE", 3, 1)), "never frees the activation of F3.1"),
        (lambda ops: ops.remove(Op("FREE", 2, 1)), r"F3.1 makes 2 live .*F2.1, F3.1.* states 1"),
        (lambda ops: ops.remove(W(3, 1)), "stage 1 never runs W3.1"),
        (lambda ops: ops.append(F(0, 1)), "runs F0.1 2 times"),
        (lambda ops: ops.append(F(0, 0)), "runs F0.0, which is not its own"),
        (lambda ops: ops.remove(Op("STEP", 0)), "takes 0 of 1 steps"),
        (lambda ops: ops.remove(Op("REDUCE", 0, 1)), "before the gradients of all chunks"),
        (lambda ops: ops.append(Op("JUMP", 0, 1)), "is no operation"),
        (lambda ops: ops.append(Op("SEND", 0, 1, "x")), "wait for each other|goes nowhere|twice"),
        (lambda ops: swap(ops, W(0, 1), W(1, 1)), "comes before|adds its gradient before"),
    ],
)
def test_wrong_programs_are_rejected_with_stage_and_operation(change, text):
    with pytest.raises(ScheduleError, match=text) as caught:
        prove(altered("1f1b", 2, 4, 1, change))
    assert "1f1b, 2 stages, 4 micro-batches" in str(caught.value)


def test_too_many_live_activations_are_rejected():
    @pipeline("greedy", live=lambda stage, p, m: 2)
    def greedy(stage, p, m):
        yield from map(F, range(m))
        for i in range(m):
            yield from (B(i), W(i))

    with pytest.raises(ScheduleError, match=r"stage 0: F2.0 makes 3 live activations .* states 2"):
        prove(greedy.program(2, 4))


def test_a_schedule_that_waits_longer_than_it_states_is_rejected():
    """1F1B in the place of one that fills the bubble: everything else is right."""
    lazy = replace(find("1f1b"), bubble=find("zb_h1").bubble)
    with pytest.raises(ScheduleError, match=r"waits for 6 units .* the schedule states 3"):
        prove(lazy.program(4, 8))


def test_parameters_that_are_older_than_stated_are_rejected():
    first = replace(find("2bw"), weights=lambda use: 0)
    with pytest.raises(ScheduleError, match=r"takes version 0 .* lacks 2 steps; .* states 1"):
        prove(first.program(2, 4))
    for rule, text in (
        (lambda use: None, "wants version None of the parameters; expected a number"),
        (lambda use: use.missing, "has no version: AttributeError"),
        (lambda use: use.newest + 1, "wants version 1 of the parameters, of 1"),
    ):
        with pytest.raises(ScheduleError, match=text):
            prove(replace(find("2bw"), weights=rule).program(2, 4))


def test_an_order_that_no_stage_can_follow():
    @pipeline("backwards", live=lambda stage, p, m: m)
    def backwards(stage, p, m):
        for i in range(m):
            yield from (B(i), F(i), W(i))

    text = "no stage can go on: stage 0 is at B0.0 and needs F0.0, B0.1; stage 1 is at B0.1"
    with pytest.raises(ScheduleError, match=text):
        backwards.program(2, 1)


@pytest.mark.parametrize("what", ["an exception", "no operation", "a chunk too many"])
def test_authors_who_are_wrong(what):
    @pipeline("mine", live=lambda stage, p, m: m)
    def mine(stage, p, m):
        if what == "an exception":
            raise KeyError("oh")
        yield F(0, 1) if what == "a chunk too many" else "F0"

    with pytest.raises(ScheduleError, match=r"^mine: stage 0"):
        mine.program(2, 1)


def test_authors_who_never_end():
    @pipeline("mine", live=lambda stage, p, m: m)
    def mine(stage, p, m):
        while True:
            yield F(0)

    with pytest.raises(ScheduleError, match="mine: stage 0 goes on after 7 operations"):
        mine.program(2, 1)


def test_rules_that_compare_nothing():
    with pytest.raises(ScheduleError, match=r"mine: the rule cannot order .*: TypeError"):
        replace(find("zb_v"), name="mine", order=lambda op: None).program(2, 1)


def mutants(program, rng):
    """Yield programs that differ from a right one in one place."""
    for stage, ops in enumerate(program.stages):
        for i in rng.sample(range(len(ops)), min(sample(12, 6), len(ops))):
            op = ops[i]
            yield program.altered(stage, [*ops[:i], *ops[i + 1 :]])
            yield program.altered(stage, [*ops[:i], op, *ops[i:]])
            if i + 1 < len(ops):
                yield program.altered(stage, [*ops[:i], ops[i + 1], op, *ops[i + 2 :]])
            j = rng.randrange(len(ops))
            moved = [*ops[:i], *ops[i + 1 :]]
            yield program.altered(stage, [*moved[:j], op, *moved[j:]])
            other = (op.micro + 1) % program.micros
            yield program.altered(stage, [*ops[:i], op._replace(micro=other), *ops[i + 1 :]])


def accepted(check, program):
    try:
        check(program)
    except (ScheduleError, Wrong):
        return False
    return True


@pytest.mark.parametrize("schedule", ALL, ids=NAMES)
def test_mutants_are_rejected_exactly_if_they_are_wrong(schedule):
    rng, counts = random.Random(schedule.name), {True: 0, False: 0}
    for p, m in sample(((2, 4), (3, 5), (4, 4)), ((2, 4), (3, 5))):
        for mutant in mutants(schedule.program(p, m), rng):
            right = all(accepted(lambda x, s=s: replay(x, s), mutant) for s in range(2))
            proven = accepted(prove, mutant)
            assert proven <= right, [list(map(str, ops)) for ops in mutant.stages]
            counts[proven] += 1
    assert counts[False] > 80  # most are wrong


def test_names():
    assert find("interleaved").name == "interleaved:2"
    assert find(find("1f1b")) is find("1f1b")
    with pytest.raises(ScheduleError, match=r"no pipeline schedule '1fb1'; did you mean 1f1b\?"):
        find("1fb1")
