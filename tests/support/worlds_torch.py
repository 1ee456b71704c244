"""Process groups of forked ranks, for the tests of the PyTorch backend."""

import contextlib
import tempfile
import warnings
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

import pycoll.torch  # noqa: F401 - registers the backend
from pycoll.runtime.startup.hosts import Card
from pycoll.testing import run_processes

HOSTS: tuple[int, ...] = ()  # number of the host that each rank takes itself to be on; empty: real


def take_host(number):
    """Make this process believe that it is on another host than processes with other numbers."""
    real = Card.own()
    Card.own = classmethod(lambda cls: replace(real, host=f"{real.host} {number}"))


def run_group(n, fn, *args, backend="pycoll", timeout=30.0, limit_s=15.0, may_die=()):
    """Fork n ranks, each of which calls ``fn(rank, n, *args)`` in a process group of all.

    Args:
        n: Number of ranks.
        fn: Any callable with a picklable result.
        args: More arguments.
        backend: Name of the backend.
        timeout: Seconds until all ranks are killed.
        limit_s: Timeout of the process group.
        may_die: See `pycoll.testing.run_processes`.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "store")

        def rank(comm):
            warnings.simplefilter("default")  # PyTorch's own
            torch.set_num_threads(1)
            if HOSTS:
                take_host(HOSTS[comm.rank])
            dist.init_process_group(
                backend,
                store=dist.FileStore(path, n),
                rank=comm.rank,
                world_size=n,
                timeout=timedelta(seconds=limit_s),
            )
            result = fn(comm.rank, n, *args)
            with contextlib.suppress(ValueError, AssertionError):  # `fn` has done so
                dist.destroy_process_group()
            return result

        return run_processes(n, rank, timeout=timeout, may_die=may_die)
