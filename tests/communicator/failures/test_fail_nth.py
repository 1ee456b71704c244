"""Some of the calls of the system that a short job makes fail, one in each job; see fail_nth.py."""

import os
import shutil
import subprocess
import sys

import pytest

from communicator.failures import fail_nth


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    if shutil.which(os.environ.get("CXX", "g++")) is None:
        pytest.skip("there is no compiler for the library that makes calls fail")
    return fail_nth.build(tmp_path_factory.mktemp("preload"))


@pytest.mark.parametrize(
    ("kinds", "every"),
    [
        ("map memfd resize reserve socket thread", 11),
        ("memory", 150),
        ("futex", 50),
    ],
)
@pytest.mark.parametrize("transport", fail_nth.STEPS)
def test_each_rank_is_right_or_has_an_error(library, transport, kinds, every):
    words = ["--library", library, "--transport", transport, "--every", every, "--kinds"]
    command = [sys.executable, fail_nth.__file__, *map(str, words), *kinds.split()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert "0 wrong" in done.stdout
