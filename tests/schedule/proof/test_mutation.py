"""Every plan that is wrong in one place is rejected, or shown to be right all the same."""

import sys
from collections import Counter

import pytest

from pycoll.algorithms import ALGORITHMS
from pycoll.schedule.proof.mutate import mutate
from samples import sample

NAMES = [f"{a.collective}/{a.name}" for a in ALGORITHMS]
DEADLY = {"remove the DONE", "remove a SEND", "remove a RECV", "exchange with another rank"}


@pytest.mark.parametrize("entry", ALGORITHMS, ids=NAMES)
def test_mutants_are_rejected_or_explained(entry, capsys):
    total, killed = Counter(), Counter()
    for n in filter(entry.worlds, sample((2, 3, 4, 6), (3, 4))):
        params = {"root": n - 1} if "root" in entry.params else {}
        for verdict in mutate(entry.schedule(n, **params), count=1, seed=n):
            total[verdict.operator] += 1
            killed[verdict.operator] += bool(verdict.error)
            assert not verdict.unexplained, f"n={n}: {verdict}"
            assert verdict.error or verdict.operator not in DEADLY, f"n={n}: {verdict}"
    assert total["drop a fold"]
    assert total["redirect an operand"]
    assert killed.total() > total.total() / 3
    with capsys.disabled():
        sys.stdout.write(f"\n{killed.total()} of {total.total()} mutants rejected\n")
