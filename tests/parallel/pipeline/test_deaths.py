"""Stages that die before a step, or in the middle of one."""

import os
import signal
import time

import pytest

from parallel.pipeline.test_engine import batch, model
from pycoll.errors import PeerLost
from pycoll.parallel import Mesh, Pipeline
from pycoll.parallel.nn import CrossEntropy, ReLU, Sequential
from pycoll.testing import run_processes


class Deadly(ReLU):
    """Ends its process in a backward pass through it."""

    left = -1  # passes of this process until then; below 0: never

    def backward_input(self, params, saved, dy):
        if Deadly.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        Deadly.left -= 1
        return super().backward_input(params, saved, dy)


@pytest.mark.parametrize(
    ("dp", "pp", "schedule", "passes"),
    [
        (1, 3, "1f1b", None),
        (2, 2, "1f1b", 3),
        (1, 2, "zb_v", 5),
        (1, 3, "gpipe", 0),
        (1, 3, "pipedream", 2),
    ],
)
def test_a_dead_stage_is_lost_everywhere_within_a_second(dp, pp, schedule, passes):
    """Before a step, or in one of its backward passes."""
    layers = [(name, Deadly() if type(x) is ReLU else x) for name, x in model(9).layers]

    def rank(comm):
        with (
            Mesh(comm, dp=dp, pp=pp) as mesh,
            Pipeline(Sequential(layers), CrossEntropy(), mesh, schedule, 4) as engine,
        ):
            batches = [batch(step, mesh.coordinate("dp"), 4) for step in range(4)]
            for samples in batches[:2]:
                engine.step(samples)
            if comm.rank == 1 and passes is None:
                os.kill(os.getpid(), signal.SIGKILL)
            Deadly.left = passes if comm.rank == 1 else -1
            start = time.monotonic()
            with pytest.raises(PeerLost, match="rank 1"):
                list(map(engine.step, batches[2:]))
            return time.monotonic() - start

    waits = run_processes(dp * pp, rank, may_die={1})
    assert max(wait for place, wait in enumerate(waits) if place != 1) < 1
