"""``pycoll doctor``: check this installation and say how to mend what is missing."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import importlib
import importlib.util
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

from pycoll.cli.job.topology import described, topology
from pycoll.config import VERSION, tuning_path
from pycoll.cuda.probe import parts as cuda_parts
from pycoll.errors import ArgumentError, TransportError
from pycoll.runtime.startup.bootstrap import make_memfd

# Optional packages: module, extra that brings it, what it is for.
_EXTRAS = (
    ("rich", "tables and live progress"),
    ("matplotlib", "pictures of schedules and plots"),
    ("mpi4py", "ranks under an MPI launcher, and several hosts"),
    ("ml_dtypes", "bfloat16 and float8 in NumPy"),
    ("pytest", "the tests"),
)
_PACKAGE = Path(__file__).resolve().parents[1]
_SYS_FUTEX = {"x86_64": 202, "aarch64": 98}
_FUTEX_WAKE = 1
_IMPORT_S = 30  # for the optional packages together


@dataclass(frozen=True)
class Check:
    """One line of the report."""

    name: str  # what was looked at
    value: str  # what was found
    fix: str = ""  # what to do about it; empty when all is well
    required: bool = True  # pycoll does not work without it


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``doctor`` to the command line."""
    subparsers.add_parser("doctor", description="Check this installation; exit 1 if it is broken.")


def main(args: argparse.Namespace) -> int:
    """Print the report; return 1 when something that pycoll needs is missing."""
    del args
    parts = [Check(*part, required=False) for part in cuda_parts()]
    checks = [*_machine(), *_needed(), *_extras(), *parts, _tuning()]
    for check in checks:
        mark = "ok" if not check.fix else "MISSING" if check.required else "absent"
        print(f"{mark:8}{check.name:14}{check.value}")
    for check in checks:
        if check.fix:
            print(f"\n{check.name}: {check.fix}")
    return int(any(check.fix and check.required for check in checks))


def _machine() -> Iterator[Check]:
    system, machine = platform.system(), platform.machine()
    supported = system == "Linux" and machine in _SYS_FUTEX
    yield Check(
        "platform",
        f"{platform.platform()} ({machine})",
        "" if supported else "pycoll runs on Linux, x86-64 and aarch64",
    )
    old = sys.version_info < (3, 10)
    yield Check("Python", platform.python_version(), "install Python 3.10 or later" if old else "")
    usable = len(os.sched_getaffinity(0))
    yield Check("cores", f"{usable} usable of {os.cpu_count()}; more ranks than cores is allowed")
    yield Check("topology", f"{described(topology())}: `pycoll run --bind`")
    yield Check("memory", f"{_available()}; /dev/shm is not used")


def _available() -> str:
    """Tell the memory of the machine, and what a limit leaves to this process."""
    with open("/proc/meminfo", encoding="ascii") as lines:
        values = dict(line.split(":") for line in lines)
    total, free = (int(values[name].split()[0]) << 10 for name in ("MemTotal", "MemAvailable"))
    text = f"{total / 2**30:.1f} GiB, {free / 2**30:.1f} GiB available"
    try:
        left = importlib.import_module("pycoll._C").available_memory()
    except (ImportError, AttributeError):  # reported where the engine is checked
        return text
    if left > 0.9 * free:
        return text
    return f"{text}, of these {left / 2**30:.1f} GiB within the limits of this container"


def _needed() -> Iterator[Check]:
    yield Check("pycoll", VERSION)
    yield _numpy()
    yield _engine()
    yield _memfd()
    yield _futex()


def _numpy() -> Check:
    try:
        return Check("NumPy", importlib.import_module("numpy").__version__)
    except ImportError as error:
        return Check("NumPy", f"cannot be imported: {error}", "pip install numpy")


def _engine() -> Check:
    """Load the engine, and tell one that was never built from one that does not fit or is old."""
    built = sorted(path.name for path in _PACKAGE.glob("_C*.so"))
    fits = [name for name in built if name in {f"_C{end}" for end in EXTENSION_SUFFIXES}]
    build = "build it: make build, or pip install . in the sources"
    try:
        engine = importlib.import_module("pycoll._C")
        isa = engine.fold_isa()
    except (ImportError, AttributeError) as error:
        if not built:
            return Check("engine", f"is not there: no _C*.so in {_PACKAGE}", build)
        if not fits:
            value = f"is built for another Python or machine: {', '.join(built)}"
            return Check("engine", value, f"{build}; this Python loads _C{EXTENSION_SUFFIXES[0]}")
        return Check("engine", f"{fits[0]} is broken: {error}", f"remove it, then {build}")
    return Check("engine", f"folds with {isa}")


def _memfd() -> Check:
    try:
        fd = make_memfd("doctor")
    except TransportError as error:
        return Check("memfd", str(error), "use Linux 3.17 or later, and allow memfd_create")
    try:
        os.posix_fallocate(fd, 0, 4096)
        return Check("memfd", "works")
    except OSError as error:
        return Check("memfd", f"cannot be filled: {error.strerror}", "free some memory")
    finally:
        os.close(fd)


def _futex() -> Check:
    number = _SYS_FUTEX.get(platform.machine())
    if number is None:
        return Check("futex", "unknown on this machine", "use x86-64 or aarch64")
    word = ctypes.c_uint32(0)
    woken = ctypes.CDLL(None).syscall(number, ctypes.byref(word), _FUTEX_WAKE, 1, None, None, 0)
    return Check("futex", "works") if woken == 0 else Check("futex", "refused", "allow futex")


def _extras() -> list[Check]:
    """Import the optional packages, each in a process of its own: one may crash, or take for ever.

    They are looked for where this process looks, not in the current directory too.
    """
    code = "import sys; sys.path[:] = sys.argv[2:]; __import__(sys.argv[1])"
    with contextlib.ExitStack() as stack:
        tried = {}
        for module, _ in _EXTRAS:
            if importlib.util.find_spec(module) is not None:
                command = [sys.executable, "-c", code, module, *sys.path]
                quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL}
                process = subprocess.Popen(command, stderr=subprocess.PIPE, **quiet)
                tried[module] = stack.enter_context(process)
                stack.callback(process.kill)
        until = time.monotonic() + _IMPORT_S
        return [_extra(module, purpose, tried.get(module), until) for module, purpose in _EXTRAS]


def _extra(module: str, purpose: str, tried: subprocess.Popen | None, until: float) -> Check:
    what, fix = f"for {purpose}", f"for {purpose}: pip install {module}"
    if tried is None:
        return Check(module, what, fix, required=False)
    try:
        _, text = tried.communicate(timeout=max(0.1, until - time.monotonic()))
    except subprocess.TimeoutExpired:
        return Check(module, f"{what}; importing it takes more than {_IMPORT_S} s", fix, False)
    if tried.returncode == 0:
        return Check(module, what)
    last = (text.decode(errors="replace").splitlines() or [f"status {tried.returncode}"])[-1]
    return Check(module, f"cannot be imported: {last}", f"{what}: it is there, but broken", False)


def _tuning() -> Check:
    """Look at the table of measured times that `pycoll.init` would use."""
    path, fix = tuning_path(), "to let measured times choose algorithms: pycoll tune"
    if not os.path.exists(path):  # nor can it, where the name is too long
        return Check("tuning", "nothing was measured here", fix, required=False)
    try:
        from pycoll.runtime.selection.measured_choices import describe, read

        _, table = read(path)
    except (ArgumentError, ImportError) as error:
        return Check("tuning", f"{path} is not used: {error}", fix, required=False)
    return Check("tuning", f"{path}: {'; '.join(describe(*w.place) for w in table.worlds)}")
