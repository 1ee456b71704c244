"""Random calls and faults on one host and over TCP; chaos.py plays as many rounds as one likes."""

import subprocess
import sys
from pathlib import Path

import pytest

CHAOS = Path(__file__).with_name("chaos.py")


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_no_round_holds_a_surprise(transport):
    words = [sys.executable, str(CHAOS), "--rounds", "8", "--seed", "1", "--transport", transport]
    words += ["--bound", "30"]  # the machine may be busy
    done = subprocess.run(words, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert "8 rounds without a surprise" in done.stdout
