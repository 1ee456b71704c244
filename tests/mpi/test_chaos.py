"""Random calls and faults over MPI; chaos.py plays as many rounds as one likes."""

import subprocess
import sys
from pathlib import Path

import pytest

import mpirun

CHAOS = Path(__file__).with_name("chaos.py")


@pytest.mark.parametrize("ranks", [2, 4])
def test_no_round_holds_a_surprise(ranks):
    if reason := mpirun.missing():
        pytest.skip(reason)
    words = [sys.executable, str(CHAOS), "--rounds", "20", "--seed", "1", "--ranks", str(ranks)]
    words += ["--bound", "30"]  # the machine may be busy
    done = subprocess.run(words, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert "20 rounds without a surprise" in done.stdout
