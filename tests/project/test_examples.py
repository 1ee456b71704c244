"""The examples run, say what they promise, and the README shows the same code."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"


def run(*command):
    """Run Python at the root of the repository; return what it printed."""
    command = [sys.executable, *map(str, command)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def run_ranks(n, *command):
    return run("-m", "pycoll", "run", "-n", n, *command)


def code_of(path):
    """Return the lines of an example behind its docstring."""
    return path.read_text(encoding="utf-8").partition('"""\n\n')[2]


@pytest.mark.parametrize("n", [1, 3])
def test_all_reduce(n):
    total = n * (n + 1) // 2
    shown = [f"{n} ranks: {total}, {total * (n - 1)}", *(str(n * k) for k in range(4))]
    output = run_ranks(n, EXAMPLES / "all_reduce.py")
    assert [output.count(text) >= 1 for text in shown] == [True] * len(shown)


def test_the_readme_shows_the_example_and_an_algorithm():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    _, example, _, algorithm, *_ = re.findall(r"```python\n(.*?)```", readme, re.S)
    assert example == code_of(EXAMPLES / "all_reduce.py")
    source = (ROOT / "pycoll" / "algorithms" / "ring.py").read_text(encoding="utf-8")
    head, body = algorithm.split("\n    ", 1)
    assert head in source
    assert body in source


def test_the_first_program_of_the_readme(tmp_path):
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    program = tmp_path / "first.py"
    program.write_text(re.search(r"```python\n(.*?)```", readme, re.S)[1], encoding="utf-8")
    promised = re.search(r"Every rank prints `([^`]*)`", readme)[1]
    assert run_ranks(4, program).count(promised) == 4


def test_training_ends_with_the_same_bits_on_any_number_of_ranks(tmp_path):
    pytest.importorskip("sklearn")
    for n in (1, 2, 4):
        run_ranks(n, EXAMPLES / "digits.py", "--epochs", "2", "--save", tmp_path / f"{n}")
    first, *others = [(tmp_path / f"{n}").read_bytes() for n in (1, 2, 4)]
    assert len(first) == 4 * 3610
    assert others == [first, first]


def test_sharded_training_ends_with_the_same_bits():
    pytest.importorskip("sklearn")
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (promised,) = re.findall(r"digits_zero.py --zero (\d) +# the same bits", readme)
    runs = [(1, 0), (2, 1), (4, promised)]
    last = [
        run_ranks(n, EXAMPLES / "digits_zero.py", "--zero", zero, "--steps", 10).splitlines()[-1]
        for n, zero in runs
    ]
    assert last[0].startswith("params sha256=")
    assert last == [last[0]] * 3


def test_ranks_that_do_not_divide_the_micro_batches():
    pytest.importorskip("sklearn")
    command = [sys.executable, "-m", "pycoll", "run", "-n", "3", EXAMPLES / "digits_zero.py"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    told = "digits_zero: 8 micro-batches do not divide among 3 ranks; take 1, 2, 4 or 8\n"
    assert done.stderr.startswith(told)
    assert "Traceback" not in done.stderr


def test_axes_of_a_mesh_that_are_none():
    command = [sys.executable, EXAMPLES / "train_gpt.py", "--mesh", "dp2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.stderr.endswith("argument --mesh: 'dp2' is not like dp=2,tp=2\n")


def test_overlap():
    output = run_ranks(2, EXAMPLES / "overlap.py")
    assert output.count("of the shorter of the two is hidden") == 2


def test_those_who_are_left_train_to_the_end():
    output = run_ranks(4, "--keep-going", EXAMPLES / "survive.py")
    assert "2 ranks are left, weights [ 1. -2.  3.]" in output
    assert output.count("goes on as rank") == 3 + 2


def test_demo_is_not_for_a_launcher():
    command = [sys.executable, "-m", "pycoll", "run", "-n", "2", EXAMPLES / "demo.py"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "demo: it starts ranks by itself; run it as `python examples/demo.py`" in done.stderr
    assert "Traceback" not in done.stderr


def test_demo(tmp_path):
    pytest.importorskip("sklearn")
    pytest.importorskip("matplotlib")
    picture = tmp_path / "schedule.png"
    output = run(EXAMPLES / "demo.py", "--epochs", "3", "--max", "4K", "--out", picture)
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "bit-identical, whatever the number of ranks" in output
    assert "in another order ends elsewhere" in output
    assert "# Out of bounds values : 0 OK" in output
    assert [f"epoch {i:3}" in output for i in (1, 2, 3)] == [True] * 3
