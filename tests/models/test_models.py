"""Models of protocols, searched whole by SPIN: each holds, and each of its mutants does not."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent
MODELS = sorted(HERE.glob("*.pml"))

pytestmark = pytest.mark.skipif(
    not (shutil.which("spin") and shutil.which("gcc")), reason="needs SPIN (apt-get install spin)"
)


def outcome(program, mutant):
    """Return the number of errors that a search of all states finds."""
    env = {**os.environ, "MUTANT": str(mutant)}
    command = [program, "-m100000"]
    done = subprocess.run(command, env=env, cwd=program.parent, capture_output=True, text=True)
    assert "max search depth too small" not in done.stdout, done.stdout
    return int(re.search(r"errors: (\d+)", done.stdout)[1])


@pytest.mark.parametrize("model", MODELS, ids=lambda path: path.stem)
def test_model_and_its_mutants(model, tmp_path):
    mutants = [int(found) for found in re.findall(r"^ \* mutant (\d+):", model.read_text(), re.M)]
    assert mutants
    assert mutants == list(range(1, len(mutants) + 1))
    subprocess.run(["spin", "-a", model], cwd=tmp_path, check=True, capture_output=True)
    program = tmp_path / "pan"
    build = ["gcc", "-O1", "-w", "-DSAFETY", "-o", program, "pan.c"]
    subprocess.run(build, cwd=tmp_path, check=True)
    assert outcome(program, 0) == 0
    assert [m for m in mutants if outcome(program, m) == 0] == []
