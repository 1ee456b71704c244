"""Deciding from measured times: noise keeps the default; sizes between are halved."""

import numpy as np
import pytest

from pycoll.cli.measure.tune_times import Decision, beats, between, crossings, rules_of

DEFAULT = [10.0, 10.1, 10.2, 10.1, 10.0, 10.3, 10.1]


@pytest.mark.parametrize(
    ("challenger", "better"),
    [
        ([8.0] * 7, True),
        ([8.0] * 6 + [99.0], True),  # one disturbed round
        ([8.0] * 5 + [99.0] * 2, False),
        ([9.7] * 7, False),  # less than the least gain
        ([9.4] * 7, True),
        ([10.1] * 7, False),
        ([7.0, 8.0, 9.0, 10.0, 11.0, 8.0, 9.0], False),  # rounds overlap
        ([12.0] * 7, False),
    ],
)
def test_beats(challenger, better):
    assert beats(challenger, DEFAULT) == better
    assert not beats(DEFAULT, challenger) or np.median(challenger) > 10.6


def test_the_same_times_in_other_noise_decide_nothing():
    rng = np.random.default_rng(5)
    wins = sum(beats(*np.exp(rng.normal(0, 0.1, (2, 7)))) for _ in range(1000))
    assert wins < 20


def decision(nbytes, algorithm, seconds=1.0, kind=("all_reduce", "tree", False)):
    return Decision(*kind, nbytes, algorithm, seconds, "one_shot", 2.0)


def test_neighbours_are_joined_and_edges_lie_between():
    found = rules_of(
        [
            decision(4096, "ring", 0.5),
            decision(64, "ring"),
            decision(256, ""),
            decision(1024, "ring"),
            decision(16384, "halving_doubling"),
        ]
    )
    spans = [(r.algorithm, r.min_bytes, r.max_bytes, r.seconds) for r in found]
    assert spans == [
        ("ring", 0, 128, 1.0),
        ("ring", 513, 8192, 0.5),
        ("halving_doubling", 8193, 23170, 1.0),
    ]
    assert {r.default for r in found} == {"one_shot"}


def test_kinds_of_calls_are_kept_apart():
    other = ("broadcast", "", True)
    found = rules_of([decision(64, "ring"), decision(256, "ring", kind=other), decision(256, "")])
    assert [(r.collective, r.order, r.symmetric, r.min_bytes) for r in found] == [
        ("all_reduce", "tree", False, 0),
        ("broadcast", "", True, 0),
    ]
    assert rules_of([decision(64, ""), decision(256, "")]) == []


def test_crossings_lie_between_neighbours_that_differ():
    made = [decision(s, a) for s, a in ((64, "ring"), (256, ""), (1024, ""), (4096, "ring"))]
    assert crossings(made) == [("all_reduce", False, 128), ("all_reduce", False, 2048)]
    assert between(64, 256) == 128
