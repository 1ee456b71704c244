"""The verifier accepts every algorithm, and says what is wrong with wrong ones."""

import textwrap

import numpy as np
import pytest

from pycoll.algorithms import ALGORITHMS, find
from pycoll.errors import ScheduleError
from pycoll.schedule import ir
from pycoll.schedule.ir import algorithm
from pycoll.schedule.language.collectives import COLLECTIVES
from pycoll.schedule.language.promise import Promise
from pycoll.schedule.lowering.compile import peer_plans
from pycoll.schedule.lowering.plan import Opcode
from pycoll.schedule.proof.bounds import Joined
from pycoll.schedule.proof.interpret_peer import check_races, check_run_ahead, run_peer, trace_of
from pycoll.schedule.proof.replay import replay
from pycoll.schedule.proof.verify import modes, prove
from samples import sample
from schedule.promises import inputs, outputs

NAMES = [f"{a.collective}/{a.name}" for a in ALGORITHMS]


def roots(entry, n):
    some = range(n) if n < 6 else sample(range(n), (0, n // 2, n - 1))
    return [{"root": r} for r in some] if "root" in entry.params else [{}]


@pytest.mark.parametrize("entry", ALGORITHMS, ids=NAMES)
def test_every_algorithm_is_proven(entry):
    for n in (*range(1, 10), 13, *sample((16, 24), (16,))):
        for params in roots(entry, n) if n < 10 else [{}]:
            if entry.worlds(n):
                proof = prove(entry.schedule(n, **params))
                assert proof.order == entry.order or entry.order == "any"


@pytest.mark.parametrize("entry", ALGORITHMS, ids=NAMES)
def test_executing_the_plans_in_many_orders_agrees(entry):
    for n in (1, 2, 3, 4, 6):
        for params in roots(entry, n)[-1:]:
            if entry.worlds(n):
                for mode, in_place, plans in modes(entry.schedule(n, **params)):
                    assert replay(plans, in_place=in_place, seeds=4) == "", mode


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_promise_is_that_of_the_collective(collective):
    spec = COLLECTIVES[collective]
    params = {"root": 0} if spec.rooted else {}
    for n in range(1, 6):
        entry = algorithm(collective, chunks=2 * n, **params)(lambda rank, n, **_: iter(()))
        for root in range(n if spec.rooted else 1):
            promise = Promise.of(entry.schedule(n, **({"root": root} if spec.rooted else {})))
            held = {(int(r), int(c)) for r, c in np.argwhere(promise.in_held)}
            assert held == set(inputs(spec, n, 2 * n, root))
            wanted = {(r, c): sources for r, c, sources in outputs(spec, n, 2 * n, root)}
            assert {(int(r), int(c)) for r, c in np.argwhere(promise.out_held)} == set(wanted)
            for (r, c), sources in wanted.items():
                origin = divmod(int(promise.origin[r, c]), 2 * n)
                assert spec.reduces or sources == [origin]


@pytest.mark.parametrize(
    ("collective", "name", "order", "roundings"),
    [
        ("all_reduce", "one_shot", "tree", 1),
        ("all_reduce", "one_shot_rank", "rank", 1),
        ("all_reduce", "ring", "any", 10),
        ("all_reduce", "recursive_doubling", "tree", None),
        ("all_reduce", "halving_doubling", "tree", None),
        ("all_gather", "ring", "", 0),
    ],
)
def test_order_and_roundings(collective, name, order, roundings):
    proof = prove(find(collective, name).schedule(11))
    assert proof.order == order
    assert roundings is None or proof.roundings == roundings


def test_bytes_of_a_ring():
    proof = prove(find("all_reduce", "ring").schedule(8))
    assert proof.bytes_sent == pytest.approx(2 * 7 / 8)
    assert proof.rounds == 14


# --- The next call --------------------------------------------------------------------------------


@pytest.mark.parametrize("entry", ALGORITHMS, ids=NAMES)
def test_calls_may_follow_each_other(entry):
    """What one call is proven for carries over: five calls in a row have no race either."""
    schedule = entry.schedule(next(filter(entry.worlds, (5, 6, 4))))
    for mode, in_place, plans in modes(schedule):
        if not plans[0].messages:
            run = run_peer(Joined(plans, mode), calls=5)
            check_races(run, trace_of(run, Promise.of(schedule), in_place))
            check_run_ahead(run)


def test_without_the_gate_cells_race():
    """In staged plans only the gate keeps a rank from storing where a peer still reads."""
    schedule = find("all_gather", "direct_pull").schedule(2)
    run = run_peer(Joined(peer_plans(schedule, direct=False), "staged"), calls=3)
    gate = (run.world.op == Opcode.WAIT) & (run.world.instr < 0)
    assert np.sum(gate) == 2 * 2
    run.clock[:] = 0
    with pytest.raises(ScheduleError, match="race"):
        check_races(run, trace_of(run, Promise.of(schedule), True))
    with pytest.raises(ScheduleError, match="two calls behind"):
        check_run_ahead(run)


def test_the_example_of_the_language_is_right():
    text = textwrap.dedent(ir.__doc__.partition("::\n\n")[2].partition("\n\nA round is")[0])
    found = dict(vars(ir))
    exec(text, found)
    for n in range(1, 7):
        assert prove(found["two_shot"].schedule(n)).bytes_sent <= 2


def test_a_copy_to_the_slot_that_peers_read_says_what_to_do():
    def of(same_round, **kwargs):
        @algorithm("all_gather", "doubling", **kwargs)
        def doubling(rank, n):
            own = ir.fold(ir.at(rank, ir.IN, rank), to=ir.at(rank, ir.OUT, rank))
            first = ir.fold(ir.at(rank + 1, ir.IN, rank + 1), to=ir.at(rank, ir.OUT, rank + 1))
            yield [own, first] if same_round else own
            if not same_round:
                yield first
            two_on = ir.at(rank + 2, ir.OUT, rank + 2)
            yield ir.fold(two_on, to=ir.at(rank, ir.OUT, rank + 2), count=2)

        return doubling.schedule(4)

    with pytest.raises(ScheduleError, match=r"staged: in round 0.*move it to another round"):
        prove(of(True))
    prove(of(False))
    prove(of(True, in_place=False))
