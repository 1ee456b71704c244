"""Importing pycoll: quick, silent, and without anything but NumPy."""

import subprocess
import sys

import pytest

LOADED = "import sys, pycoll; print(*sorted({m.split('.')[0] for m in sys.modules}))"


def python(code, *options):
    """Run a fresh interpreter; return what it prints."""
    result = subprocess.run(
        [sys.executable, *options, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout, result.stderr


def test_it_says_nothing():
    assert python("import pycoll", "-W", "error") == ("", "")


def test_it_loads_only_numpy():
    before = set(python("import sys, numpy; print(*sys.modules)")[0].split())
    loaded = set(python(LOADED)[0].split())
    foreign = loaded - set(sys.stdlib_module_names) - {m.split(".")[0] for m in before}
    assert {name for name in foreign if not name.startswith("_")} <= {"pycoll", "sitecustomize"}


def test_completion_shows_the_interface():
    shown = set(python("import pycoll; print(*dir(pycoll))")[0].split())
    public = set(python("import pycoll; print(*pycoll.__all__)")[0].split())
    assert public <= shown
    assert not shown & {"TYPE_CHECKING", "annotations", "importlib"}


def test_it_starts_no_thread_and_opens_nothing():
    code = (
        "import os, pycoll; print(len(os.listdir('/proc/self/task')), "
        "[os.readlink(f'/proc/self/fd/{fd}') for fd in (3, 4, 5) "
        "if os.path.exists(f'/proc/self/fd/{fd}')])"
    )
    plain = python(code.replace("pycoll", "numpy"))[0]
    assert python(code)[0] == plain


def test_it_takes_no_long_time():
    code = (
        "import time, numpy; t = time.perf_counter(); import pycoll; print(time.perf_counter() - t)"
    )
    assert min(float(python(code)[0]) for _ in range(3)) < 2.0


def test_everything_it_promises_is_there():
    import pycoll

    assert [name for name in pycoll.__all__ if not hasattr(pycoll, name)] == []
    assert pycoll.__version__.count(".") == 2


@pytest.mark.parametrize("hash_seed", ["0", "1", "77"])
def test_the_numbers_of_algorithms_do_not_depend_on_the_hash_seed(hash_seed, monkeypatch):
    from pycoll.algorithms import ALGORITHMS
    from pycoll.runtime.calls.descriptors import algorithm_number

    monkeypatch.setenv("PYTHONHASHSEED", hash_seed)
    code = (
        "from pycoll.algorithms import ALGORITHMS as A\n"
        "from pycoll.runtime.calls.descriptors import algorithm_number as number\n"
        "print([number(a, {'k': 4, 'root': 1}) for a in A])"
    )
    here = [algorithm_number(a, {"k": 4, "root": 1}) for a in ALGORITHMS]
    assert python(code)[0].strip() == str(here)
