"""Distributed checkpoints, and the barriers for debugging."""

import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import fully_shard

from torch_clients.models import mlp, train


def _folder():
    box = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(box)
    return box[0]


def _save_and_load(save):
    def case(rank, n):
        folder = _folder()
        model = fully_shard(mlp())
        losses = train(model, rank)
        save(get_model_state_dict(model), folder)
        other = fully_shard(mlp(seed=5))
        state = get_model_state_dict(other)
        dcp.load(state, checkpoint_id=folder)
        set_model_state_dict(other, state)
        for a, b in zip(model.parameters(), other.parameters(), strict=True):
            assert torch.equal(a.full_tensor(), b.full_tensor())
        return losses + train(other, rank)

    return case


def _save(state, folder):
    dcp.save(state, checkpoint_id=folder)


def _async_save(state, folder):
    dcp.async_save(state, checkpoint_id=folder).result()


def monitored_barrier(rank, n):
    dist.monitored_barrier(timeout=timedelta(seconds=10))
    return [1.0]


CASES = {
    "DCP save and load": _save_and_load(_save),
    "DCP async_save": _save_and_load(_async_save),
    "monitored_barrier": monitored_barrier,
}
