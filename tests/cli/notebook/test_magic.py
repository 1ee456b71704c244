"""Ranks in a notebook: what cells print, how they fail, and that ranks go on or are gone."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

pytest.importorskip("IPython", reason="IPython is not installed")
from IPython.core.interactiveshell import InteractiveShell

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def shell():
    """A shell with the magics; its ranks end with it."""
    shell = InteractiveShell()
    shell.run_line_magic("load_ext", "pycoll")
    yield shell
    shell.run_line_magic("ranks", "stop")


@pytest.fixture
def run(shell, capsys, monkeypatch):
    """``run(n, cell)`` returns the sorted lines that a cell prints; its error is raised."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))

    def run(line, cell):
        capsys.readouterr()
        shell.run_cell_magic("ranks", line, cell)
        return sorted(capsys.readouterr().out.splitlines())

    return run


def test_lines_and_values_come_by_rank(run):
    assert run("3", "import numpy as np\nx = np.full(2, comm.rank)\nprint(comm.rank)") == [
        *("[0] 0", "[1] 1", "[2] 2"),
    ]
    assert run("", "comm.all_reduce(x)") == ["[0-2] array([3, 3])"]
    assert run("", "print('a', end=''); comm.rank // 2") == [
        *("[0-1] 0", "[0] a", "[1] a", "[2] 1", "[2] a"),
    ]


def test_a_variable_comes_to_the_notebook(run, shell):
    run("3 --get y", "y = {'rank': comm.rank}")
    assert shell.user_ns["y"] == [{"rank": rank} for rank in range(3)]
    with pytest.raises(Exception, match="rank 0: there is no variable 'nothing'"):
        run("3 --get nothing", "pass")


@pytest.mark.parametrize(
    ("cell", "told", "line"),
    [
        ("if comm.rank == 1: 1 / 0\ncomm.barrier()", "rank 1: ZeroDivisionError", "1 / 0"),
        ("comm.all_reduce([1] * (1 + comm.rank // 2))", "field 'count' differs", "MismatchError"),
        ("x = (", "never closed", "SyntaxError"),
    ],
)
def test_a_cell_fails_and_the_next_one_works(run, cell, told, line):
    run("3", "kept = 5")
    with pytest.raises(Exception, match=told) as caught:
        run("", cell)
    shown = "\n".join(caught.value._render_traceback_())
    assert line in shown
    assert "pycoll/cli/notebook" not in shown
    assert run("", "comm.all_reduce([kept])") == ["[0-2] array([15])"]


def test_what_a_thread_prints_between_cells_comes_with_the_next_one(run, shell):
    late = "threading.Timer(0.3, sys.stdout.write, ['late\\n']).start()"
    run("2", f"import sys, threading\nx = comm.rank\nif comm.rank: {late}")
    time.sleep(1)
    shell.run_line_magic("ranks", "2 --get x")
    assert shell.user_ns["x"] == [0, 1]
    assert run("", "comm.world_size") == ["[0-1] 2", "[1] late"]


def test_an_interrupt_reaches_the_ranks(run):
    run("3", "import time")
    timer = threading.Timer(0.5, os.kill, [os.getpid(), signal.SIGINT])
    start = time.monotonic()
    timer.start()
    with pytest.raises(Exception, match="KeyboardInterrupt on the ranks"):
        run("", "if comm.rank: time.sleep(60)\ncomm.barrier()")
    assert time.monotonic() - start < 30
    assert run("", "comm.world_size") == ["[0-2] 3"]


def test_a_rank_that_ends_is_told(run):
    with pytest.raises(Exception, match=r"rank 1 has ended .*exited with code 3"):
        run("2", "import os\nif comm.rank: os._exit(3)\ncomm.barrier()")
    assert run("2", "comm.world_size") == ["[0-1] 2"]


def test_ranks_end_with_the_notebook(run, shell):
    found = run("2", "os = __import__('os'); os.getpid()")
    pids = [int(line.split()[1]) for line in found]
    shell.run_line_magic("ranks", "stop")
    assert [pid for pid in pids if Path(f"/proc/{pid}").exists()] == []


@pytest.mark.parametrize("line", ["0", "-1", "some"])
def test_what_is_no_number_is_refused(shell, line):
    with pytest.raises(Exception, match=r"not .|unrecognized"):
        shell.run_cell_magic("ranks", line, "pass")


EXECUTE = """
import sys, nbformat, nbclient
book = nbformat.read(sys.argv[1], as_version=4)
nbclient.NotebookClient(book, timeout=60, kernel_name="python3").execute()
nbformat.write(book, sys.argv[2])
"""


def outputs(path):
    """Return the sorted lines of text of each cell of code."""
    cells = [c for c in json.loads(path.read_text())["cells"] if c["cell_type"] == "code"]
    return [
        sorted("".join("".join(o.get("text", "")) for o in c["outputs"]).splitlines())
        for c in cells
    ]


def test_the_example_prints_what_it_shows(tmp_path):
    pytest.importorskip("nbclient", reason="nbclient is not installed")
    pytest.importorskip("ipykernel", reason="ipykernel is not installed")
    example, done = ROOT / "examples" / "notebook.ipynb", tmp_path / "done.ipynb"
    environ = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", EXECUTE, str(example), str(done)]
    subprocess.run(command, check=True, env=environ, capture_output=True, timeout=100)
    assert outputs(done) == outputs(example)
    assert outputs(example)[1][-1].startswith("[3] I have")
