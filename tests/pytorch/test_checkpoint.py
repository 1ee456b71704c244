"""Checkpoints into and from what PyTorch saves."""

import copy
import threading
import time

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the adapter is for PyTorch")
pytest.importorskip("safetensors")

from torch.distributed import checkpoint as dcp  # noqa: E402

from pycoll.errors import ArgumentError  # noqa: E402
from pycoll.parallel import AdamW, Mesh, load, save  # noqa: E402
from pycoll.parallel.checkpoint import writer  # noqa: E402
from pycoll.testing import run_threads  # noqa: E402
from pycoll.torch.checkpoint import (  # noqa: E402
    from_dcp,
    from_state_dict,
    to_dcp,
    to_state_dict,
)
from pycoll.torch.data_parallel import DataParallel  # noqa: E402

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(3))  # of no submodule
        self.body = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU())
        self.head = torch.nn.Linear(8, 3)

    def forward(self, x):
        return self.head(self.body(x)) * self.scale


torch.manual_seed(0)
PROTOTYPE = Net()
DATA = torch.randn(8, 4), torch.randn(8, 3)


def squares(output, targets):
    return ((output - targets) ** 2).sum(), len(targets)


def engine(comm, zero=1):
    module = copy.deepcopy(PROTOTYPE)
    return module, DataParallel(
        module, squares, Mesh(comm, dp=-1), zero=zero, optimizer=AdamW(lr=0.1)
    )


def step(comm, trainer):
    rows = slice(comm.rank, None, comm.world_size)
    trainer.step([(DATA[0][rows], DATA[1][rows])])


@pytest.fixture
def trained(tmp_path):
    """Return a folder with a checkpoint, the module's parameters in it, and those of a step on."""

    def rank(comm):
        module, trainer = engine(comm)
        step(comm, trainer)
        save(tmp_path / "run", trainer, background=True)
        now = copy.deepcopy(module.state_dict())
        step(comm, trainer)
        trainer.close()
        return now, copy.deepcopy(module.state_dict())

    now, later = run_threads(2, rank)[0]
    return tmp_path / "run", now, later


def same(a, b):
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_training_goes_on_with_the_same_bits(trained):
    path, _, later = trained

    def rank(comm):
        module, trainer = engine(comm, zero=0)
        load(path, trainer)
        step(comm, trainer)
        same(dict(module.state_dict()), later)
        trainer.close()

    run_threads(2, rank)


def test_a_plain_module(trained, tmp_path):
    path, now, _ = trained
    found = to_state_dict(path)
    same(found, now)
    Net().load_state_dict(found)
    assert to_state_dict(path, "second_moment")["scale"].shape == (3,)
    with pytest.raises(ArgumentError, match="has no momentum; it has parameters, first_moment"):
        to_state_dict(path, "momentum")

    from_state_dict(now, tmp_path / "plain", steps=7)

    def rank(comm):
        module, trainer = engine(comm)
        assert load(tmp_path / "plain", trainer, states=False).steps == 7
        same(dict(module.state_dict()), now)
        with pytest.raises(ArgumentError, match="no first_moment of parameter"):
            load(tmp_path / "plain", trainer)
        trainer.close()

    run_threads(2, rank)


def test_parameters_that_the_program_changes_during_a_save(tmp_path, monkeypatch):
    """They are the module's own, so they are copied before `save` returns."""
    copy_now = writer._copy

    def late(pairs):
        if threading.current_thread().name == "pycoll checkpoint":
            time.sleep(0.2)
        copy_now(pairs)

    monkeypatch.setattr(writer, "_copy", late)

    def rank(comm):
        module, trainer = engine(comm)
        with trainer:
            step(comm, trainer)
            expected = module.head.bias.detach().clone()
            saving = save(tmp_path, trainer, background=True)
            with torch.no_grad():
                module.head.bias.zero_()
            saving.wait()
            return torch.equal(to_state_dict(tmp_path)["head.bias"], expected)

    assert run_threads(2, rank) == [True, True]


@pytest.mark.parametrize("prefix", ["", "model."])
def test_pytorchs_distributed_checkpoints(trained, tmp_path, prefix):
    path, now, _ = trained
    to_dcp(path, tmp_path / "dcp", prefix)
    module = Net()
    state = {prefix + name: tensor for name, tensor in module.state_dict().items()}
    dcp.load(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    same({name.removeprefix(prefix): t for name, t in state.items()}, now)

    nested = {"model": now, "optimizer": {"steps": 3}} if prefix else now
    dcp.save(nested, checkpoint_id=tmp_path / "theirs", no_dist=True)
    from_dcp(tmp_path / "theirs", tmp_path / "ours", prefix)
    same(to_state_dict(tmp_path / "ours"), now)
    with pytest.raises(ArgumentError, match="no tensor whose name begins with 'x'"):
        from_dcp(tmp_path / "theirs", tmp_path / "ours", "x")


def test_16_bits_are_kept(tmp_path):
    values = torch.randn(5).to(torch.bfloat16)
    from_state_dict({"w": values}, tmp_path)
    found = to_state_dict(tmp_path)["w"]
    assert found.dtype == torch.float32
    np.testing.assert_array_equal(found.numpy(), values.float().numpy())
