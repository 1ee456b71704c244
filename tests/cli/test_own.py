"""Algorithms of a file: proven, shown and measured like those of the registry."""

import re
import textwrap
from pathlib import Path

import pytest

from pycoll.cli import main
from pycoll.cli.common.arguments import lookup
from pycoll.schedule.lowering.compile import peer_plans

ROOT = Path(__file__).resolve().parents[2]

MINE = """
from pycoll.schedule.ir import IN, OUT, algorithm, at, fold

@algorithm("all_reduce", "mine", chunks=1, in_place=False)
def mine(rank, n):
    yield fold([at(peer, IN) for peer in range(n)], to=at(rank, OUT))
"""
WRONG = MINE.replace("range(n)", "range(n - 1)").replace("mine", "wrong")


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(MINE)
    return path


def test_a_right_one_is_proven_and_shown(file, capsys):
    for name in (str(file), f"{file}:mine"):
        assert main(["verify", name, "-n", "1..5"]) == 0
        assert "5 of 5 proven" in capsys.readouterr().out
        assert main(["show", name, "-n", "3"]) == 0
        assert "all_reduce · mine · n = 3" in capsys.readouterr().out


def test_the_file_to_begin_with_is_proven_as_it_stands(file, capsys):
    contributing = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    (shown,) = re.findall(r"```python\n(.*?)```", contributing, re.S)
    file.write_text(textwrap.dedent(shown))
    assert main(["verify", f"{file}:mine", "-n", "1..8"]) == 0
    assert "8 of 8 proven" in capsys.readouterr().out


def test_a_wrong_one_is_refused(file, capsys):
    file.write_text(MINE + WRONG)
    assert main(["verify", f"{file}:wrong", "-n", "2..3"]) == 1
    out = capsys.readouterr().out
    assert "FAILED all_reduce/wrong(n=3), direct" in out
    assert "holds nothing from rank 2" in out


@pytest.mark.parametrize(
    ("text", "name", "told"),
    [
        (MINE + WRONG, "", "several algorithms; there are: mine, wrong"),
        (MINE, ":yours", "no algorithm 'yours'; there are: mine"),
        ("x = 1", "", "no algorithm ''; there are: none"),
        ("1 / 0", "", "ZeroDivisionError: division by zero"),
        ("raise SystemExit(0)", "", "SystemExit: 0"),
        (None, "", "FileNotFoundError"),
    ],
)
def test_files_without_it(file, capsys, text, name, told):
    if text is None:
        file.unlink()
    else:
        file.write_text(text)
    for command in ("verify", "show"):
        assert main([command, f"{file}{name}"]) == 2
        assert told in capsys.readouterr().err


def test_it_is_measured(jobs):
    (jobs.folder / "mine.py").write_text(MINE)
    arguments = ["all_reduce", "-n", "2", "--max", "64", "--iters", "3", "--short"]
    done = jobs.python("-m", "pycoll", "bench", *arguments, "--algorithm", "mine.py:mine")
    assert done.returncode == 0, done.stderr
    assert "mine, staged" in done.stdout
    assert "Out of bounds values : 0 OK" in done.stdout


AS_PYTHON = """
from __future__ import annotations
import pickle
import sys
from dataclasses import dataclass
from pathlib import Path

from beside import RANKS

@dataclass
class Shape:
    rows: int

assert pickle.loads(pickle.dumps(Shape(RANKS))) == Shape(2)
with Path(__file__).with_name("log").open("a") as log:
    log.write("loaded\\n")
"""


def test_the_file_is_loaded_as_python_would_and_once(tmp_path, jobs):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "beside.py").write_text("RANKS = 2")
    for name in ("mine.py", "json.py"):  # one of these names is taken
        log = tmp_path / "folder" / "log"
        log.write_text("")
        (tmp_path / "folder" / name).write_text(AS_PYTHON + MINE)
        done = jobs.python("-m", "pycoll", "verify", f"folder/{name}", "-n", "1..9")
        assert "9 of 9 proven" in done.stdout, done.stderr
        assert log.read_text() == "loaded\n"


ROLLED = """
import numpy as np
from pycoll.schedule.ir import IN, OUT, algorithm, at, fold

@algorithm("all_gather", "rolled")
def rolled(rank, n):
    yield fold(at(rank, IN, rank), to=at(rank, OUT, rank))
    left = np.roll(rank, 1)
    for step in range(n - 1):
        yield fold(at(left, OUT, rank - step - 1), to=at(rank, OUT, rank - step - 1))
"""


@pytest.mark.parametrize("staged", [[], ["--staged"]])
def test_the_program_that_is_shown_is_the_one_that_runs(file, capsys, staged):
    file.write_text(ROLLED)
    assert main(["show", str(file), "-n", "4", "--plan", "2", *staged]) == 0
    schedule = lookup(str(file)).schedule(4)
    assert capsys.readouterr().out == peer_plans(schedule, direct=not staged)[2].listing() + "\n"


def test_one_that_fits_no_world(file, capsys):
    file.write_text(MINE.replace("chunks=1", "chunks=1, worlds=lambda n: n == 6"))
    assert main(["verify", f"{file}:mine", "-n", "4"]) == 2
    assert f"{file}:mine: not defined for these numbers of ranks: 4" in capsys.readouterr().err
