"""What a script sees of ``pycoll run``, and what the command line refuses."""

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from cli.conftest import RUN
from pycoll.cli.run import MAX_RANKS

ROOT = Path(__file__).resolve().parents[3]

IDENTITY = """
print(json.dumps([sys.argv, sys.path[0], __name__, __file__, repr(__spec__),
    sys.modules["__main__"].__dict__ is globals(), sys.stdin.read()]))
"""
ALONE = {"PYCOLL_RANK": "0", "PYCOLL_WORLD_SIZE": "1"}


def test_a_script_sees_what_python_shows_it(jobs):
    path = jobs.script(IDENTITY)
    args = ["-n", "7", "--tag-output", "-m", "--", "a b", "--help"]
    done = jobs.run("-n", 1, path.name, *args, stdin="input")
    python = jobs.python(path.name, *args, stdin="input", **ALONE)
    assert done.stdout == python.stdout
    assert json.loads(done.stdout)[0] == ["script.py", *args]


def test_a_module_sees_what_python_shows_it(jobs):
    package = jobs.folder / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "__main__.py").write_text(jobs.script(IDENTITY).read_text())
    done = jobs.run("-n", 1, "-m", "package", "-n", "2", stdin="input")
    python = jobs.python("-m", "package", "-n", "2", stdin="input", **ALONE)
    assert done.stdout.split("ModuleSpec")[0] == python.stdout.split("ModuleSpec")[0]
    assert "ModuleSpec(name='package.__main__'" in done.stdout


def test_a_rank_whose_child_has_taken_its_place_is_told(jobs):
    path = jobs.script(
        """
        import pycoll

        child = os.fork()
        if child == 0:
            pycoll.init()
            os._exit(0)
        os.waitpid(child, 0)
        pycoll.init()
        """
    )
    done = jobs.run("-n", 1, path)
    assert done.returncode == 1
    assert "let no child process of a rank call init before the rank does" in done.stderr


def test_ranks_get_their_place_and_memory(jobs):
    path = jobs.script(
        """
        from pycoll.runtime.startup.bootstrap import discover
        launch = discover()
        names = [os.readlink(f"/proc/self/fd/{fd}") for fd in (launch.control_fd, launch.heap_fd)]
        inodes = [os.fstat(fd).st_ino for fd in (launch.control_fd, launch.heap_fd)]
        print(json.dumps([launch.rank, launch.world_size, names, inodes]))
        """
    )
    done = jobs.run("-n", 3, "--tag-output", path)
    assert (done.returncode, done.stderr) == (0, "")
    ranks, sizes, names, inodes = zip(
        *sorted(json.loads(line[4:]) for line in done.stdout.splitlines()), strict=True
    )
    assert (ranks, sizes) == ((0, 1, 2), (3, 3, 3))
    assert names[0] == ["/memfd:pycoll-control (deleted)", "/memfd:pycoll-heap (deleted)"]
    assert inodes[0] == inodes[1] == inodes[2]


@pytest.mark.parametrize("given", ["", "a secret of the user's own"])
def test_ranks_get_one_secret(jobs, monkeypatch, given):
    monkeypatch.setenv("PYCOLL_SECRET", given)
    path = jobs.script("print(os.environ['PYCOLL_SECRET'])")
    first, second = (jobs.run("-n", 2, path).stdout.split("\n")[:2] for _ in range(2))
    assert first[0] == first[1]
    assert second == ([given] * 2 if given else second)
    assert given or (len(first[0]) == 64 and first != second)


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_each_line_is_written_in_one_piece(jobs, unbuffered):
    path = jobs.script(
        """
        print("one", 2)
        print("first\\nlast")
        print("part", end="", flush=True)
        print(" and rest")
        sys.stdout.writelines(["a", "b\\n"])
        print("x" * 20000)
        print("no end", end="")
        """
    )
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)  # a datagram each write
    ours.setblocking(False)
    with ours, theirs:
        command = [*RUN, "-n", "1", str(path)]
        env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": unbuffered}
        subprocess.run(command, env=env, stdout=theirs, timeout=jobs.deadline_s, check=True)
        pieces = [ours.recv(1 << 16).decode() for _ in range(8)]
    lines = ["one 2\n", "first\n", "last\n", "part", " and rest\n", "ab\n", "x" * 20000 + "\n"]
    assert pieces == [*lines, "no end"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["-n", "0", __file__], "-n is 0, expected at least 1 rank"),
        (["-n", "4097", __file__], "-n is 4097, expected at most 4096 ranks"),
        (["-n", "2"], "no script given"),
        (["-n", "2", "none.py"], "'none.py' is not a file"),
        (["-n", "2", "-"], "'-' is not a file; for the text of a program there is -c"),
        (["-n", "2", "-m"], "-m needs the name of a module"),
        (["-n", "2", "-c"], "-c needs the text of a program"),
        (["-n", "2", "--timeout", "0", __file__], "--timeout is 0.0"),
        (["-n", "2", "--timeout", "nan", __file__], "--timeout is nan"),
        (["-n", "x", __file__], "invalid number of ranks value"),
        ([__file__], "how many ranks? pycoll run -n N script.py"),
        ([__file__, "-n", "2"], "what follows the script is for it"),
        (["-n", "2", sys.executable, "none.py"], "expected a script, -m and a module, or -c and"),
        (["-n", "2", sys.executable, "-c"], "or -c and a program, got -c"),
        (["-n", "2", "--timout", "3", __file__], "--timout; did you mean --timeout?"),
    ],
)
def test_bad_arguments(jobs, args, message):
    done = jobs.run(*args)
    assert done.returncode == 2
    assert message in done.stderr.splitlines()[-1]
    assert done.stderr.count("pycoll run:") == 1


