"""What trainers do gives the same numbers on pycoll as on gloo."""

import contextlib
import os
import signal
import warnings

import pytest

torch = pytest.importorskip("torch")
from torch.distributed.fsdp import fully_shard  # noqa: E402

import pycoll.torch  # noqa: E402, F401
from pycoll.testing import RankFailed  # noqa: E402
from worlds_torch import run_group  # noqa: E402

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # PyTorch's own, at import
    from torch_clients import trainers
    from torch_clients.cases import CASES
    from torch_clients.models import mlp, train

# Refused by PyTorch 2.13 itself, for want of a GPU.
GATED = ("SyncBatchNorm",)
SLOW = (
    "torch.compile of a DDP step (inductor)",
    "torch.compile of functional collectives",
    "torch.compile of FSDP2 (aot_eager)",
    "torch.compile of tensor parallelism (aot_eager)",
)
ELSEWHERE = tuple(trainers.CASES)  # test_trainers.py, test_torch_examples.py


def close(a, b):
    return len(a) == len(b) and all(
        abs(x - y) <= 1e-6 * max(1.0, abs(y)) for x, y in zip(a, b, strict=True)
    )


def on_gloo(case):
    """Return gloo's numbers. Its workers may deadlock where a callback communicates (PowerSGD)."""
    for tries in range(8):
        with contextlib.suppress(RankFailed):
            return run_group(2, case, backend="gloo", timeout=30 * (tries + 1), limit_s=60)
    raise AssertionError("gloo failed 8 times")


@pytest.mark.parametrize("name", [n for n in CASES if n not in GATED + SLOW + ELSEWHERE])
def test_a_client(name):
    ours = run_group(2, CASES[name], timeout=100, limit_s=60)
    theirs = on_gloo(CASES[name])
    assert all(ours)  # some numbers from every rank
    assert all(map(close, ours, theirs)), (ours, theirs)


def test_a_client_at_four_ranks():
    """The order in which four ranks are combined differs from gloo's, so the bits may."""
    for name in ("DDP", "FSDP2, hybrid sharding", "pipelining, 1F1B"):
        ours = run_group(4, CASES[name], timeout=100, limit_s=60)
        theirs = run_group(4, CASES[name], backend="gloo", timeout=100, limit_s=60)
        assert all(map(close, ours, theirs)), name


def test_the_place_in_the_program():
    """Errors name the user's line however many layers of PyTorch are between."""

    def body(rank, n):
        model = fully_shard(mlp())
        train(model, rank)
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(RuntimeError, match=r"died; its last call .* at models\.py:\d+ train"):
            train(model, rank)

    run_group(2, body, may_die=[1])
