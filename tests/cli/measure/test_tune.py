"""``pycoll tune``: real runs, and what the table that they write is used for."""

import json
import os
import subprocess
import sys

import pytest

from pycoll.algorithms import ALGORITHMS
from pycoll.cli import main, run
from pycoll.cli.measure.tune_machine import slope
from pycoll.cli.tune import names_of, save
from pycoll.runtime.selection.tuning_table import Time, Tuning, World, fingerprint
from pycoll.schedule.cost.cost import Machine
from pycoll.schedule.cost.network import Network
from pycoll.testing import run_processes

QUICK = ("--budget", "40", "--max", "256", "--only", "all_reduce")


def tune(folder, *args):
    done = subprocess.run(
        [sys.executable, "-m", "pycoll", "tune", *args],
        cwd=folder,
        env={**os.environ, "XDG_CONFIG_HOME": str(folder)},
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done


@pytest.fixture(scope="module")
def tuned(tmp_path_factory):
    """A folder with a table for worlds of two and three ranks, and what was printed."""
    folder = tmp_path_factory.mktemp("config")
    return folder, tune(folder, "-n", "2,3", *QUICK)


def test_what_the_table_says(tuned):
    folder, done = tuned
    table = Tuning.parse((folder / "pycoll" / "tuning.json").read_text())
    assert table.fingerprint == json.loads(json.dumps(fingerprint()))
    assert [w.place for w in table.worlds] == [("shared memory", (n,)) for n in (2, 3)]
    names = {a.name for a in ALGORITHMS}
    for world in table.worlds:
        assert isinstance(world.machine, Machine)
        assert 0 < world.machine.beta < 1e-8
        assert {t.collective for t in world.times} == {"all_reduce"}
        assert {64, 256} <= {t.nbytes for t in world.times}
        assert {t.algorithm for t in world.times} - {""} <= names
        assert all(0 < t.low <= t.seconds <= t.high < 10 for t in world.times)
        for rule in world.rules:
            assert rule.seconds < rule.default_seconds
            assert rule.algorithm != rule.default
    assert "2 ranks, shared memory: " in done.stdout
    assert "3 ranks, shared memory: " in done.stdout
    assert "alpha " in done.stdout
    assert "2 ranks: all_reduce, 64 B" in done.stderr


def test_a_job_uses_it_and_the_command_explains_it(tuned, capsys, monkeypatch):
    folder, _ = tuned
    script = folder / "script.py"
    script.write_text(
        "import pycoll\nwith pycoll.init() as c: print(f'digest is {c.check().selection!r}')\n"
    )
    words = [sys.executable, "-m", "pycoll", "run", "-n", "2", str(script)]
    env = {**os.environ, "XDG_CONFIG_HOME": str(folder)}
    env["PYTHONPATH"] = os.pathsep.join(sys.path)
    digest = Tuning.parse((folder / "pycoll" / "tuning.json").read_text()).digest
    for setting, expected in (("auto", digest), ("off", "")):
        env["PYCOLL_TUNING"] = setting
        done = subprocess.run(words, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert done.stdout.count(f"digest is {expected!r}") == 2
    monkeypatch.setenv("XDG_CONFIG_HOME", str(folder))
    monkeypatch.setenv("PYCOLL_TUNING", "auto")
    assert main(["explain", "all_reduce", "-n", "2", "--bytes", "256"]) == 0
    out = capsys.readouterr().out
    assert "as measured here" in out
    assert "measured at 256 B: " in out
    assert main(["explain", "all_reduce", "-n", "2", "--bytes", "256", "--tuning", "off"]) == 0
    assert "nothing was measured here" in capsys.readouterr().out
    assert main(["explain", "all_reduce", "-n", "2", "--tuning", "/not/there"]) == 2
    assert "/not/there cannot be used: it cannot be read" in capsys.readouterr().err
    assert main(["explain", "all_reduce", "-n", "2", "--tuning", "/dev/zero"]) == 2
    assert "/dev/zero cannot be used: it cannot be read: it is no file" in capsys.readouterr().err


def test_the_doctor_sees_it(tuned, tmp_path, capsys, monkeypatch):
    folder, _ = tuned
    for place, line in (
        (folder, f"{folder}/pycoll/tuning.json: 2 ranks, shared memory; 3 ranks, shared memory"),
        (tmp_path, "nothing was measured here"),
    ):
        monkeypatch.setenv("XDG_CONFIG_HOME", str(place))
        assert main(["doctor"]) == 0
        assert line in capsys.readouterr().out
    (tmp_path / "pycoll").mkdir()
    (tmp_path / "pycoll" / "tuning.json").write_text("{}")
    assert main(["doctor"]) == 0
    assert "tuning.json is not used: its schema" in capsys.readouterr().out


def test_explain_for_several_hosts(capsys):
    assert main(["explain", "broadcast", "--hosts", "2,2", "--bytes", "1M", "--tuning", "off"]) == 0
    out = capsys.readouterr().out
    assert "on 4 ranks" in out
    assert "per message between them" in out
    assert main(["explain", "broadcast", "--hosts", "2,x", "--tuning", "off"]) == 2
    assert "--hosts is '2,x'" in capsys.readouterr().err


def test_explain_in_two_levels(tmp_path, capsys):
    times = tuple(
        Time("all_reduce", 1024, False, name, order, seconds, seconds, seconds)
        for name, order, seconds in (("", "tree", 3e-6), ("ring", "", 9e-6))
    )
    made = World("two levels over X 1", (2, 2), Network(ranks_per_host=(2, 2)), times, (), "now")
    path = tmp_path / "table.json"
    path.write_text(Tuning(fingerprint(), (made,)).to_json())
    words = ["explain", "all_reduce", "--bytes", "1K", "--hosts", "2,2", "--tuning", str(path)]
    assert main(words) == 0
    out = capsys.readouterr().out
    assert "goes in two levels: 3.00 us" in out
    assert "9.00 us" in out
    assert main([*words, "--order", "any"]) == 0
    assert "two levels" not in capsys.readouterr().out


def world(n, taken=""):
    return World("shared memory", (n,), Machine(), (), (), taken)


def test_worlds_are_added_and_replaced(tmp_path, capsys):
    path = tmp_path / "a" / "table.json"
    for made in (world(2, "old"), world(3), world(2, "new")):
        save(path, made)
    assert [(w.ranks_per_host, w.taken) for w in Tuning.parse(path.read_text()).worlds] == [
        ((3,), ""),
        ((2,), "new"),
    ]
    assert list(path.parent.iterdir()) == [path]
    path.write_text(Tuning({"cpu": "Z80"}, (world(5),)).to_json())
    save(path, world(2))
    assert "is dropped: it was measured with another cpu" in capsys.readouterr().out
    assert len(Tuning.parse(path.read_text()).worlds) == 1
    path.write_text("no table")
    save(path, world(2))
    assert "is dropped: it is not JSON" in capsys.readouterr().out


def test_processes_that_save_at_once_keep_what_the_others_have_measured(tmp_path):
    path = tmp_path / "a" / "table.json"

    def rank(comm):
        comm.barrier()
        for n in range(10):
            save(path, world(2 + comm.rank + 4 * n))

    run_processes(4, rank)
    saved = Tuning.parse(path.read_text()).worlds
    assert sorted(w.ranks_per_host[0] for w in saved) == list(range(2, 42))
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (["-n", "1"], "-n is '1'"),
        (["-n", "two"], "-n is 'two'"),
        (["--budget", "0"], "--budget is 0.0"),
        (["--only", "reduce,barrier"], "--only barrier is not known"),
        (["--max", "1"], "--max is 1"),
        (["-n", "2,5000"], "-n is '2,5000', expected at most 4096 ranks"),
        (["-n", "2", "--transport", "mpi"], "--transport mpi is for ranks that mpiexec has"),
        (["--output", "a" * 300], "aaa': File name too long"),
    ],
)
def test_wrong_arguments(capsys, monkeypatch, args, told):
    monkeypatch.setattr(run, "main", lambda job: pytest.fail("ranks were started"))
    assert main(["tune", *args]) == 2
    assert told in capsys.readouterr().err


