"""The selector: what it takes, what it refuses, and that it never changes the order by itself."""

import dataclasses
import math

import numpy as np
import pytest

from pycoll.algorithms import ALGORITHMS, find
from pycoll.errors import ArgumentError
from pycoll.runtime.selection.candidates import candidates
from pycoll.runtime.selection.rules import ANY_N, ANY_SIZE, LINK_RULES, ONE_HOST_RULES, RULES
from pycoll.runtime.selection.select import (
    MAX_BLOCKS,
    STAGE_BELOW,
    folds_at_once,
    only_reads,
    select,
)
from pycoll.schedule.cost.cost import Machine
from pycoll.schedule.language.collectives import COLLECTIVES
from pycoll.schedule.lowering.compile import peer_plan
from pycoll.schedule.lowering.plan import PlanBuffer
from pycoll.types import DType, ReduceOp

REDUCING = [name for name, spec in COLLECTIVES.items() if spec.reduces]
MOVING = [name for name, spec in COLLECTIVES.items() if not spec.reduces]
TABLES = pytest.mark.parametrize(
    "table", [RULES, LINK_RULES, ONE_HOST_RULES], ids=["memory", "links", "one host"]
)
SIZES = (0, 8, 600, 3000, 5000, 1 << 16, 1 << 24)


@TABLES
def test_the_table_names_what_exists(table):
    for rule in table:
        for name in rule.names:
            assert find(rule.collective, name).collective == rule.collective
    for collective in COLLECTIVES:
        last = [rule for rule in table if rule.collective == collective][-1]
        assert (last.max_n, last.max_bytes, last.direct) == (ANY_N, ANY_SIZE, False)


@TABLES
def test_no_line_of_the_table_is_dead(table):
    def covers(a, b):
        wider = a.max_n >= b.max_n and a.max_bytes >= b.max_bytes and b.direct >= a.direct
        return a.collective == b.collective and wider and b.crowded >= a.crowded

    dead = [b for i, b in enumerate(table) for a in table[:i] if covers(a, b)]
    assert dead == []


@pytest.mark.parametrize("n", [1, 2, 3, 8])
@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda a: f"{a.collective}-{a.name}")
def test_what_only_reads_touches_no_result_of_others(algorithm, n):
    if not algorithm.works_for(n) or not only_reads(algorithm, n):
        return
    for rank in range(n):
        operands = peer_plan(algorithm.schedule(n), rank, direct=True).operands
        assert not np.any((operands["rank"] != rank) & (operands["buffer"] == PlanBuffer.OUT))


@pytest.mark.parametrize("n", [2, 3, 8, 64])
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_inputs_in_symmetric_memory_are_read_there_where_nobody_writes_to_another(collective, n):
    choices = [select(collective, nbytes, n, input_only=True) for nbytes in SIZES]
    assert not any(choice.direct for choice in choices if choice.request.nbytes <= STAGE_BELOW)
    assert all(only_reads(c.algorithm, n) for c in choices if c.direct)
    pulled = ("all_gather", "all_to_all", "reduce_scatter")
    assert choices[-2].direct == (collective in pulled)
    assert choices[-1].direct == (collective == "reduce_scatter")


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_every_call_has_an_algorithm_that_serves(collective, direct):
    for n in (1, 2, 3, 8, 17, 64, 1000):
        for nbytes in SIZES:
            choice = select(collective, nbytes, n, direct=direct)
            assert choice.algorithm.worlds(n)
            usual = "tree" if COLLECTIVES[collective].prefix is None else "rank"
            assert choice.order == (usual if collective in REDUCING else "")
            assert choice.algorithm.order == choice.order
            assert not (choice.direct and not direct)
            assert choice.algorithm.in_place or not (choice.direct and choice.request.in_place)


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_a_choice_compiles(collective):
    for nbytes in (8, 1 << 20):
        choice = select(collective, nbytes, 5, direct=True)
        schedule = choice.algorithm.schedule(5, **choice.params)
        aliased = choice.direct and choice.request.in_place
        peer_plan(schedule, 1, direct=choice.direct, in_place=aliased)


@pytest.mark.parametrize("collective", REDUCING)
@pytest.mark.parametrize("order", ["tree", "rank"])
def test_the_order_is_given_for_every_dtype(collective, order):
    for dtype in DType:
        for n in (2, 3, 8, 33):
            for nbytes in SIZES:
                choice = select(collective, nbytes, n, order=order, dtype=dtype, direct=True)
                assert choice.order == choice.algorithm.order == order
                if dtype.rounds_once:
                    assert folds_at_once(choice.algorithm, n)


@pytest.mark.parametrize("collective", REDUCING)
def test_any_order_is_never_slower_in_kind(collective):
    for nbytes in SIZES:
        free = select(collective, nbytes, 8, order="any", dtype=DType.FLOAT32)
        assert free.name == select(collective, nbytes, 8, dtype=DType.FLOAT32).name
        assert free.order == "any"


