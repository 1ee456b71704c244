"""The PyTorch examples give the losses that they give with gloo."""

import contextlib
import importlib.util
import io
import os
import re
import runpy
import socket
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from pycoll.testing import run_processes  # noqa: E402
from torch_clients.trainers import load_deepspeed  # noqa: E402

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
NEEDS = {
    "torch_accelerate": "accelerate",
    "torch_deepspeed": "deepspeed",
    "torch_lightning": "lightning",
}
INFERENCE = "torch_tp_inference"
NAMES = sorted({path.stem for path in EXAMPLES.glob("torch_*.py")} - {INFERENCE})


def load(package):
    """Import a package here, and so once rather than in every rank; skip without it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of others, at import
        if package == "deepspeed" and importlib.util.find_spec(package):
            load_deepspeed()
        pytest.importorskip(package)


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def run_example(name, *words, n=2):
    """Run an example on forked ranks as torchrun does; return what it prints."""
    port = free_port()

    def rank(comm):
        place = {"RANK": comm.rank, "LOCAL_RANK": comm.rank, "WORLD_SIZE": comm.world_size}
        place |= {"LOCAL_WORLD_SIZE": n, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        place |= {"TORCHELASTIC_RUN_ID": "test", "GROUP_RANK": 0, "NODE_RANK": 0}
        os.environ.update({key: str(value) for key, value in place.items()})
        warnings.simplefilter("ignore")  # PyTorch's own
        sys.argv = [f"{name}.py", *words]
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
        return printed.getvalue()

    return "".join(run_processes(n, rank, timeout=100))


def losses(name, backend):
    """Return the losses that an example of training prints."""
    text = run_example(name, backend)
    assert f"{backend}: loss" in text
    return [float(word) for word in text.splitlines()[-1].split()]


@pytest.mark.parametrize("name", NAMES)
def test_an_example(name):
    if name in NEEDS:
        load(NEEDS[name])
    ours, theirs = losses(name, "pycoll"), losses(name, "gloo")
    assert ours == theirs  # two ranks: a + b is the same in either order
    assert ours[-1] < 0.8 * ours[0]


@pytest.mark.parametrize("n", [2, 4])
def test_the_example_of_inference(n):
    text = run_example(INFERENCE, "pycoll", "5", n=n)
    assert re.match(rf"pycoll, {n} ranks: 0 of [1-9]\d+ logits depend on the batch", text), text


def test_torchrun():
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*command, str(EXAMPLES / "torch_ddp.py")],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("pycoll: loss")