def test_a_collective_is_measured_once():
    assert names_of("reduce,all_reduce,reduce") == ["reduce", "all_reduce"]


def test_slopes_do_not_follow_one_odd_point():
    points = [(x, 3 * x + 1) for x in range(6)]
    assert slope(points) == pytest.approx(3)
    assert slope([*points, (6, 100)]) == pytest.approx(3, rel=0.3)
    assert slope([(0, 5), (1, 4)]) > 0


def test_a_file_without_an_end(capsys):
    assert main(["tune", "--output", "/dev/zero"]) == 2
    assert "'/dev/zero' holds something else than a table" in capsys.readouterr().err


def test_a_place_where_no_file_can_be_made(capsys):
    for command in (["tune", "--output"], ["bench", "all_reduce", "-n", "1", "--json"]):
        assert main([*command, "/proc/table.json"]) == 2
        assert "'/proc/table.json': it cannot be written" in capsys.readouterr().err


@pytest.mark.parametrize("there", ["import pycoll\n", None])
def test_a_file_that_is_no_table_is_left_alone(tmp_path, there, capsys):
    path = tmp_path / "train.py"
    if there is None:
        path.mkdir()
    else:
        path.write_text(there)
    assert main(["tune", "--output", str(path)]) == 2
    told = "a directory" if there is None else "holds something else than a table"
    assert told in capsys.readouterr().err
    assert there is None or path.read_text() == there
