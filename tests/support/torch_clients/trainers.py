"""DeepSpeed, Lightning and Accelerate, where they are installed."""

import contextlib
import importlib
import io
import logging
import os
import signal
import tempfile
import warnings
from importlib.util import find_spec

import torch
import torch.distributed as dist
from torch import nn

from torch_clients.models import batch, mlp, train


def _like_torchrun(rank, n):
    """Set what a launcher tells its ranks; trainers ask for it though there is a group."""
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": n, "LOCAL_WORLD_SIZE": n}
    place |= {"GROUP_RANK": 0, "NODE_RANK": 0, "TORCHELASTIC_RUN_ID": "test"}
    place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1}  # nobody listens, nobody asks
    os.environ.update({key: str(value) for key, value in place.items()})


def load_deepspeed():
    """Import DeepSpeed for CPU tensors, and the compiler that it imports later."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # no pool of processes, before PyTorch 2.9
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of others, at import
        import deepspeed

        importlib.import_module("torch._inductor.compile_fx")

    deepspeed.utils.logger.setLevel(logging.ERROR)
    # An operator for inference, which takes more than a minute to compile.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


def _deepspeed(case):
    """Make a case of a function that is also given the module."""

    def run(rank, n):
        _like_torchrun(rank, n)
        deepspeed = load_deepspeed()
        deepspeed.init_distributed()  # takes the group that is there
        with contextlib.redirect_stdout(io.StringIO()):
            return case(deepspeed, rank, n)

    return run


def _engine(deepspeed, model, **config):
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    config = {"train_micro_batch_size_per_gpu": 8, "gradient_clipping": 0.5, **config}
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def _train(engine, rank, start=0, dtype=torch.float32):
    losses = []
    for step in range(start, start + 4):
        x, y = batch(rank, step)
        loss = nn.functional.mse_loss(engine(x.to(dtype)).float(), y)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def _zero(stage, **options):
    @_deepspeed
    def case(deepspeed, rank, n):
        engine = _engine(deepspeed, mlp(), zero_optimization={"stage": stage, **options})
        return _train(engine, rank)

    return case


@_deepspeed
def die_in_zero(deepspeed, rank, n):
    """Kill rank 1 after some steps; the others return what they hear."""
    engine = _engine(deepspeed, mlp(), zero_optimization={"stage": 2})
    _train(engine, rank)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        _train(engine, rank, start=4)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


@_deepspeed
def zero_bfloat16(deepspeed, rank, n):
    config = {"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}}
    with deepspeed.zero.Init(config_dict_or_path={"train_batch_size": 8 * n, **config}):
        model = mlp()  # only this rank's part of every parameter is kept
    return _train(_engine(deepspeed, model, **config), rank, dtype=torch.bfloat16)


@_deepspeed
def zero_checkpoint(deepspeed, rank, n):
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0}
    engine = _engine(deepspeed, mlp(), zero_optimization=zero)
    before = _train(engine, rank)
    box = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(box)
    engine.save_checkpoint(box[0])
    after = _train(engine, rank, start=4)
    other = _engine(deepspeed, mlp(seed=5), zero_optimization=zero)
    other.load_checkpoint(box[0])
    assert _train(other, rank, start=4) == after
    return before + after


@_deepspeed
def pipeline(deepspeed, rank, n):
    torch.manual_seed(0)
    layers = [nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16), nn.Linear(16, 4)]
    model = deepspeed.pipe.PipelineModule(layers, num_stages=n, loss_fn=nn.functional.mse_loss)
    engine = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        config={"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 4},
    )[0]
    losses = []
    for step in range(3):
        x, y = batch(0, step, rows=16)
        losses.append(engine.train_batch(iter(zip(x.split(4), y.split(4), strict=True))).item())
    return losses


class _Experts(nn.Module):
    def __init__(self, deepspeed, n):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(16, 16), nn.Linear(16, 4)
        self.experts = deepspeed.moe.layer.MoE(16, nn.Linear(16, 16), num_experts=4, ep_size=n)

    def forward(self, x):
        return self.down(self.experts(self.up(x))[0])


@_deepspeed
def experts(deepspeed, rank, n):
    from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer as split

    model = _Experts(deepspeed, n)
    groups = split({"params": list(model.parameters()), "name": "all"})
    engine = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.Adam(groups, lr=0.01),
        config={"train_micro_batch_size_per_gpu": 8, "zero_optimization": {"stage": 1}},
    )[0]
    return _train(engine, rank)


@_deepspeed
def sequence_attention(deepspeed, rank, n):
    from deepspeed.sequence.layer import DistributedAttention

    def attention(q, k, v):
        q, k, v = (t.permute(1, 2, 0, 3) for t in (q, k, v))
        return nn.functional.scaled_dot_product_attention(q, k, v).permute(2, 0, 1, 3)

    torch.manual_seed(0)
    x = torch.randn(4 * n, 2, 2 * n, 8)[4 * rank : 4 * (rank + 1)].clone().requires_grad_()
    layer = DistributedAttention(attention, dist.group.WORLD, scatter_idx=2, gather_idx=0)
    y = layer(x, 2 * x, x + 1, 0)
    y.square().sum().backward()
    return [y.sum().item(), x.grad.sum().item()]


def accelerate_ddp(rank, n):
    _like_torchrun(rank, n)
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = mlp()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    losses = train(model, rank, optimizer)
    return losses + accelerator.gather(torch.tensor(losses)).tolist()


def lightning_ddp(rank, n):
    _like_torchrun(rank, n)
    import lightning
    from lightning.pytorch.strategies import DDPStrategy

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model, self.losses = mlp(), []

        def training_step(self, rows, index):
            x, y = (t[0] for t in rows)
            loss = nn.functional.mse_loss(self.model(x), y)
            self.log("loss", loss, sync_dist=True)
            self.losses += self.all_gather(loss.detach()).tolist()
            return loss

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    quiet = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=n,
        strategy=DDPStrategy(process_group_backend=dist.get_backend()),
        max_epochs=2,
        **dict.fromkeys(quiet, False),
    )
    module = Module()
    trainer.fit(module, torch.utils.data.DataLoader([batch(0, step) for step in range(4)]))
    return module.losses


DEEPSPEED = {
    "DeepSpeed, ZeRO-1": _zero(1),
    "DeepSpeed, ZeRO-2": _zero(2, overlap_comm=True, reduce_bucket_size=500),
    "DeepSpeed, ZeRO-3": _zero(3, stage3_param_persistence_threshold=0),
    "DeepSpeed, ZeRO-3, bfloat16, zero.Init": zero_bfloat16,
    "DeepSpeed, ZeRO-3, save and load": zero_checkpoint,
    "DeepSpeed, mixture of experts": experts,
    "DeepSpeed, Ulysses attention": sequence_attention,
    "DeepSpeed, pipeline": pipeline,  # the last: it sets up axes for the whole process
}
CASES = {
    "Lightning, DDPStrategy": lightning_ddp,
    "Accelerate, DDP": accelerate_ddp,
    **DEEPSPEED,
}
_PACKAGES = {"Lightning, DDPStrategy": "lightning", "Accelerate, DDP": "accelerate"}


def missing(name):
    """Say why a case cannot run here; empty if it can."""
    package = _PACKAGES.get(name, "deepspeed")
    if name in CASES and find_spec(package) is None:
        return f"{package} is not installed"
    return ""
