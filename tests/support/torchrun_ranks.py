"""Forked ranks in the environment that torchrun makes, for tests of trainers."""

import importlib.util
import os
import socket
import warnings

import pytest
import torch
import torch.distributed as dist

from pycoll.testing import run_processes
from torch_clients.trainers import load_deepspeed


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


def on_torchrun(n, fn, *args):
    """Return what ``fn(*args)`` returns on each of n ranks."""
    port = free_port()

    def rank(comm):
        place = {"RANK": comm.rank, "LOCAL_RANK": comm.rank, "WORLD_SIZE": n, "LOCAL_WORLD_SIZE": n}
        place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        place |= {"TORCHELASTIC_RUN_ID": "test", "GROUP_RANK": 0, "NODE_RANK": 0}
        os.environ.update({key: str(value) for key, value in place.items()})
        warnings.simplefilter("ignore")  # PyTorch's own
        torch.set_num_threads(1)
        try:
            return fn(*args)
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()

    return run_processes(n, rank, timeout=100)
