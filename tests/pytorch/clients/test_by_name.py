"""Trainers take the backend by its name, and their numbers are those of gloo."""

import os
import subprocess
import sys
import types
from datetime import timedelta
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402

import pycoll.torch  # noqa: E402
from pycoll.torch.backend.by_name import offer_to_accelerate, offer_to_ignite  # noqa: E402
from torchrun_ranks import load, on_torchrun  # noqa: E402

TREE = Path(__file__).resolve().parents[3]


def accelerate_by_name(backend):
    from accelerate import Accelerator, InitProcessGroupKwargs

    accelerator = Accelerator(cpu=True, kwargs_handlers=[InitProcessGroupKwargs(backend=backend)])
    assert dist.get_backend() == accelerator.state.backend == backend
    model = torch.nn.Linear(4, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    losses = []
    for step in range(3):
        x = torch.full((2, 4), float(step + dist.get_rank()))
        loss = model(x).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses += accelerator.gather(loss.detach()).tolist()
    return losses


def test_accelerate():
    load("accelerate")
    ours, theirs = (on_torchrun(2, accelerate_by_name, name) for name in ("pycoll", "gloo"))
    assert ours == theirs
    assert ours[0] == ours[1]


def ignite_by_name(backend):
    import ignite.distributed as idist

    with idist.Parallel(backend=backend) as parallel:
        assert idist.backend() == dist.get_backend() == backend
        model = idist.auto_model(torch.nn.Linear(4, 1), find_unused_parameters=False)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(0.5)
        optimizer = idist.auto_optim(torch.optim.SGD(model.parameters(), 0.1))
        losses = []

        def train(local_rank):
            for step in range(3):
                x = torch.full((2, 4), float(step + local_rank))
                loss = model(x).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(idist.all_reduce(loss.detach()).item())

        parallel.run(train)
    return losses


def test_ignite():
    load("ignite")
    ours, theirs = (on_torchrun(2, ignite_by_name, name) for name in ("pycoll", "gloo"))
    assert ours == theirs
    assert ours[0] == ours[1]


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 32

    def __getitem__(self, i):
        return {"x": torch.full((4,), i / 32.0), "labels": torch.tensor(i / 16.0)}


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.part = torch.nn.Linear(4, 1)

    def forward(self, x, labels):
        y = self.part(x).squeeze(-1)
        return {"loss": (y - labels).square().mean(), "y": y}


def transformers_by_name(backend, folder):
    from transformers import Trainer, TrainingArguments

    how = {"use_cpu": True, "ddp_backend": backend, "report_to": [], "disable_tqdm": True}
    how |= {"per_device_train_batch_size": 4, "num_train_epochs": 2, "logging_steps": 1}
    args = TrainingArguments(output_dir=folder, save_strategy="no", seed=1, **how)
    torch.manual_seed(3)
    trainer = Trainer(Model(), args, train_dataset=Rows(), eval_dataset=Rows())
    trainer.train()
    assert dist.get_backend() == backend
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return [*losses, trainer.evaluate()["eval_loss"]]


def test_transformers(tmp_path):
    load("transformers")
    from transformers import Trainer, TrainingArguments  # noqa: F401 - once, not in every rank

    theirs = on_torchrun(2, transformers_by_name, "gloo", str(tmp_path))
    ours = on_torchrun(2, transformers_by_name, "pycoll", str(tmp_path))
    assert ours == theirs
    assert len(ours[0]) > 3


def lightning_by_default():
    import lightning

    class Part(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.part, self.losses = torch.nn.Linear(4, 1), []

        def training_step(self, batch, _):
            loss = (self.part(batch["x"]).squeeze(-1) - batch["labels"]).square().mean()
            self.losses.append(float(loss))
            return loss

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1)

    pycoll.torch.make_default("cpu")
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    quiet |= {"enable_model_summary": False, "max_epochs": 1}
    trainer = lightning.Trainer(accelerator="cpu", devices=2, strategy="ddp", **quiet)
    model = Part()
    trainer.fit(model, torch.utils.data.DataLoader(Rows(), batch_size=4))
    assert dist.get_backend() == "pycoll"
    return len(model.losses)


def test_lightning_by_default():
    load("lightning")
    assert on_torchrun(2, lightning_by_default) == [4, 4]


def torchft_by_name(backend):
    from torchft.process_group import ProcessGroupGloo, reconfigure_with_store

    from pycoll.torch.torchft import ProcessGroupPycoll

    rank, size, port = (int(os.environ[key]) for key in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
    store = dist.TCPStore("127.0.0.1", port, is_master=rank == 0, wait_for_workers=False)
    ours = backend == "pycoll"
    group = (ProcessGroupPycoll if ours else ProcessGroupGloo)(timeout=timedelta(seconds=20))
    seen = []
    for quorum in range(3):  # as a Manager does when members have changed
        reconfigure_with_store(group, f"127.0.0.1:{port}/{quorum}", rank, size)
        x = torch.arange(5.0) + rank + quorum
        group.allreduce([x], dist.AllreduceOptions()).wait()
        seen += x.tolist()
        assert group.size() == size
    assert group.errored() is None
    assert group.getBackendName() == f"torchft-{backend}"
    group.shutdown()
    store.set(f"done{rank}", "")
    store.wait([f"done{r}" for r in range(size)])
    return seen


def test_torchft():
    load("torchft")
    assert on_torchrun(2, torchft_by_name, "pycoll") == on_torchrun(2, torchft_by_name, "gloo")


def import_torch(tmp_path, code):
    """Run code with the entry point of an installed pycoll."""
    folder = tmp_path / "named-1.dist-info"
    folder.mkdir(exist_ok=True)
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: named\nVersion: 1\n")
    (folder / "entry_points.txt").write_text(
        "[torch.backends]\npycoll = pycoll.torch_autoload:register\n"
    )
    places = {"PYTHONPATH": f"{tmp_path}:{TREE}", "TORCH_DEVICE_BACKEND_AUTOLOAD": "1"}
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **places},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_import_torch_makes_the_name_known(tmp_path):
    code = (
        "import sys, torch.distributed as dist\n"
        "dist.init_process_group('pycoll', store=dist.HashStore(), rank=0, world_size=1)\n"
        "dist.all_reduce(sys.modules['torch'].ones(1))\n"
        "dist.monitored_barrier()\n"
        "print(type(dist.group.WORLD).__name__)\n"
        "dist.destroy_process_group()\n"
    )
    for first in ("", "import pycoll.torch\n"):
        done = import_torch(tmp_path, first + code)
        assert done.stdout == "ProcessGroupPycoll\n", done.stderr


def test_import_torch_survives_a_pycoll_that_is_broken(tmp_path):
    code = "import sys\nsys.modules['pycoll.torch'] = None\nimport torch\nprint(torch.ones(1))\n"
    done = import_torch(tmp_path, code)
    assert done.stdout == "tensor([1.])\n", done.stderr
    assert "torch.distributed does not get the backend pycoll: " in done.stderr


def test_other_versions_of_accelerate(monkeypatch):
    """One with more arguments gets the name; one without the method stays as it is."""

    class PartialState:
        def _prepare_backend(self, cpu=False, sagemaker_dp=False, backend=None, more=0):
            return "gloo", more

    state = types.ModuleType("accelerate.state")
    monkeypatch.setitem(sys.modules, "accelerate.state", state)
    offer_to_accelerate("pycoll")
    assert not hasattr(state, "PartialState")
    state.PartialState = PartialState
    offer_to_accelerate("pycoll")
    prepare = PartialState()._prepare_backend
    assert prepare(True, False, "pycoll", more=3) == ("pycoll", 3)
    assert prepare(cpu=True, backend="mpi") == ("gloo", 0)
    assert prepare() == ("gloo", 0)


def test_other_versions_of_ignite(monkeypatch):
    """One with a list of names gets the name, once; one without it stays as it is."""
    native = types.ModuleType("ignite.distributed.comp_models.native")
    monkeypatch.setitem(sys.modules, native.__name__, native)
    offer_to_ignite("pycoll")
    native._NativeDistModel = types.SimpleNamespace(available_backends=("gloo",))
    for _ in range(2):
        offer_to_ignite("pycoll")
        assert native._NativeDistModel.available_backends == ("gloo", "pycoll")
    native._NativeDistModel.available_backends = None
    offer_to_ignite("pycoll")
    assert native._NativeDistModel.available_backends is None
