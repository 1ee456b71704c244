"""Pipeline schedules: a training step as data, written, proven, timed and drawn before it runs.

`program` is the language and the lowering to sends and receives, `schedules` and `streams` are the
schedules (with a flush, and without), `proof` checks a program, `timing` predicts its time and
memory, `picture` draws it; they use `pycoll.errors` only. `engine` runs a program on top of the
data-parallel engine. Read `program` first.
"""

from pycoll.parallel.pipeline.engine import Pipeline
from pycoll.parallel.pipeline.program import B, F, Op, Program, Schedule, W, pipeline
from pycoll.parallel.pipeline.proof import Proof, prove
from pycoll.parallel.pipeline.timing import Costs, Timing, simulate

__all__ = [
    "B",
    "Costs",
    "F",
    "Op",
    "Pipeline",
    "Program",
    "Proof",
    "Schedule",
    "Timing",
    "W",
    "pipeline",
    "prove",
    "simulate",
]
