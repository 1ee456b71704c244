"""DistributedDataParallel and what belongs to it."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from torch_clients.models import Detour, batch, mlp, train


def ddp(rank, n):
    return train(DistributedDataParallel(mlp(), bucket_cap_mb=0.003), rank)


def find_unused_parameters(rank, n):
    model = DistributedDataParallel(Detour(), find_unused_parameters=True)
    return train(model, rank, loss_of=lambda m, x, y: nn.functional.mse_loss(m(x, rank), y))


def static_graph(rank, n):
    return train(DistributedDataParallel(Detour(), static_graph=True), rank)


def gradient_as_bucket_view(rank, n):
    return train(DistributedDataParallel(mlp(), gradient_as_bucket_view=True), rank)


def no_sync(rank, n):
    model = DistributedDataParallel(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(3):
        with model.no_sync():
            x, y = batch(rank, 2 * step)
            nn.functional.mse_loss(model(x), y).backward()
        x, y = batch(rank, 2 * step + 1)
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def join(rank, n):
    model = DistributedDataParallel(mlp())
    with model.join():
        train(model, rank, steps=2 + 2 * rank)
    return [p.sum().item() for p in model.parameters()]


def join_by_ranks_that_train(rank, n):
    model = DistributedDataParallel(mlp())
    with model.join(divide_by_initial_world_size=False):
        train(model, rank, steps=2 + 2 * rank)
    return [p.sum().item() for p in model.parameters()]


def join_with_zero(rank, n):
    model = DistributedDataParallel(mlp())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    with Join([model, optimizer]):
        train(model, rank, optimizer, steps=2 + rank)
    return [p.sum().item() for p in model.parameters()]


def _hooked(hook, state=None):
    def case(rank, n):
        # One bucket: hooks that communicate in callbacks do so in no order between buckets.
        model = DistributedDataParallel(mlp(), bucket_cap_mb=25)
        model.register_comm_hook(state() if state else None, hook)
        return train(model, rank)

    return case


def _built_in(kind):
    def case(rank, n):
        model = DistributedDataParallel(mlp(), bucket_cap_mb=25)
        model._register_builtin_comm_hook(kind)
        return train(model, rank)

    return case


def _power_sgd():
    return powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)


def sparse_gradients(rank, n):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(20, 16, sparse=True), nn.Linear(16, 4))
    model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    words = torch.arange(8) * (rank + 1) % 20  # some are those of another rank, too

    def loss_of(model, _, y):
        return nn.functional.mse_loss(model(words), y)

    return train(model, rank, optimizer, loss_of=loss_of)


def batch_norm_buffers(rank, n):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
    return train(DistributedDataParallel(model), rank)


def sync_batch_norm(rank, n):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
    model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    return train(DistributedDataParallel(model), rank)


def zero_redundancy(rank, n):
    model = DistributedDataParallel(mlp())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01)
    losses = train(model, rank, optimizer)
    optimizer.consolidate_state_dict(to=0)
    return losses


def _compiled(backend):
    def case(rank, n):
        model = torch.compile(DistributedDataParallel(mlp()), backend=backend)
        return train(model, rank)

    return case


def mixed_precision(rank, n):
    return train(DistributedDataParallel(mlp(dtype=torch.bfloat16)), rank, loss_of=_bfloat16_loss)


def _bfloat16_loss(model, x, y):
    return nn.functional.mse_loss(model(x.bfloat16()).float(), y)


def average_with_objects(rank, n):
    losses = train(mlp(), rank, steps=2)
    everybody = [None] * n
    dist.all_gather_object(everybody, losses)
    return [sum(column) / n for column in zip(*everybody, strict=True)]


CASES = {
    "DDP": ddp,
    "DDP, find_unused_parameters": find_unused_parameters,
    "DDP, static_graph": static_graph,
    "DDP, gradient_as_bucket_view": gradient_as_bucket_view,
    "DDP, no_sync": no_sync,
    "DDP, join with uneven inputs": join,
    "DDP, join, divided by the ranks that train": join_by_ranks_that_train,
    "DDP, bfloat16 parameters": mixed_precision,
    "DDP, buffers of BatchNorm": batch_norm_buffers,
    "DDP, comm hook allreduce": _hooked(default_hooks.allreduce_hook),
    "DDP, comm hook fp16_compress": _hooked(default_hooks.fp16_compress_hook),
    "DDP, comm hook PowerSGD": _hooked(powerSGD_hook.powerSGD_hook, _power_sgd),
    "DDP, built-in comm hook ALLREDUCE": _built_in(dist.BuiltinCommHookType.ALLREDUCE),
    "DDP, built-in comm hook FP16_COMPRESS": _built_in(dist.BuiltinCommHookType.FP16_COMPRESS),
    "DDP, sparse gradients": sparse_gradients,
    "SyncBatchNorm": sync_batch_norm,
    "ZeroRedundancyOptimizer": zero_redundancy,
    "ZeroRedundancyOptimizer, join": join_with_zero,
    "torch.compile of a DDP step (aot_eager)": _compiled("aot_eager"),
    "torch.compile of a DDP step (inductor)": _compiled("inductor"),
    "object collectives": average_with_objects,
}
