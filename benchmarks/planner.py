"""The planner's first choice beside measured layouts: ``benchmarks/planner.py [small] [medium]``.

Two ranks measure how fast they compute and sum, and train every layout below for six steps, each in
two rounds. It prints prediction and measurement of each, how much longer the planner's first choice
takes than the fastest, and how many pairs of layouts that differ by more than 5% it ranks rightly.
"""

import itertools
import os
import statistics
import sys

from harness import start

from pycoll.cli.measure import plan_steps
from pycoll.parallel import Workload, plan

WORKLOADS = {
    "small": Workload(layers=2, hidden=64, heads=4, vocabulary=256, sequence=64),
    "medium": Workload(layers=4, hidden=192, heads=4, vocabulary=512, sequence=128),
}
MESHES = ({"dp": 2}, {"tp": 2}, {"pp": 2})
MICRO_BATCHES, BATCH, ROUNDS = (1, 2, 4, 8), 16, 2


def measure(comm, name):
    """Return rows of mesh, micro-batches, predicted seconds and measured ones, fastest first."""
    work = WORKLOADS[name]
    given = {
        "memory": 8e9,
        "batch": BATCH,
        "precision": "fp32",
        "top": 1,
        "network": plan_steps.network(comm),
        "flops": plan_steps.speed(comm, work, BATCH, "fp32"),
    }
    found = []
    for mesh, micro in itertools.product(MESHES, MICRO_BATCHES):
        found += plan(work, 2, fixed={**mesh, "micro_batch": micro}, **given)
    times = [
        [plan_steps.measured(comm, work, each.layout, "fp32").seconds for each in found]
        for _ in range(ROUNDS)
    ]
    rows = []
    for each, took in zip(found, zip(*times, strict=True), strict=True):
        layout = each.layout
        mesh = ", ".join(f"{axis}={size}" for axis, size in layout.mesh.items() if size > 1)
        what = f"{mesh}, zero {layout.zero}, {layout.micro_batches} of {layout.micro_batch}"
        rows.append((what, each.seconds, statistics.median(took)))
    return sorted(rows, key=lambda row: row[1])


def main():
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # of each rank's BLAS
    for name in sys.argv[1:] or WORKLOADS:
        rows = start.measure(__file__, 2, name)
        print(f"{name}: {WORKLOADS[name]}")
        for what, predicted, took in rows:
            print(
                f"  {what:32s} predicted {1e3 * predicted:7.2f} ms, took {1e3 * took:7.2f} ms"
                f"  {predicted / took - 1:+.0%}"
            )
        best = min(took for *_, took in rows)
        pairs = [
            pair
            for pair in itertools.combinations(rows, 2)
            if abs(pair[0][2] - pair[1][2]) > 0.05 * min(pair[0][2], pair[1][2])
        ]
        right = sum((a[1] < b[1]) == (a[2] < b[2]) for a, b in pairs)
        off = statistics.median(abs(predicted / took - 1) for _, predicted, took in rows)
        print(
            f"  the first choice takes {rows[0][2] / best - 1:.0%} longer than the fastest of "
            f"{len(rows)}; {right} of {len(pairs)} pairs ranked rightly; off by {off:.0%} (median)"
        )


if __name__ == "__main__":
    start.main(main, measure)
