"""Data-parallel steps in time, beside what can be said by hand."""

import numpy as np
import pytest

from pycoll.errors import ArgumentError
from pycoll.parallel.analysis.training import Part, fastest_sum, step_time
from pycoll.schedule.cost.described import fabric

NETWORK = fabric("switch:bw=1G,latency=10us,fold=1000T", 4)


def test_one_bucket_is_summed_after_the_backward_pass():
    parts = [Part(1.0, 2.0, 1e6), Part(3.0, 4.0, 1e6)]
    found = step_time(parts, NETWORK, bucket_bytes=1e9)
    assert found.compute == 10.0
    assert found.reducing == fastest_sum(NETWORK, 2e6)
    assert found.exposed == pytest.approx(found.reducing)
    assert found.total == pytest.approx(10.0 + found.reducing)


def test_sums_hide_behind_the_rest_of_the_backward_pass():
    parts = [Part(1.0, 2.0, 10), *[Part(1.0, 2.0, 1e6)] * 3]
    found = step_time(parts, NETWORK, bucket_bytes=1e6)
    assert found.exposed == pytest.approx(fastest_sum(NETWORK, 10))
    assert found.reducing == pytest.approx(fastest_sum(NETWORK, 10) + 3 * fastest_sum(NETWORK, 1e6))


def test_sums_that_take_longer_than_the_passes_follow_each_other():
    parts = [Part(0.0, 1e-9, 1e6)] * 5
    found = step_time(parts, NETWORK, bucket_bytes=1e6)
    assert found.exposed == pytest.approx(5 * fastest_sum(NETWORK, 1e6), rel=1e-3)


def test_a_step_waits_for_the_rank_that_loses_most():
    losses = np.random.default_rng(0).exponential(1.0, (4000, 4)).max(axis=1).mean()
    found = step_time([Part(1.0, 1.0, 1.0)], NETWORK, noise_s=1.0)
    assert found.waiting == pytest.approx(losses - 1.0, abs=0.06)  # of which each loses its own


def test_groups_near_each_other_are_used():
    network = fabric("rails:gpus=8,bw=1G,near_bw=100G", 64)
    flat = fabric("rails:gpus=1,bw=1G,near_bw=100G", 64)
    assert fastest_sum(network, 1e8) < 0.3 * fastest_sum(flat, 1e8)
    assert fastest_sum(fabric("switch", 1), 1e8) == 0.0


@pytest.mark.parametrize("change", [{"bucket_bytes": 0}, {"noise_s": -1.0}])
def test_what_is_refused(change):
    with pytest.raises(ArgumentError):
        step_time([Part(1.0, 1.0, 1.0)], NETWORK, **change)
