"""What a build and the driver find here, told before there is a pycoll to import."""

import importlib
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).resolve().parent)]

from rows import Writer

import build_cuda

MODES = "name,compute_mode,mig.mode.current,persistence_mode,driver_version"


def said(*command):
    """Return what a command prints, or why it cannot be run."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.SubprocessError) as error:
        return str(error)
    return (done.stdout + done.stderr).strip()


def version(name):
    """Return the version of a package and where it lies."""
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        return str(error)
    return f"{getattr(module, '__version__', '?')} in {os.path.dirname(module.__file__)}"


def looks():
    """Yield what was looked at, and what was found."""
    yield "python", f"{sys.version} at {sys.executable}"
    header = os.path.join(sysconfig.get_path("include"), "Python.h")
    yield "Python.h", f"{header} {'exists' if os.path.exists(header) else 'is missing'}"
    for name in ("setuptools", "pybind11", "numpy", "array_api_compat"):
        yield name, version(name)
    yield "g++", said(os.environ.get("CXX", "g++"), "--version").partition("\n")[0]
    yield "nvcc", said(build_cuda.find_nvcc() or "nvcc", "--version").replace("\n", "; ")
    yield "cores", len(os.sched_getaffinity(0))
    smi = shutil.which("nvidia-smi") or "/usr/local/nvidia/bin/nvidia-smi"
    yield "modes of the device", said(smi, f"--query-gpu={MODES}", "--format=csv")
    yield "compute policy", said(smi, "compute-policy", "-l")


def main():
    writer = Writer(os.environ.get("PYCOLL_GPU_ROWS", os.devnull), "tools")
    for what, found in looks():
        writer.row("tool", None, what=what, found=found)
        print(f"{what}: {found}", flush=True)


if __name__ == "__main__":
    main()