def test_another_python_is_refused(jobs, tmp_path, monkeypatch):
    other = tmp_path / "python3"
    other.write_text("#!/bin/sh\n")
    other.chmod(0o755)
    said = f"{other} is not the Python of the ranks, {sys.executable}: leave {str(other)!r} out"
    for words in ([__file__], ["-c", "1"]):
        done = jobs.run("-n", "2", str(other), *words)
        assert done.returncode == 2
        assert said in done.stderr


@pytest.mark.parametrize("python", [[], [sys.executable]])
def test_a_text_as_python_takes_it(jobs, python):
    text = "import sys; print(__name__, sys.argv)"
    done = jobs.run("-n", "2", *python, "-c", text, "a", "-b")
    assert done.stdout.splitlines() == ["__main__ ['-c', 'a', '-b']"] * 2


def test_python_with_a_module_a_script_or_a_text_that_fails(jobs):
    done = jobs.run("-n", "2", sys.executable, "-m", "this")
    assert done.stdout.count("The Zen of Python") == 2
    done = jobs.run("-n", "2", sys.executable, jobs.script("print('here')"))
    assert done.stdout.splitlines() == ["here"] * 2
    done = jobs.run("-n", "2", sys.executable, "-c", "raise ValueError('why')")
    assert "ValueError: why" in done.stderr
    assert "<string>" in done.stderr
    text = "import pycoll; comm = pycoll.init()\ncomm.rank and exit('why')\ncomm.barrier()"
    done = jobs.run("-n", "2", "-c", text)
    assert "rank 0: PeerLeft: " in done.stderr
    assert done.stderr.splitlines()[-2].endswith("(<string>:3)")  # no line of pycoll


def test_the_largest_job_is_that_of_the_engine():
    text = (ROOT / "csrc/memory/control.h").read_text(encoding="utf-8")
    assert re.findall(r"kMaxWorldSize = (\d+);", text) == [str(MAX_RANKS)]


@pytest.mark.parametrize("timeout", ["inf", "1e300", "1e7"])
def test_a_timeout_that_never_comes(jobs, timeout):
    done = jobs.run("-n", 2, "--timeout", timeout, jobs.script("time.sleep(0.2)"))
    assert (done.returncode, done.stderr) == (0, "")


def test_ranks_are_bound_to_cores_of_their_own(jobs):
    script = jobs.script("print(rank, sorted(os.sched_getaffinity(0)))")
    usable = os.sched_getaffinity(0)
    ranks = min(2, len(usable))
    found = jobs.run("-n", ranks, "--bind", script)
    assert found.returncode == 0, found.stderr
    sets = [set(json.loads(line.partition(" ")[2])) for line in found.stdout.splitlines()]
    assert len(sets) == ranks
    assert set().union(*sets) <= usable
    many = jobs.run("-n", len(usable) + 1, "--bind", script)
    assert many.returncode == 0, many.stderr
    refused = jobs.run("-n", 2, "--bind", "--hosts", "a,b", script)
    assert "--bind are for ranks of one host" in refused.stderr
