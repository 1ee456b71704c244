"""Pipeline schedules on the command line."""

import json

import pytest

from pycoll.cli import main
from pycoll.parallel.pipeline.registry import SCHEDULES

MINE = """
from pycoll.parallel.pipeline import B, F, W, pipeline

@pipeline("mine", live=lambda stage, p, m: m)
def mine(stage, p, m):
    yield from map(F, range(m))
    for i in range(m):
        yield from ({order})
"""


def test_all_are_proven(capsys, tmp_path):
    path = tmp_path / "proofs.json"
    assert main(["verify", "pipeline:all", "-p", "2,4", "-m", "1,8", "--json", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:]] == [schedule.name for schedule in SCHEDULES]
    rows = {row["schedule"]: row for row in json.loads(path.read_text())}
    assert rows["zb_h1"]["bubble"] == "11.1%"
    assert (rows["2bw"]["proven"], rows["2bw"]["not defined"]) == (2, 2)


def test_a_schedule_is_printed(capsys):
    assert main(["show", "pipeline:1f1b", "-p", "2", "-m", "2"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "1f1b, 2 stages, 2 micro-batches: bubble 25.0% of 8 units",
        "stage 0: F0 F1 .  B0 W0 .  B1 W1",
        "stage 1: .  F0 B0 W0 F1 B1 W1 .",
    ]


def test_a_schedule_is_drawn(capsys, tmp_path):
    path = tmp_path / "zb.png"
    assert main(["show", "pipeline:zb_v", "-p", "2", "-m", "3", "-o", str(path)]) == 0
    assert path.read_bytes().startswith(b"\x89PNG")
    assert capsys.readouterr().out.startswith("drew zb_v, 2 stages, 3 micro-batches to ")


@pytest.mark.parametrize("right", [True, False])
def test_one_of_a_file(capsys, tmp_path, right):
    path = tmp_path / f"mine_{right}.py"
    path.write_text(MINE.format(order="B(i), W(i)" if right else "W(i), B(i)"))
    code = main(["verify", f"pipeline:{path}:mine", "-p", "3", "-m", "4"])
    told = capsys.readouterr()
    assert code == (0 if right else 2)
    text = told.out if right else told.err
    assert ("mine " if right else "stage 2 is at W0.2 and needs B0.2") in text


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["verify", "pipeline:1fb"], "did you mean 1f1b?"),
        (["verify", "pipeline:2bw", "-p", "4", "-m", "1..3"], "at least 1 stage and 4 micro"),
        (["verify", "pipeline:1f1b", "-p", "x"], "'x' is no list of world sizes"),
        (["show", "pipeline:all"], "one at a time"),
        (["show", "pipeline:1f1b", "-m", "1,2"], "-m is '1,2', expected a number"),
        (["show", "pipeline:gpipe", "-p", "8", "-m", "400"], "too many to print; draw it with -o"),
    ],
)
def test_what_is_refused(capsys, arguments, text):
    assert main(arguments) == 2
    assert text in capsys.readouterr().err
