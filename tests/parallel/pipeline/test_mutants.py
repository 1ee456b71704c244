"""Schedules whose source is a little wrong are rejected, or are as good as the right ones."""

from collections import Counter

import pytest

from parallel.pipeline.mutation import mutants
from pycoll.errors import ScheduleError
from pycoll.parallel.pipeline import Schedule, prove, schedules, streams

SIZES = [(2, 2), (3, 3), (2, 4), (4, 8), (3, 6), (2, 5), (3, 7), (4, 6), (4, 2), (3, 1), (5, 10)]
FUNCTIONS = [
    (schedules, "naive", ["naive"]),
    (schedules, "gpipe", ["gpipe"]),
    (schedules, "one_f_one_b", ["one_f_one_b"]),
    (schedules, "interleaved", ["interleaved:2", "interleaved:3"]),
    (schedules, "zb_h1", ["zb_h1"]),
    (schedules, "zb_v", ["zb_v"]),
    (schedules, "dualpipe_v", ["dualpipe_v"]),
    (streams, "_stream", ["pipedream", "two_bw"]),
    (streams, "_as_stage_0", ["pipedream_sync"]),
    (streams, "_one_step_old", ["two_bw"]),
]


def find(space, name):
    """Return a schedule of a module, as ``interleaved:2`` with an argument."""
    kind, _, count = name.partition(":")
    return space[kind](int(count)) if count else space[kind]


def verdict(mutant, right):
    """Tell whether a mutant is rejected at some size, or else the same, as good, or worse.

    `right` are the proofs of the right schedules by name and size. As good is what has every
    computation once, no larger bubble, and versions of the parameters that are not older; the
    proof has shown that it keeps within the activations and the versions that are stated.
    """
    found = {"the same"}
    for (name, p, m), proof in right.items():
        schedule = find(mutant.space, name)
        if not isinstance(schedule, Schedule):
            return "rejected"
        try:
            other = prove(schedule.program(p, m))
        except ScheduleError:
            return "rejected"
        if (other.program.stages, other.used) != (proof.program.stages, proof.used):
            older = any(other.used[use] < version for use, version in proof.used.items())
            found.add("worse" if older or other.bubble > proof.bubble else "as good")
    return next(kind for kind in ("worse", "as good", "the same") if kind in found)


@pytest.mark.parametrize(("module", "function", "names"), FUNCTIONS, ids=[f[1] for f in FUNCTIONS])
def test_mutants_are_rejected_or_as_good(module, function, names):
    right = {}
    for name in names:
        schedule = find(vars(module), name)
        for p, m in SIZES:
            if m >= schedule.least(p):
                right[name, p, m] = prove(schedule.program(p, m))
    verdicts = [(mutant.name, verdict(mutant, right)) for mutant in mutants(module, function)]
    survivors = [name for name, found in verdicts if found == "worse"]
    assert not survivors, "\n".join(survivors)
    counts = Counter(found for _, found in verdicts)
    assert counts["rejected"] >= 0.6 * len(verdicts), counts
