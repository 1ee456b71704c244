"""The table of subcommands, and ``pycoll doctor``."""

import argparse
import subprocess
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest

from pycoll import cli
from pycoll.cli import doctor
from pycoll.errors import ArgumentError


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


def test_errors_of_pycoll_are_one_line(command, capsys):
    def refuse(args):
        raise ArgumentError("no such size")

    command.main = refuse
    assert cli.main(["bench"]) == 2
    assert capsys.readouterr().err == "pycoll bench: no such size\n"


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


def test_no_command_shows_the_help(capsys):
    assert cli.main([]) == 2
    assert "doctor" in capsys.readouterr().err


@pytest.mark.parametrize(("present", "status"), [(True, 0), (False, 1)])
def test_doctor_says_whether_the_engine_is_there(monkeypatch, capsys, present, status):
    engine = ModuleType("pycoll._C")
    engine.fold_isa = lambda: "base"
    monkeypatch.setitem(sys.modules, "pycoll._C", engine if present else None)
    assert doctor.main(argparse.Namespace()) == status
    out = capsys.readouterr().out
    assert ("folds with base" in out) == present
    assert ("make build" in out) != present
    assert "memfd         works" in out
    assert "futex         works" in out
