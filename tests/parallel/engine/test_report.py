"""What a step reports: tokens, memory, waits by bucket, how ranks compare; files of scalars."""

import csv
import json

import numpy as np
import pytest

from parallel.models import CrossEntropy, batches, mlp
from pycoll.errors import ArgumentError
from pycoll.parallel import SGD, DataParallel, Mesh, Scalars
from pycoll.testing import run_threads

OWN = 4  # samples of most ranks


def steps(comm):
    """Take two steps; rank 1 has three times the samples of the others."""
    engine = DataParallel(mlp(), CrossEntropy(), Mesh(comm, dp=-1), optimizer=SGD(), zero=1)
    x, y = batches(1)[0]
    n = 3 * OWN if comm.rank == 1 else OWN
    x, y = np.resize(x, (n, x.shape[1])), np.resize(y, n)
    engine.step([(x, y)])
    report = engine.step([(x, y)])
    return report, report.imbalance(comm)


@pytest.mark.parametrize("n", [1, 2, 3])
def test_figures_of_a_step(n):
    for rank, (report, imbalance) in enumerate(run_threads(n, steps)):
        assert report.own_samples == (3 * OWN if rank == 1 else OWN)
        assert report.samples == OWN * (n + 2 * (n > 1))
        assert report.tokens_per_s == report.samples / report.seconds
        assert sum(report.bucket_waits.values()) <= report.waited_s + 1e-9
        assert bool(report.bucket_waits) == (n > 1)  # one rank waits for nobody
        assert max(report.peaks.values()) <= report.peak_bytes <= sum(report.peaks.values())
        assert report.peaks["parameter"] > 0
        assert imbalance["samples"] == pytest.approx(3 * n / (n + 2) if n > 1 else 1)
        assert all(value >= 0.999 for value in imbalance.values())
        scalars = report.scalars(imbalance)
        assert scalars["process_peak_bytes"] > 1 << 20
        buckets = {key: value for key, value in scalars.items() if key.startswith("bucket_wait/")}
        assert buckets == {f"bucket_wait/{k}": v for k, v in report.bucket_waits.items()}
        assert scalars["imbalance/samples"] == imbalance["samples"]


@pytest.mark.parametrize("name", ["run.csv", "run.jsonl"])
def test_files_of_scalars(tmp_path, name):
    for part in (0, 1):  # a second run goes on
        with Scalars(tmp_path / name) as scalars:
            for step in range(2):
                scalars.add(2 * part + step, {"loss": 0.5 / (step + 1), "wait/gradient": 0.25})
    with open(tmp_path / name, newline="") as file:
        rows = list(csv.DictReader(file)) if name == "run.csv" else list(map(json.loads, file))
    assert [int(row["step"]) for row in rows] == [0, 1, 2, 3]
    assert [float(row["loss"]) for row in rows] == [0.5, 0.25, 0.5, 0.25]
    assert all(float(row["wait/gradient"]) == 0.25 for row in rows)


def test_scalars_are_refused(tmp_path):
    with pytest.raises(ArgumentError, match=r"ends neither in \.csv nor in \.jsonl"):
        Scalars(tmp_path / "run.txt")
    with pytest.raises(ArgumentError, match="cannot write"):
        Scalars(tmp_path / "no" / "run.csv")


def test_local_steps_have_fewer_figures(tmp_path):
    """Every second step averages: its waits and bytes get columns when they come."""

    def rank(comm):
        mesh = Mesh(comm, replica=-1)
        engine = DataParallel(mlp(), CrossEntropy(), mesh, optimizer=SGD(), sync_every=2)
        with Scalars(tmp_path / f"run{comm.rank}.csv") as scalars:
            reports = [engine.step(batches(1)) for _ in range(4)]
            for step, report in enumerate(reports):
                scalars.add(step, report.scalars())
        return reports

    reports = run_threads(2, rank)[0]
    assert set(reports[1].scalars()) > set(reports[0].scalars())
    with open(tmp_path / "run0.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    for report, row in zip(reports, rows, strict=True):
        figures = {name: float(text) for name, text in row.items() if text and name != "step"}
        assert figures["loss"] == report.loss
        assert figures.keys() == report.scalars().keys()
