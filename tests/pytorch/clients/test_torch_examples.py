"""The PyTorch examples give the losses that they give with gloo."""

import contextlib
import io
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from torchrun_ranks import load, on_torchrun  # noqa: E402

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
NEEDS = {
    "torch_accelerate": "accelerate",
    "torch_deepspeed": "deepspeed",
    "torch_lightning": "lightning",
}
INFERENCE = "torch_tp_inference"
NAMES = sorted({path.stem for path in EXAMPLES.glob("torch_*.py")} - {INFERENCE})


def run_example(name, *words, n=2):
    """Run an example on ranks as torchrun does; return what it prints."""

    def body():
        sys.argv = [f"{name}.py", *words]
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
        return printed.getvalue()

    return "".join(on_torchrun(n, body))


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
