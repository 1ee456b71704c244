"""The table of subcommands, and ``pycoll doctor``."""

import argparse
import os
import shutil
import subprocess
import sys
from importlib.machinery import EXTENSION_SUFFIXES, ModuleSpec
from pathlib import Path
from types import ModuleType

import pytest

from pycoll import cli
from pycoll.cli import doctor
from pycoll.errors import ArgumentError

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def command(monkeypatch):
    """Stand in for ``pycoll bench`` with a command that does what a test says."""
    module = ModuleType("pycoll.cli.bench")
    module.__spec__ = ModuleSpec(module.__name__, None)
    module.add_parser = lambda subparsers: subparsers.add_parser("bench").add_argument("-n")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


def test_arguments_and_status_are_passed_on(command):
    command.main = lambda args: int(args.n)
    assert cli.main(["bench", "-n", "5"]) == 5
    command.main = lambda args: None
    assert cli.main(["bench"]) == 0


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ArgumentError("no such size"), "no such size"),
        (MemoryError("unable to allocate 9 TiB"), "out of memory: unable to allocate 9 TiB"),
    ],
)
def test_these_errors_are_one_line(command, capsys, error, text):
    def fail(args):
        raise error

    command.main = fail
    assert cli.main(["bench"]) == 2
    assert capsys.readouterr().err == f"pycoll bench: {text}\n"


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_help_is_plain_text(capsys, name):
    with pytest.raises(SystemExit, match="0"):
        cli.main([name, "--help"])
    assert "``" not in capsys.readouterr().out


@pytest.mark.parametrize("name", ["show", "explain", "doctor"])
def test_a_disk_that_is_full_is_one_line(name):
    arguments = {"show": ["ring", "-n", "4"], "explain": ["all_reduce", "-n", "2"]}.get(name, [])
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "pycoll", name, *arguments],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
        )
    assert done.returncode == 2
    text = f"pycoll {name}: cannot write: No space left on device\n"
    assert done.stderr == text


