"""``pycoll tune`` under an MPI launcher, and a job that uses what it has written."""

import subprocess
import sys

import mpirun
from pycoll.runtime.selection.tuning_table import Tuning

MESSAGES = {"PYCOLL_TRANSPORT": "mpi"}


def test_the_command(mpi, tmp_path):
    path = tmp_path / "table.json"
    words = [*mpirun.command(2), sys.executable, "-m", "pycoll", "tune", "-o", str(path)]
    words += ["--budget", "30", "--max", "64", "--only", "all_reduce"]
    environ = mpirun.environment(**MESSAGES)
    done = subprocess.run(words, env=environ, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    table = Tuning.parse(path.read_text())
    (world,) = table.worlds
    assert world.transport.startswith("messages of ")
    assert world.ranks_per_host == world.machine.ranks_per_host == (1, 1)
    found = mpi(2, "selection", PYCOLL_TUNING=str(path), PYCOLL_TIMEOUT="20", **MESSAGES)
    assert found == {"selection": [table.digest] * 2}


def test_two_levels(mpi):
    found = mpi(3, "tune", hosts=[0, 0, 1], PYCOLL_TIMEOUT="20")
    assert found == {"tune": [["two", [2, 1], []]] * 3}
