"""FSDP, DTensor, tensor and sequence parallelism, functional collectives."""

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from torch_clients.models import batch, mlp, train


def _fsdp1(strategy):
    def case(rank, n):
        model = FullyShardedDataParallel(
            mlp(), sharding_strategy=strategy, device_id=torch.device("cpu")
        )
        losses = train(model, rank)
        model.clip_grad_norm_(0.1)
        return losses

    return case


def _sharded(**options):
    model = mlp()
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, **options)
    return fully_shard(model, **options)


def _clip(model):
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)


def fsdp2(rank, n):
    return train(_sharded(), rank, backward=_clip)


def fsdp2_mixed(rank, n):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return train(_sharded(mp_policy=policy), rank)


def hsdp(rank, n):
    mesh = init_device_mesh("cpu", (n // 2, 2), mesh_dim_names=("replicate", "shard"))
    return train(_sharded(mesh=mesh), rank)


def redistribute(rank, n):
    mesh = init_device_mesh("cpu", (n,))
    whole = torch.arange(24.0).view(4, 6) ** 2
    x = distribute_tensor(whole, mesh, [Shard(0)])
    steps = [Replicate(), Shard(1), Shard(0), Shard(1), Replicate()]
    sums = [(x := x.redistribute(mesh, [p])).to_local().sum().item() for p in steps]
    assert torch.equal(x.full_tensor(), whole)
    partial = DTensor.from_local(torch.full((4,), rank + 1.0), mesh, [Partial()])
    sums += partial.redistribute(mesh, [Replicate()]).to_local().tolist()
    sums += partial.redistribute(mesh, [Shard(0)]).to_local().tolist()
    return [*sums, _product(whole, mesh)]


def _product(whole, mesh):
    rows = distribute_tensor(whole, mesh, [Shard(0)])
    columns = distribute_tensor(whole.t().contiguous(), mesh, [Shard(1)])
    return (rows @ columns).full_tensor().sum().item()


def _same_batches(rank):
    """Ranks of one tensor-parallel group see the same data."""
    return 0


def tensor_parallel(rank, n):
    mesh = init_device_mesh("cpu", (n,))
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    return train(parallelize_module(mlp(), mesh, plan), _same_batches(rank))


class _Block(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x):
        return self.down(torch.relu(self.up(self.norm(x))))


def sequence_parallel(rank, n):
    mesh = init_device_mesh("cpu", (n,))
    plan = {
        "": PrepareModuleInput(input_layouts=(Replicate(),), desired_input_layouts=(Shard(1),)),
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(),
    }
    model = parallelize_module(_Block(), mesh, plan)
    return train(model, 0, loss_of=lambda m, x, y: m(x.view(2, 4, 16)).square().mean())


def functional_collectives(rank, n):
    x, group = torch.arange(4.0 * n) + rank, dist.group.WORLD
    results = [
        functional.all_reduce(x, "sum", group),
        functional.all_reduce(x, "avg", group) if dist.get_backend() != "gloo" else x.new_zeros(1),
        functional.all_gather_tensor(x, 0, group),
        functional.reduce_scatter_tensor(x, "sum", 0, group),
        functional.all_to_all_single(x, None, None, group),
        functional.broadcast(x, n - 1, group),
        *functional.all_reduce_coalesced([x, x + 1], "max", group),
        *functional.all_gather_into_tensor_coalesced([x, x + 1], group),
        *functional.reduce_scatter_tensor_coalesced([x, x + 1], "sum", [0, 0], group),
        functional.permute_tensor(x, [(r + 1) % n for r in range(n)], group),
    ]
    sums = [torch.as_tensor(r).sum().item() for r in results]
    return sums[:1] + sums[2:]


def compiled_functional(rank, n):
    @torch.compile(backend="aot_eager", fullgraph=True)
    def step(x):
        total = functional.all_reduce(x * 2, "sum", dist.group.WORLD)
        return functional.all_gather_tensor(total + 1, 0, dist.group.WORLD).sum()

    return [step(batch(rank, 0)[0]).item()]


def compiled_fsdp2(rank, n):
    return train(torch.compile(_sharded(), backend="aot_eager"), rank)


def compiled_tensor_parallel(rank, n):
    mesh = init_device_mesh("cpu", (n,))
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    model = torch.compile(parallelize_module(mlp(), mesh, plan), backend="aot_eager")
    return train(model, _same_batches(rank))


CASES = {
    "FSDP1, FULL_SHARD": _fsdp1(ShardingStrategy.FULL_SHARD),
    "FSDP1, SHARD_GRAD_OP": _fsdp1(ShardingStrategy.SHARD_GRAD_OP),
    "FSDP2 with clip_grad_norm_": fsdp2,
    "FSDP2, mixed precision": fsdp2_mixed,
    "FSDP2, hybrid sharding": hsdp,
    "DTensor redistribute": redistribute,
    "tensor parallelism": tensor_parallel,
    "sequence parallelism": sequence_parallel,
    "functional collectives": functional_collectives,
    "torch.compile of functional collectives": compiled_functional,
    "torch.compile of FSDP2 (aot_eager)": compiled_fsdp2,
    "torch.compile of tensor parallelism (aot_eager)": compiled_tensor_parallel,
}
