"""The size budget: what is over it is split by idea, or said in fewer lines."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MAX_COLUMNS = 100
MAX_PYTHON_FILE = 400
MAX_PYTHON_FUNCTION = 50
MAX_CXX_FILE = 400
MAX_BINDINGS = 250


def sources(folders, patterns):
    found = [
        p for folder in folders for pattern in patterns for p in (ROOT / folder).rglob(pattern)
    ]
    return sorted(str(path.relative_to(ROOT)) for path in found)


PYTHON_FOLDERS = ["pycoll", "tests", "benchmarks", "examples", "packages"]
PYTHON = ["setup.py", "build_cuda.py", *sources(PYTHON_FOLDERS, ["*.py"])]
CXX_FOLDERS = ["csrc", "tests/native", "tests/cuda", "benchmarks"]
CXX = sources(CXX_FOLDERS, ["*.cpp", "*.h", "*.inl", "*.cu"])


def long_functions(text, limit):
    """Return what a Python text has of functions that are over the limit."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    functions = [node for node in ast.walk(ast.parse(text)) if isinstance(node, kinds)]
    lines = {f.name: f.end_lineno - f.lineno + 1 for f in functions}
    return [f"{name} has {n} lines" for name, n in lines.items() if n > limit]


def over(text, max_lines):
    """Return what a text has of lines, and of columns, that are over the limit."""
    lines = text.splitlines()
    wide = [f"line {i} is too wide" for i, x in enumerate(lines, 1) if len(x) > MAX_COLUMNS]
    return wide + [f"{len(lines)} lines, at most {max_lines}"] * (len(lines) > max_lines)


@pytest.mark.parametrize("path", PYTHON)
def test_python_file(path):
    text = (ROOT / path).read_text(encoding="utf-8")
    assert over(text, MAX_PYTHON_FILE) + long_functions(text, MAX_PYTHON_FUNCTION) == []


@pytest.mark.parametrize("path", CXX)
def test_cxx_file(path):
    text = (ROOT / path).read_text(encoding="utf-8")
    assert over(text, MAX_BINDINGS if path == "csrc/bindings/module.cpp" else MAX_CXX_FILE) == []


def test_the_sources_are_found():
    assert "pycoll/config.py" in PYTHON
    assert "csrc/kernels/fold/fold.cpp" in CXX
    assert "csrc/cuda/host/machine.cu" in CXX


def test_what_is_over_is_reported():
    text = "def short():\n    pass\n\n\ndef long():\n" + "    pass\n" * 4
    assert long_functions(text, 4) == ["long has 5 lines"]
    assert over("x\n" * 3 + "y" * 101, 3) == ["line 4 is too wide", "4 lines, at most 3"]
    assert over("x\n" * 3 + "y" * 100, 4) == []
