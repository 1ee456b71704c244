"""Start test programs under the MPI launcher that belongs to this interpreter's mpi4py."""

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = ROOT / "tests/mpi/programs.py"


def launcher():
    """Return the path of mpiexec beside this interpreter, or on the path; None if there is none."""
    beside = Path(sys.executable).with_name("mpiexec")
    return str(beside) if beside.exists() else shutil.which("mpiexec")


def missing():
    """Say what the tests of MPI lack; empty if nothing."""
    if importlib.util.find_spec("mpi4py") is None:
        return "mpi4py is not installed"
    return "" if launcher() else "there is no mpiexec"


def is_open_mpi():
    """Whether the launcher is that of Open MPI, whose options differ."""
    text = subprocess.run([launcher(), "--version"], capture_output=True, text=True, timeout=60)
    return "Open MPI" in text.stdout or "open-mpi" in text.stdout or "prte" in text.stdout.lower()


def lacks(*options):
    """Whether the launcher does not know these options."""
    words = [launcher(), *options, "-n", "1", "true"]
    said = subprocess.run(words, env=environment(), capture_output=True, text=True, timeout=60)
    return said.returncode != 0 and options[0].lstrip("-") in said.stdout + said.stderr


def command(n):
    """Return the words that start n ranks, more than there are cores too."""
    words = [launcher(), "-n", str(n)]
    return [*words, "--oversubscribe"] if is_open_mpi() else words


def environment(**variables):
    """Return the environment for a launcher, which may run as root in a container."""
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    path = os.pathsep.join(
        [
            str(ROOT),
            str(ROOT / "tests/support"),
            str(ROOT / "tests"),
            os.environ.get("PYTHONPATH", ""),
        ]
    )
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("OMPI_", "PMI", "PYCOLL_"))}
    return {**kept, **root, "PYTHONPATH": path, "PYCOLL_TUNING": "off", **variables}


def start(n, names, folder, hosts=None, options=(), **variables):
    """Start programs of programs.py on n ranks; every rank writes its result to the folder.

    Args:
        n: Number of ranks.
        names: Programs.
        folder: Where results go.
        hosts: Number of the host of each rank; by default the real ones.
        options: More words for the launcher.
        **variables: Of the environment.
    """
    arguments = [str(folder), ",".join(names), *([json.dumps(hosts)] if hosts else [])]
    return launch(n, PROGRAMS, arguments, options, **variables)


def launch(n, program, arguments, options=(), **variables):
    """Start a program on n ranks; see `start`."""
    words = [*command(n), *options, sys.executable, str(program), *arguments]
    return subprocess.Popen(
        words,
        env=environment(**variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def finish(process, timeout):
    """Wait for a job; return its output. Kill all of it after the time."""
    try:
        return process.communicate(timeout=timeout)[0]
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise AssertionError(f"not done in {timeout} s:\n{process.communicate()[0]}") from None


def results(n, folder):
    """Return what each rank has written; None for one that has not."""
    paths = [Path(folder) / f"{rank}.json" for rank in range(n)]
    return [json.loads(p.read_text()) if p.exists() else None for p in paths]


def run(n, names, folder, timeout=60, **variables):
    """Run programs on n ranks; return what each returned on each rank, by name.

    Raises:
        AssertionError: With the output, if a rank failed or the time is over.
    """
    process = start(n, names, folder, **variables)
    output = finish(process, timeout)
    found = results(n, folder)
    assert process.returncode == 0, output
    assert None not in found, output
    return {name: [result[name] for result in found] for name in names}
