"""``pycoll show``: pictures, rounds, programs, and the page of all algorithms."""

import errno
from pathlib import Path

import pytest

from pycoll.algorithms import ALGORITHMS, find
from pycoll.cli import main
from pycoll.cli.show import algorithms_page
from pycoll.runtime.selection.rules import RULES
from pycoll.schedule.lowering.compile import peer_plan
from pycoll.schedule.pictures import as_text

PAGE = Path(__file__).resolve().parents[2] / "docs" / "algorithms.md"


def test_a_picture(tmp_path, capsys):
    path = tmp_path / "hd.png"
    assert main(["show", "halving_doubling", "-n", "8", "-o", str(path)]) == 0
    assert path.read_bytes().startswith(b"\x89PNG")
    assert str(path) in capsys.readouterr().out


def test_a_page_to_step_through(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["show", "ring,halving_doubling", "-n", "4", "--html"]) == 0
    assert "ring_halving_doubling.html" in capsys.readouterr().out
    page = (tmp_path / "ring_halving_doubling.html").read_text()
    assert "all_reduce · ring · n = 4" in page
    assert main(["show", "ring", "-n", "4", "-o", "one.html"]) == 0
    assert (tmp_path / "one.html").stat().st_size < len(page)


def test_rounds_are_the_default(capsys):
    assert main(["show", "ring", "-n", "3", "--collective", "all_gather"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("all_gather · ring · n = 3")
    assert "round 1\n" in out


@pytest.mark.parametrize("staged", [False, True])
def test_the_program_of_a_rank(capsys, staged):
    options = ["--staged"] if staged else []
    assert main(["show", "ring", "-n", "4", "--plan", "2", *options]) == 0
    plan = peer_plan(find("all_reduce", "ring").schedule(4), 2, direct=not staged)
    shown = capsys.readouterr().out
    assert shown == plan.listing() + "\n"
    assert "  signal step 1\n" in shown
    assert ("  signal done\n" in shown) is not staged


def test_parameters(capsys):
    command = ["show", "ring", "-n", "4", "--collective", "broadcast"]
    assert main([*command, "--param", "root=2", "--param", "k=3"]) == 0
    assert "root = 2, k = 3" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (["halving_dubling"], "halving_doubling"),
        (["doubling"], "--collective all_gather or scan or exscan has it"),
        ([], "ring"),
        (["ring,halving_doubling"], "several algorithms fit on a page only: --html"),
        (["ring", "-n", "0"], "0 ranks"),
        (["ring", "-n", "100000"], "at most 4096 ranks"),
        (["ring", "-o", "/dev/full/x.png"], "cannot write '/dev/full/x.png'"),
        (["ring", "--plan", "8"], "0 to 7"),
        (["ring", "--param", "k"], "root=1"),
        (["ring", "--param", "root=--5"], "--param is 'root=--5', expected a name and a number"),
        (["ring", "--param", "root=²"], "--param is 'root=²', expected a name and a number"),
        (["ring", "--param", "k=8"], "unknown parameter 'k'"),
        (["ring", "-n", "40", "-o", "x.png"], "at most 32"),
        (["ring", "-n", "4", "-o", "x"], "its suffix tells the format"),
    ],
)
def test_wrong_arguments(capsys, args, told):
    assert main(["show", *args]) == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize("place", ["file/x.svg", "x.svg"])
def test_a_picture_that_cannot_be_written(capsys, tmp_path, place):
    (tmp_path / "x.svg").mkdir()
    (tmp_path / "file").touch()
    path = tmp_path / place
    assert main(["show", "ring", "-n", "3", "-o", str(path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"pycoll show: cannot write {str(path)!r}: ")


def test_the_page_lists_everything(capsys):
    assert main(["show", "--table"]) == 0
    page = capsys.readouterr().out
    assert page == algorithms_page()
    rows = [line for line in page.splitlines() if line.startswith("| ")]
    assert len(rows) == 4 + len(ALGORITHMS) + len(RULES)
    for algorithm in ALGORITHMS:
        assert any(f"| {algorithm.collective} | `{algorithm.name}` |" in row for row in rows)


def test_the_page_in_the_repository_is_current():
    regenerate = "run: pycoll show --table > docs/algorithms.md"
    assert PAGE.read_text(encoding="utf-8") == algorithms_page(), regenerate


def test_a_picture_that_cannot_be_written_leaves_nothing(tmp_path, capsys, monkeypatch):
    def full(self, content):
        self.touch()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    kept = tmp_path / "kept.png"
    kept.touch()
    for path in (tmp_path / "new.png", kept):
        assert main(["show", "ring", "-n", "2", "-o", str(path)]) == 2
        assert f"cannot write '{path}': No space left" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [kept]


def test_the_text_of_a_large_world_comes_line_by_line():
    lines = as_text(find("all_reduce", "one_shot").schedule(300))
    assert next(lines).startswith("all_reduce")
    assert sum(1 for _ in lines) == 300 * 300 + 2
