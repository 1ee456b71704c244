"""Pipeline parallelism."""

import torch
from torch import nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)

from torch_clients.models import batch

WIDTH = 16


def _layer(index):
    torch.manual_seed(index)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())


def _pipeline(schedule_type, stages_per_rank):
    def case(rank, n):
        count = stages_per_rank * n
        stages = [
            PipelineStage(_layer(index), index, count, torch.device("cpu"))
            for index in range(rank, count, n)
        ]
        modules = [stage.submod for stage in stages]
        parameters = [p for module in modules for p in module.parameters()]
        optimizer = torch.optim.SGD(parameters, lr=0.1)
        schedule = schedule_type(
            stages if stages_per_rank > 1 else stages[0], 2 * n, loss_fn=nn.functional.mse_loss
        )
        sums = []
        for step in range(3):
            x, _ = batch(0, step, rows=4 * n)
            optimizer.zero_grad()
            losses = []
            inputs = (x,) if rank == 0 else ()
            if (count - 1) % n == rank:
                schedule.step(*inputs, target=x.flip(0), losses=losses)
            else:
                schedule.step(*inputs)
            optimizer.step()
            sums += [loss.item() for loss in losses]
        return sums + [p.double().sum().item() for p in parameters]

    return case


CASES = {
    "pipelining, GPipe": _pipeline(ScheduleGPipe, 1),
    "pipelining, 1F1B": _pipeline(Schedule1F1B, 1),
    "pipelining, interleaved 1F1B": _pipeline(ScheduleInterleaved1F1B, 2),
    "pipelining, interleaved zero bubble": _pipeline(ScheduleInterleavedZeroBubble, 2),
}
