"""``pycoll verify``: which world sizes are meant."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pycoll.cli import main, verify
from pycoll.cli.verify import parse_worlds


@pytest.mark.parametrize(
    ("text", "worlds"),
    [
        ("8", [8]),
        ("1..4", [1, 2, 3, 4]),
        ("2..3,8,3", [2, 3, 8]),
        ("5..5", [5]),
        (" 1 .. 2 ", [1, 2]),
    ],
)
def test_world_sizes(text, worlds):
    assert parse_worlds(text) == worlds


@pytest.mark.parametrize(
    "text", ["1..", "..4", "..", "1..2..3", "8..1", "4,8..1", "0..2", "x", "1,"]
)
def test_what_is_no_list_of_world_sizes(capsys, text):
    assert main(["verify", "ring", "-n", text]) == 2
    assert f"{text!r} is no list of world sizes; write" in capsys.readouterr().err


def test_in_a_pipe_it_says_now_and_then_how_far_it_is(capsys, monkeypatch):
    words = ["verify", "all_reduce/ring", "-n", "2..4"]
    assert main(words) == 0
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(verify, "_SILENCE_S", 0)
    assert main(words) == 0
    told = capsys.readouterr().err.splitlines()
    assert [line[:13] for line in told] == [f"{i}/3 proven  a" for i in (1, 2, 3)]


def test_proofs_are_written_where_they_can_be(capsys, tmp_path):
    path = tmp_path / "new" / "proofs.json"
    assert main(["verify", "all_reduce/ring", "-n", "2", "--json", str(path)]) == 0
    assert main(["verify", "all_reduce/ring", "-n", "2", "--json", str(path / "x")]) == 2
    assert "proofs.json is no directory" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (["rinng"], "pycoll has no algorithm 'rinng'; did you mean 'ring'? known: ring, halving"),
        (["all_reduce"], "all_reduce is a collective; --collective all_reduce proves all"),
        (["all_reduce/rng"], "no algorithm 'all_reduce/rng'; did you mean 'all_reduce/ring'?"),
        (["rinng", "--collective", "gather"], "gather has no algorithm 'rinng'; known: direct, "),
        (["ring", "-n", "65537"], "-n 65537: expected at most 65536 ranks"),
        (["ring", "-n", "1..99999999999"], "expected at most 65536 ranks"),
        (["ring", "-n", "2", "--mutate", "--count", "-1"], "--count is -1, expected at least 1"),
        (["hierarchical", "-n", "7"], "all_reduce/hierarchical: not defined for these numbers of"),
        (["hierarchical", "-n", "5,7", "--mutate"], "numbers of ranks: 5, 7"),
        (["ring", "-n", "2", "--json", "a" * 300], "aaa': File name too long"),
        (["ring", "-n", "2", "--json", "/dev/full/x"], "--json '/dev/full/x': /dev/full is no"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused_before_the_work(capsys, args, told):
    assert main(["verify", *args]) == 2
    shown = capsys.readouterr()
    assert told in shown.err
    assert not shown.out


def command(*words):
    return [sys.executable, "-m", "pycoll", "verify", *words]


@pytest.mark.parametrize("end", ["os._exit(3)", "os.kill(os.getpid(), signal.SIGKILL)"])
def test_a_worker_that_is_killed_ends_the_command(tmp_path, end):
    path = tmp_path / "mine.py"
    path.write_text(
        "import os, signal\n"
        "from pycoll.schedule.ir import IN, OUT, algorithm, at, fold\n"
        "@algorithm('all_reduce', chunks=1, in_place=False)\n"
        "def mine(rank, n):\n"
        f"    if n == 3: {end}\n"
        "    yield fold([at(peer, IN) for peer in range(n)], to=at(rank, OUT))\n"
    )
    words = command(str(path), "-n", "2..5", "--jobs", "1")
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    told = f"was killed or ended itself; at work were: {path}, n=3. Was memory short?"
    assert told in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(("number", "status"), [("SIGINT", 130), ("SIGKILL", -9)])
def test_workers_end_quietly_with_the_command(number, status):
    words = command("--all", "-n", "64..512", "--jobs", "3")
    with subprocess.Popen(
        words, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            workers = []
            while len(workers) < 3 and process.poll() is None:
                time.sleep(0.05)
                workers = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
                workers = workers.split()
            time.sleep(0.5)  # until they work
            if number == "SIGINT":  # as a terminal does
                os.killpg(process.pid, signal.SIGINT)
            else:
                process.kill()
            assert process.wait(30) == status
            assert process.stderr.read() == ""  # it ends when the last of them has ended
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    assert len(workers) == 3