def test_what_all_reduce_takes_on_two_ranks():
    def taken(nbytes, **options):
        choice = select("all_reduce", nbytes, 2, dtype=DType.FLOAT32, **options)
        return choice.name, choice.direct

    assert taken(8) == taken(8, direct=True) == ("one_shot", False)
    assert taken(8 << 10) == ("one_shot", False)
    assert taken((8 << 10) + 4) == ("two_shot_push", False)
    assert taken(8 << 10, direct=True) == taken(1 << 30, direct=True) == ("two_shot_push", True)
    assert taken(8, order="rank") == ("one_shot_rank", False)
    assert taken(1 << 20, order="rank", direct=True) == ("two_shot_push_rank", True)


def test_where_ranks_share_cores_all_reduce_saves_synchronisations():
    def taken(nbytes, n, **options):
        return select("all_reduce", nbytes, n, dtype=DType.FLOAT32, **options).name

    for n, most in ((3, 32), (8, 32), (9, 16), (16, 16)):
        assert taken(most << 10, n, crowded=True) == "one_shot"
        assert taken((most << 10) + 4, n, crowded=True) == taken((most << 10) + 4, n)
        assert taken(most << 10, n, crowded=True, order="rank") == "one_shot_rank"
        assert taken(most << 10, n) == taken(most << 10, n, direct=True).replace("push", "pull")
        assert taken(8 << 10, n, crowded=True, direct=True) == "one_shot"
        assert taken((8 << 10) + 4, n, crowded=True, direct=True) == "two_shot_push"


def test_where_hosts_share_cores_they_send_fewer_messages():
    def taken(nbytes, n, **options):
        options |= {"messages": True, "dtype": DType.FLOAT32}
        return select("all_reduce", nbytes, n, **options).name

    assert taken(8, 4) == "one_shot"
    assert taken(8, 4, crowded=True) == taken(4 << 10, 4, crowded=True) == "recursive_doubling"
    assert taken(64 << 10, 4) == "two_shot_pull"
    assert taken(64 << 10, 4, crowded=True) == "halving_doubling"
    assert taken((64 << 10) + 4, 4, crowded=True) == "two_shot_pull"
    assert taken(64 << 10, 12) == "two_shot_pull"
    assert taken(4 << 10, 12, crowded=True) == "recursive_doubling"
    assert taken(64 << 10, 12, crowded=True) == "halving_doubling"
    for n in (2, 3, 5):  # of these it would send more bytes
        assert taken(64 << 10, n, crowded=True) == taken(64 << 10, n)


def test_two_ranks_that_send_messages_exchange_whole_vectors_unless_folding_them_costs_more():
    def taken(nbytes, one_host):
        return select("all_reduce", nbytes, 2, messages=True, one_host=one_host).name

    for nbytes in (8, 64 << 10):
        assert taken(nbytes, one_host=True) == "one_shot"
        assert taken(nbytes, one_host=False) == "recursive_doubling"
    assert taken(1 << 20, one_host=False) == "recursive_doubling"
    assert taken(1 << 20, one_host=True) == "two_shot_pull"
    assert select("all_reduce", 1 << 20, 2, one_host=True).name == "two_shot_push"


@pytest.mark.parametrize("order", ["tree", "rank"])
def test_ranks_that_send_messages_on_one_host_share_the_folds_of_a_large_reduction(order):
    def taken(nbytes, one_host):
        choice = select("reduce", nbytes, 4, messages=True, one_host=one_host, order=order)
        return choice.name.removesuffix("_rank")

    small, large = ("binomial", "two_shot_push") if order == "tree" else ("direct", "two_shot_push")
    assert [taken(512 << 10, True), taken(1 << 20, True)] == [small, large]
    assert taken(1 << 20, False) == small


def test_large_worlds_wait_for_few_peers():
    assert select("all_reduce", 64, 100).name == "recursive_doubling"
    assert select("all_reduce", 2048, 100).name == "halving_doubling"
    assert select("all_reduce", 64, 100, dtype=DType.BFLOAT16).name == "one_shot"
    low = select("all_reduce", 64, 100, dtype=DType.BFLOAT16, op=ReduceOp.MAX)
    assert low.name == "recursive_doubling"


def test_one_rounding_needs_one_fold():
    at_once = {a.name for a in ALGORITHMS if a.collective == "all_reduce" and folds_at_once(a, 8)}
    shots = {"one_shot", "two_shot_push", "two_shot_pull"}
    assert at_once == shots | {f"{name}_rank" for name in shots}
    assert all(folds_at_once(a, 2) for a in ALGORITHMS)


def refusal(*args, **options):
    with pytest.raises(ArgumentError) as caught:
        select(*args, **options)
    return str(caught.value)