def test_a_locale_without_the_signs():
    plain = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    done = subprocess.run(
        [sys.executable, "-m", "pycoll", "show", "ring", "-n", "4"],
        env=os.environ | plain,
        capture_output=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"rounds" in done.stdout


def test_other_errors_keep_their_traceback(command):
    def fail(args):
        raise KeyError("a mistake")

    command.main = fail
    with pytest.raises(KeyError, match="a mistake"):
        cli.main(["bench"])


def test_help_lists_every_command_and_loads_none():
    script = (
        "import sys; from pycoll.cli import COMMANDS, main\n"
        "try: main(['--help'])\n"
        "finally: print([c for c in COMMANDS if 'pycoll.cli.' + c in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    listed = [line.split()[0] for line in done.stdout.splitlines() if line.startswith("    ")]
    assert set(cli.COMMANDS) <= set(listed)
    assert done.stdout.endswith("[]\n")


def test_an_unknown_command_is_refused(capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(["solve"])
    assert end.value.code == 2
    assert "'solve'" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main(["rum"])
    assert "there is no command 'rum'; did you mean 'run'? known: " in capsys.readouterr().err


def test_no_command_shows_the_help(capsys):
    assert cli.main([]) == 2
    assert "doctor" in capsys.readouterr().err


def test_doctor_finds_all_that_is_needed(capsys):
    assert doctor.main(argparse.Namespace()) == 0
    out = capsys.readouterr().out
    assert "engine        folds with" in out
    assert "memfd         works" in out
    assert "futex         works" in out


def test_doctor_tells_packages_that_are_broken(tmp_path):
    (tmp_path / "rich.py").write_text("raise ValueError('of another age')")
    (tmp_path / "pytest.py").write_text("import os; os._exit(3)")
    environ = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    command = [sys.executable, "-m", "pycoll", "doctor"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert "absent  rich          cannot be imported: ValueError: of another age\n" in done.stdout
    assert "absent  pytest        cannot be imported: status 3\n" in done.stdout
    assert "ok      matplotlib    for pictures" in done.stdout


@pytest.mark.parametrize("words", ["show ring -n 4 -o", "bench all_reduce -n 2 --max 64 --plot"])
def test_a_backend_that_matplotlib_does_not_know(tmp_path, words):
    command = [sys.executable, "-m", "pycoll", *words.split(), str(tmp_path / "x.png")]
    environ = os.environ | {"MPLBACKEND": "foo"}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "matplotlib cannot be loaded: Key backend: 'foo' is not a valid" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.fixture
def without_engine(tmp_path):
    """A copy of the Python sources alone; returns a function that runs the command in it."""
    shutil.copytree(
        ROOT / "pycoll", tmp_path / "pycoll", ignore=shutil.ignore_patterns("*.so", "__pycache__")
    )

    def run(*words):
        environ = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        return subprocess.run(
            [sys.executable, *words], cwd=tmp_path, env=environ, capture_output=True, text=True
        )

    return run


def test_doctor_without_an_engine(without_engine, tmp_path):
    done = without_engine("-m", "pycoll", "doctor")
    assert (done.returncode, done.stderr) == (1, "")
    assert f"MISSING engine        is not there: no _C*.so in {tmp_path}/pycoll" in done.stdout
    assert "make build" in done.stdout
    assert "memfd         works" in done.stdout


def test_doctor_with_a_broken_engine(without_engine, tmp_path):
    (tmp_path / "pycoll" / "_C.cpython-37m-x86_64-linux-gnu.so").write_bytes(b"old")
    done = without_engine("-m", "pycoll", "doctor")
    assert (done.returncode, done.stderr) == (1, "")
    assert "is built for another Python or machine: _C.cpython-37m" in done.stdout
    suffix = EXTENSION_SUFFIXES[0]
    (tmp_path / "pycoll" / f"_C{suffix}").write_bytes(b"cut off")
    done = without_engine("-m", "pycoll", "doctor")
    assert (done.returncode, done.stderr) == (1, "")
    assert f"_C{suffix} is broken: " in done.stdout
    assert "remove it, then build it" in done.stdout


def test_without_an_engine_the_rest_says_so(without_engine):
    done = without_engine("-m", "pycoll", "bench", "all_reduce")
    assert done.returncode == 2
    assert "No module named 'pycoll._C'" in done.stderr
    assert "pycoll doctor" in done.stderr
    assert "Traceback" not in done.stderr
    done = without_engine("-c", "import pycoll; pycoll.CollError; pycoll.init()")
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith("ImportError: pycoll cannot be used: No module named 'pycoll._C'")
    assert "python -m pycoll doctor" in last
    done = without_engine("-c", "import pycoll; pycoll.nothing")
    assert "has no attribute 'nothing'" in done.stderr


@pytest.mark.parametrize("before", [[], ["as it was"]])
def test_a_file_that_does_not_fit_leaves_what_was_there(tmp_path, before):
    program = (
        "import resource, sys\n"
        "from pycoll.cli.common.arguments import put\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))\n"
        "put(sys.argv[1], 'x' * 1000)\n"
    )
    path = tmp_path / "folder" / "results.json"
    for text in before:
        path.parent.mkdir()
        path.write_text(text, encoding="utf-8")
    command = [sys.executable, "-c", program, str(path)]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert "ArgumentError: cannot write" in done.stderr
    assert [file.read_text(encoding="utf-8") for file in path.parent.iterdir()] == before


@pytest.mark.parametrize("closed", [">&-", "2>&-"])
def test_closed_output(closed):
    verify = f"{sys.executable} -m pycoll verify --all -n 2 --collective reduce"
    run = f"{sys.executable} -m pycoll run -n 2 --tag-output -m this"
    for command in (verify, run):
        done = subprocess.run(
            ["sh", "-c", f"{command} {closed}"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stderr
