"""Algorithms of a file: proven, shown and measured like those of the registry."""

import re
import textwrap
from pathlib import Path

import pytest

from pycoll.cli import main

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
