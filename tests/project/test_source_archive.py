"""The source archive that people install from has everything that the build needs."""

import shutil
import subprocess
import sys
import tarfile
from importlib import metadata
from pathlib import Path

import pytest

import pycoll

ROOT = Path(__file__).resolve().parents[2]
BUILT = shutil.ignore_patterns(".*", "build", "*.egg-info", "__pycache__", "*.so", "dist")


def run(*words, cwd):
    """Run Python; return the last line that it prints."""
    done = subprocess.run(
        [sys.executable, *words], cwd=cwd, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().splitlines()[-1]


def test_what_the_build_needs_is_in_the_archive(tmp_path):
    for module in ("setuptools", "pybind11"):
        pytest.importorskip(module)
    tree = shutil.copytree(ROOT, tmp_path / "tree", ignore=BUILT)
    make = "from setuptools import build_meta; print(build_meta.build_sdist('..'))"
    with tarfile.open(tmp_path / run("-c", make, cwd=tree)) as archive:
        archive.extractall(tmp_path, filter="data")
    (unpacked,) = tmp_path.glob("pycollectives-*/")
    told = metadata.PathDistribution(unpacked).metadata  # of PKG-INFO
    assert (told["Name"], told["Version"]) == ("pycollectives", pycoll.__version__)
    for folder in ("csrc", "pycoll", "tests", "docs", "examples", "benchmarks", "packages"):
        wanted = {p.relative_to(tree) for p in (tree / folder).rglob("*") if p.is_file()}
        found = {p.relative_to(unpacked) for p in (unpacked / folder).rglob("*") if p.is_file()}
        assert wanted == found
    # What setup.py imports is there too, and finds the sources.
    listed = "import sys; sys.argv = ['', '--version']; import setup; print(len(setup.SOURCES))"
    sources = int(run("-c", listed, cwd=unpacked))
    assert sources == len([p for p in (ROOT / "csrc").rglob("*.cpp") if "cuda" not in p.parts])


def test_every_folder_of_bindings_is_compiled_as_one_unit():
    listed = "import sys; sys.argv = ['', '--version']; import setup; "
    listed += "print(*setup.BINDINGS.values())"
    folders = {str(p.parent.relative_to(ROOT)) for p in (ROOT / "csrc/bindings").rglob("*.cpp")}
    assert sorted(run("-c", listed, cwd=ROOT).split()) == sorted(folders)
