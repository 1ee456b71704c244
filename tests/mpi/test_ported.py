"""Programs of mpi4py and what became of them: the same output, in no more lines."""

import subprocess
import sys

import pytest

import mpirun

EXAMPLES = mpirun.ROOT / "examples/mpi4py"
NAMES = sorted(path.name for path in EXAMPLES.glob("*.py"))


def lines(path):
    return sum(bool(line.strip()) for line in path.read_text().splitlines())


def output(command):
    done = subprocess.run(
        command, env=mpirun.environment(), capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_there_are_ten():
    assert len(NAMES) == 10
    assert NAMES == sorted(path.name for path in (EXAMPLES / "original").glob("*.py"))


@pytest.mark.parametrize("name", NAMES)
def test_a_program_prints_what_its_original_prints(name):
    if mpirun.missing():
        pytest.skip(mpirun.missing())
    original, port = EXAMPLES / "original" / name, EXAMPLES / name
    wanted = output([*mpirun.command(4), sys.executable, str(original)])
    assert wanted
    assert output([sys.executable, "-m", "pycoll", "run", "-n", "4", str(port)]) == wanted
    assert lines(port) <= lines(original)


@pytest.mark.parametrize("name", ["pi.py", "objects.py", "jacobi.py"])
def test_under_the_launcher_of_mpi_too(name):
    if mpirun.missing():
        pytest.skip(mpirun.missing())
    ours, theirs = EXAMPLES / name, EXAMPLES / "original" / name
    found = [output([*mpirun.command(3), sys.executable, str(path)]) for path in (ours, theirs)]
    assert found[0] == found[1]