def test_a_named_algorithm_is_taken():
    ring = select("all_reduce", 1 << 20, 8, algorithm="ring")
    assert (ring.name, ring.order, ring.direct) == ("ring", "any", False)
    halving = select("all_reduce", 1 << 20, 8, algorithm="halving_doubling", direct=True)
    assert (halving.order, halving.direct) == ("tree", True)
    one_shot = select("all_reduce", 1 << 20, 8, algorithm="one_shot", direct=True)
    assert not one_shot.direct  # it does not work in place
    assert select("all_reduce", 1 << 20, 8, algorithm="one_shot", input_only=True).direct
    apart = select("all_to_all", 1 << 20, 8, algorithm="direct", direct=True)
    assert apart.direct  # nor does that, but there the input is copied first
    small = select("all_reduce", STAGE_BELOW, 8, algorithm="ring", direct=True)
    assert not small.direct


def test_a_named_algorithm_that_rounds_often_claims_no_order():
    options = {"algorithm": "halving_doubling", "dtype": DType.FLOAT16}
    assert select("all_reduce", 64, 8, **options).order == "any"
    assert select("all_reduce", 64, 8, op=ReduceOp.MIN, **options).order == "tree"
    assert "rounds float16" in refusal("all_reduce", 64, 8, order="tree", **options)
    assert select("all_reduce", 64, 2, **options).order == "tree"


def test_an_algorithm_without_the_order_is_refused():
    text = refusal("all_reduce", 64, 8, algorithm="ring", order="rank", dtype=DType.INT32)
    assert "'ring' gives order any, not rank" in text
    able = text.split("given by ")[1].split(", ")
    assert able == [a.name for a in ALGORITHMS if (a.collective, a.order) == ("all_reduce", "rank")]
    narrow = refusal("all_reduce", 64, 8, algorithm="ring", order="tree", dtype=DType.BFLOAT16)
    assert "halving_doubling" not in narrow
    assert "two_shot_push" in narrow


def test_wrong_names_are_refused():
    assert "all_reduce" in refusal("allreduce", 8, 2)
    assert "one_shot" in refusal("all_reduce", 8, 2, algorithm="one_shoot")
    assert "tree" in refusal("all_reduce", 8, 2, order="left")
    for collective in MOVING:
        assert "reduces nothing" in refusal(collective, 8, 2, order="tree")
    gather = find("all_gather", "ring")
    assert "all_gather, not all_reduce" in refusal("all_reduce", 8, 2, algorithm=gather)


def test_an_algorithm_of_the_user_is_taken():
    mine = dataclasses.replace(find("all_reduce", "ring"), name="mine", worlds=lambda n: n != 3)
    choice = select("all_reduce", 1 << 20, 4, algorithm=mine)
    assert choice.algorithm is mine
    assert "mine" in [c.name for c in candidates(choice)]
    assert "not defined for 3 ranks" in refusal("all_reduce", 8, 3, algorithm=mine)


def test_pipelines_are_cut_by_size():
    def blocks(nbytes, n=8):
        return select("broadcast", nbytes, n, algorithm="ring").params["k"]

    found = [blocks(1 << shift) for shift in range(0, 31, 3)]
    assert found == sorted(found)
    assert (found[0], found[-1]) == (1, MAX_BLOCKS)
    assert all(k & (k - 1) == 0 for k in found)
    assert blocks(0) == blocks(1 << 30, n=2) == 1
    for shift in (14, 17, 20):  # a neighbouring k is not much better
        times = {
            k: Machine().predict(find("broadcast", "ring").schedule(8, k=k), 1 << shift, True)
            for k in (1, 2, 4, 8, 16, 32, 64)
        }
        assert times[blocks(1 << shift)] < 1.1 * min(times.values())


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_the_table_is_near_the_best_prediction(collective):
    for n in (2, 4, 8, 32):
        for nbytes in (8, 1 << 10, 1 << 13, 1 << 20):
            for direct in (False, True):
                choice = select(collective, nbytes, n, direct=direct)
                able = [
                    c for c in candidates(choice) if not choice.request.obstacle(named(choice, c))
                ]
                best = min(able, key=lambda c: c.predicted_s)
                worse = choice.predicted_s / best.predicted_s
                assert worse < 1.35, f"n={n} {nbytes} B direct={direct}: {choice.name}, {best}"


def named(choice, candidate):
    return find(choice.request.collective, candidate.name)


def test_candidates_say_why():
    choice = select("all_reduce", 1 << 20, 6, dtype=DType.FLOAT32, direct=True)
    found = {c.name: c for c in candidates(choice)}
    assert len(found) == len([a for a in ALGORITHMS if a.collective == "all_reduce"])
    assert found[choice.name].verdict == "chosen"
    assert found[choice.name].predicted_s == choice.predicted_s
    assert found["ring"].verdict == "gives order any, not tree"
    assert found["ring"].direct
    assert found["ring"].rounds == 10
    assert "times" in found["one_shot"].verdict
    assert not found["one_shot"].direct
    assert found.pop("swing").predicted_s == math.inf  # six is no power of two
    assert all(0 < c.predicted_s < math.inf for c in found.values())
