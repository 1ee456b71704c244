"""``pycoll tune`` under an MPI launcher, and a job that uses what it has written."""

import subprocess
import sys

import pytest

import mpirun
from pycoll.runtime.tuning import Tuning
from pycoll.schedule.network import Network

CASES = [
    (2, "messages of", [1, 1], {"PYCOLL_TRANSPORT": "mpi"}),
    (3, "two levels over", [2, 1], {"PYCOLL_PRETEND_HOSTS": "2,1"}),
]


@pytest.mark.parametrize(("n", "transport", "ranks", "variables"), CASES)
def test_tune(mpi, tmp_path, n, transport, ranks, variables):
    path = tmp_path / "table.json"
    words = [*mpirun.command(n), sys.executable, "-m", "pycoll", "tune", "-o", str(path)]
    words += ["--budget", "30", "--max", "256", "--only", "all_reduce,gather"]
    done = subprocess.run(
        words,
        env=mpirun.environment(**variables),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    table = Tuning.parse(path.read_text())
    (world,) = table.worlds
    assert world.transport.startswith(transport)
    assert list(world.ranks_per_host) == ranks
    assert isinstance(world.machine, Network)
    assert world.machine.ranks_per_host == tuple(ranks)
    assert 0 < world.machine.far_alpha < 1
    assert {t.collective for t in world.times} == {"all_reduce", "gather"}
    assert not any(t.symmetric for t in world.times)
    used = {"PYCOLL_TUNING": str(path), "PYCOLL_TIMEOUT": "20", **variables}
    found = mpi(n, "selection", **used)
    assert found == {"selection": [table.digest] * n}
