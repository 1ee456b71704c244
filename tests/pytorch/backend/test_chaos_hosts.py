"""A few of the faults between hosts, each in a short job; see chaos_hosts.py."""

import pytest

pytest.importorskip("torch")
from hosts_apart import missing
from pytorch.backend import chaos_hosts

WHY_NOT = missing()


@pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
@pytest.mark.parametrize(("kind", "seed"), [("cut", 1), ("mute", 2), ("crash", 3), ("blink", 4)])
def test_histories_fit_together(monkeypatch, kind, seed):
    monkeypatch.setenv("PYCOLL_SECRET", "only the ranks of this test know it")
    told = {}
    _, events, wrong = chaos_hosts.play(seed, [kind], told)
    assert wrong == [], events
    assert kind == "blink" or told[kind]
