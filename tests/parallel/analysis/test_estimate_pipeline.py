"""The estimate of a stage of a pipeline is what its ledger counts."""

import numpy as np
import pytest

from pycoll.errors import ArgumentError
from pycoll.parallel import Mesh, Pipeline, estimate
from pycoll.parallel.gpt import GPT
from pycoll.parallel.nn import TransformerConfig
from pycoll.testing import run_threads

M = 4


def network(tied=False):
    config = TransformerConfig(vocabulary=64, features=32, heads=2, depth=4, length=8)
    return GPT(config, seed=1, tied=tied)


def batch(step):
    tokens = np.random.default_rng(step).integers(0, 64, (M, 2, 9))
    return [(rows[:, :-1], rows[:, 1:]) for rows in tokens]


def measured(comm, schedule, tied, options, axes):
    parts = (model := network(tied)), model.loss()
    with Mesh(comm, **axes) as mesh, Pipeline(*parts, mesh, schedule, M, **options) as e:
        rest = {**e.ledger.live, "stored": e.ledger.stored["optimizer"]}
        for step in range(4):
            report = e.step(batch(step))
        sent = {k: v for k, v in report.bytes.items() if k not in ("pipeline", "tied", "count")}
        return e.stage, rest, report.peak_bytes, sent


@pytest.mark.parametrize(
    ("schedule", "zero", "tied", "recompute", "offload", "axes"),
    [
        ("1f1b", 0, False, "none", "none", {"pp": 2}),
        ("1f1b", 0, False, "none", "all", {"pp": 2}),
        ("gpipe", 3, False, "none", "none", {"dp": 2, "pp": 2}),
        ("zb_h1", 3, False, "none", "activations", {"dp": 2, "pp": 2}),
        ("1f1b", 2, True, 2, "none", {"dp": 2, "pp": 2}),
        ("zb_v", 1, False, "full", "optimizer", {"dp": 2, "pp": 2}),
        ("pipedream", 0, False, "none", "none", {"pp": 3}),
        ("2bw", 1, False, "none", "none", {"dp": 2, "pp": 2}),
    ],
)
def test_every_stage_holds_what_is_estimated(schedule, zero, tied, recompute, offload, axes):
    n = int(np.prod(list(axes.values())))
    more = {"zero": zero, "bucket_bytes": 20000, "recompute": recompute, "offload": offload}
    shape = {"micro_batches": M, "schedule": schedule, "sample": batch(0)[0]}
    for stage, rest, peak, sent in run_threads(
        n, lambda c: measured(c, schedule, tied, more, axes)
    ):
        found = estimate(network(tied), None, axes, stage=stage, **shape, **more)
        assert found.parameter == rest["parameter"]
        assert found.gradient == rest["gradient"]
        assert found.optimizer == rest.get("optimizer", 0)
        assert found.stored == rest["stored"]
        assert found.peak == pytest.approx(peak, rel=0.01)
        if schedule not in ("pipedream", "2bw"):  # they agree within a stage
            wire = {k: v for k, v in found.wire.items() if k != "count"}
            assert wire == sent


def test_live_activations_and_what_is_refused():
    shape = {"micro_batches": 8, "schedule": "1f1b"}
    live = [estimate(network(), None, {"pp": 4}, stage=s, **shape).live for s in range(4)]
    assert live == [4, 3, 2, 1]
    with pytest.raises(ArgumentError, match=r"stage=4; accepted are integers in \[0, 4\)"):
        estimate(network(), None, {"pp": 4}, stage=4, **shape)
    with pytest.raises(ArgumentError, match="Pipeline takes pp"):
        estimate(network(), None, {"pp": 4})
