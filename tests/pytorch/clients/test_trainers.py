"""DeepSpeed gives the same numbers on pycoll as on gloo; Lightning and Accelerate: the examples."""

import importlib.util

import pytest

torch = pytest.importorskip("torch")
if importlib.util.find_spec("deepspeed") is None:
    pytest.skip("DeepSpeed is not installed", allow_module_level=True)

from torch_clients.trainers import DEEPSPEED, die_in_zero, load_deepspeed  # noqa: E402
from worlds_torch import run_group  # noqa: E402


def all_cases(rank, n):
    """One after the other in the same process, which imports DeepSpeed and compilers but once."""
    return {name: case(rank, n) for name, case in DEEPSPEED.items()}


def test_deepspeed():
    load_deepspeed()  # here, and so once rather than in every rank
    ours = run_group(2, all_cases, timeout=100, limit_s=60)
    theirs = run_group(2, all_cases, backend="gloo", timeout=100, limit_s=60)
    for rank in range(2):
        for name, numbers in theirs[rank].items():
            assert numbers, name
            assert ours[rank][name] == numbers, name  # two ranks: a + b is the same in either order


def test_a_killed_rank_of_deepspeed():
    """The other ones hear of it at once, with the line of the program."""
    load_deepspeed()
    text, _ = run_group(2, die_in_zero, may_die=[1])
    assert "DistBackendError: " in text
    assert "rank 1 (process" in text
    assert "died; its last call was" in text
    assert " at trainers.py:" in text
