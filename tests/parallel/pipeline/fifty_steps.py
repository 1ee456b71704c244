"""Fifty steps of every schedule with a flush, on every mesh: ``python fifty_steps.py 1x2 2x2 ...``.

Run by hand from the root, with ``PYTHONPATH=.:tests``; about a minute for each mesh. Every ZeRO
stage, with recompute and offload on and off in turn (``--all``: each with each), against one
process that loops over the micro-batches of all ranks; stages 2 and 3, which reduce every
micro-batch, against data parallelism of the same stage when ``dp`` is more than 1.
"""

import argparse
import itertools
import sys
import time

from parallel.pipeline.test_engine import SETTINGS, SYNCHRONOUS, batch, model
from pycoll.parallel import DataParallel, Mesh, Pipeline
from pycoll.parallel.engine import offload
from pycoll.parallel.nn import CrossEntropy
from pycoll.testing import run_threads

STEPS, MICRO_BATCHES = 50, 8
LIMIT_S = 600  # it may run behind everything else
WAYS = list(itertools.product(("none", "full"), ("none", "all")))


def reference(comm, dp, zero):
    """Return losses, norms and parameters without a pipeline."""
    places = range(dp) if comm.world_size == 1 else [comm.rank]
    with (
        Mesh(comm, dp=-1) as mesh,
        DataParallel(model(), CrossEntropy(), mesh, zero=zero, **SETTINGS) as engine,
    ):
        steps = [[x for p in places for x in batch(s, p, MICRO_BATCHES)] for s in range(STEPS)]
        return run(engine, steps)


def piped(comm, dp, pp, schedule, zero, recompute, away):
    """Return the same through a pipeline."""
    more = {"zero": zero, "recompute": recompute, "offload": away, **SETTINGS}
    with (
        Mesh(comm, dp=dp, pp=pp) as mesh,
        Pipeline(model(), CrossEntropy(), mesh, schedule, MICRO_BATCHES, **more) as engine,
    ):
        place = mesh.coordinate("dp")
        return run(engine, [batch(s, place, MICRO_BATCHES) for s in range(STEPS)])


def run(engine, steps):
    reports = [engine.step(samples) for samples in steps]
    return [(r.loss, r.grad_norm) for r in reports], engine.gather()


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("meshes", nargs="+", help="sizes of dp and pp, such as 2x2")
    parser.add_argument("--zero", type=int, nargs="+", default=range(4), help="ZeRO stages (all)")
    parser.add_argument("--all", action="store_true", help="recompute and offload, each with each")
    chosen = parser.parse_args()
    offload.LEAST_BYTES = 1  # these arrays are small
    for name in chosen.meshes:
        dp, pp = map(int, name.split("x"))
        start, runs = time.monotonic(), 0
        for zero in chosen.zero:
            ranks = dp if zero > 1 else 1
            log, expected = run_threads(ranks, reference, dp, zero, timeout=LIMIT_S)[0]
            for at, schedule in enumerate(SYNCHRONOUS):
                for way in WAYS if chosen.all else [WAYS[(at + zero) % len(WAYS)]]:
                    args = dp, pp, schedule, zero, *way
                    for found in run_threads(dp * pp, piped, *args, timeout=LIMIT_S):
                        assert found[0] == log, (name, zero, schedule, way)
                        for parameter, value in expected.items():
                            same = found[1][parameter].tobytes() == value.tobytes()
                            assert same, (name, zero, schedule, way, parameter)
                    runs += 1
        seconds = time.monotonic() - start
        sys.stdout.write(f"{name}: {runs} runs with the bits of one process, {seconds:.0f} s\n")


if __name__ == "__main__":
    main()
