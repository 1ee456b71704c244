"""The libraries that are compared, each behind the same few methods.

A contestant has ``rank`` and ``world_size``; ``make(count)`` returns an array of its own kind,
``host(array)`` the same memory as NumPy sees it; ``bind(collective, x, out)`` returns a function
without arguments that makes the call, as a careful user of that library would write it; and
``meet``, ``agree`` and ``gather`` let the ranks work together without anything but the library.
What a contestant with ``collects = False`` calls is no collective, and has no result to check.
"""

import ctypes
import os
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np

HUGE_PAGE = 2 << 20


class OnNumpy:
    """A contestant that takes NumPy arrays."""

    collects = True

    def make(self, count):
        return aligned(count, self._dtype)

    def host(self, array):
        return array


class Pycoll(OnNumpy):
    """pycoll, with NumPy arrays or with arrays in symmetric memory, or over MPI by messages."""

    def __init__(self, dtype, symmetric=False, transport=None):
        import pycoll

        self.comm = pycoll.init(timeout=60, transport=transport, tuning="off")
        self.rank, self.world_size = self.comm.rank, self.comm.world_size
        self._symmetric = symmetric
        self._dtype = numpy_dtype(dtype)

    def make(self, count):
        return self.comm.empty(count, self._dtype) if self._symmetric else super().make(count)

    def bind(self, collective, x, out):
        call = getattr(self.comm, collective)
        if collective == "reduce" and self.rank != 0:
            return lambda: call(x)
        return lambda: call(x, out=out)

    def meet(self):
        self.comm.barrier()

    def agree(self, number):
        return int(self.comm.broadcast(np.array([number]))[0])

    def gather(self, numbers):
        rows = self.comm.all_gather(np.asarray(numbers, float)[None])
        return rows.reshape(self.world_size, -1)


class OnePass(Pycoll):
    """The least: each rank reads of its own arrays what it must, and writes what it must, once.

    ``stores``: how, as native/one_pass.cpp numbers them. Nothing is sent, and nobody waits.
    """

    collects = False

    def __init__(self, dtype, stores):
        if dtype != "float32":
            raise Unavailable("it is written for float32")
        super().__init__(dtype)
        self._call = ctypes.CDLL(os.environ["COMPARE_ONE_PASS"]).one_pass
        self._stores = ctypes.c_int(stores)

    def bind(self, collective, x, out):
        reads, writes = x.size, out.size
        if collective == "broadcast":
            reads, writes = (reads, 0) if self.rank == 0 else (0, writes)
        elif collective == "reduce" and self.rank != 0:
            writes = 0
        if collective == "all_gather" and np.shares_memory(x, out):  # its own block is there
            out = out[x.size :] if self.rank == 0 else out
            writes -= x.size
        x, out = (ctypes.c_void_p(array.ctypes.data) for array in (x, out))
        reads, writes = ctypes.c_size_t(reads), ctypes.c_size_t(writes)
        return lambda: self._call(x, reads, out, writes, self._stores)


class Mpi(OnNumpy):
    """Whatever MPI mpi4py finds, through its buffer interface with prepared buffer specs."""

    def __init__(self, dtype, level):
        import mpi4py

        mpi4py.rc.thread_level = level
        from mpi4py import MPI

        names = {"float32": "FLOAT", "float64": "DOUBLE", "bfloat16": "BFLOAT16"}
        if not hasattr(MPI, names[dtype]):
            raise Unavailable(f"mpi4py {mpi4py.__version__} has no {names[dtype]}")
        self._mpi, self._type = MPI, getattr(MPI, names[dtype])
        if self._type == MPI.DATATYPE_NULL:
            raise Unavailable(f"this MPI has no {names[dtype]}")
        self.comm = MPI.COMM_WORLD
        self.rank, self.world_size = self.comm.rank, self.comm.size
        self._dtype = numpy_dtype(dtype)

    def bind(self, collective, x, out):
        comm, mine, theirs = self.comm, [x, self._type], [out, self._type]
        if np.shares_memory(x, out):
            mine = self._mpi.IN_PLACE
        if collective == "broadcast":
            return lambda: comm.Bcast(theirs)
        if collective == "reduce":
            theirs = theirs if self.rank == 0 else None
            return lambda: comm.Reduce(mine, theirs)
        name = {
            "all_reduce": "Allreduce",
            "all_gather": "Allgather",
            "reduce_scatter": "Reduce_scatter_block",
            "all_to_all": "Alltoall",
        }[collective]
        call = getattr(comm, name)
        return lambda: call(mine, theirs)

    def meet(self):
        self.comm.Barrier()

    def agree(self, number):
        return self.comm.bcast(number)

    def gather(self, numbers):
        return np.array(self.comm.allgather(list(numbers)), float)


class Gloo:
    """PyTorch's default on processors."""

    collects = True

    def __init__(self, dtype):
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        rank, size = int(os.environ["COMPARE_RANK"]), int(os.environ["COMPARE_SIZE"])
        store = dist.FileStore(os.environ["COMPARE_STORE"], size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
        self._torch, self._dist, self._type = torch, dist, getattr(torch, dtype)
        self.rank, self.world_size = rank, size

    def make(self, count):
        return self._torch.zeros(count, dtype=self._type)

    def host(self, array):
        if array.dtype == self._torch.bfloat16:
            return array.view(self._torch.int16).numpy().view(numpy_dtype("bfloat16"))
        return array.numpy()

    def bind(self, collective, x, out):
        dist = self._dist
        if collective == "all_reduce" and x is not out:
            return lambda: (out.copy_(x), dist.all_reduce(out))
        if collective == "reduce" and x is not out:
            return lambda: (out.copy_(x), dist.reduce(out, 0))
        return {
            "all_reduce": lambda: dist.all_reduce(x),
            "broadcast": lambda: dist.broadcast(out, 0),
            "reduce": lambda: dist.reduce(x, 0),
            "all_gather": lambda: dist.all_gather_into_tensor(out, x),
            "reduce_scatter": lambda: dist.reduce_scatter_tensor(out, x),
            "all_to_all": lambda: dist.all_to_all_single(out, x),
        }[collective]

    def meet(self):
        self._dist.barrier()

    def agree(self, number):
        box = [number]
        self._dist.broadcast_object_list(box, 0)
        return box[0]

    def gather(self, numbers):
        rows = [None] * self.world_size
        self._dist.all_gather_object(rows, list(numbers))
        return np.array(rows, float)


class Unavailable(Exception):
    """A contestant cannot do this; the text says why."""


def numpy_dtype(name):
    """Return a NumPy dtype by name, bfloat16 included."""
    if name != "bfloat16":
        return np.dtype(name)
    import ml_dtypes

    return np.dtype(ml_dtypes.bfloat16)


def aligned(count, dtype):
    """Return an array that begins on a cache line, like those of symmetric memory and PyTorch.

    A large one begins on a huge page: how much of it lies on small pages, which the kernel copies
    from process to process at half the speed, would be the luck of each contestant otherwise.
    """
    nbytes = count * dtype.itemsize
    line = HUGE_PAGE if nbytes >= 2 * HUGE_PAGE else 64
    raw = np.empty(nbytes + line, np.uint8)
    start = -raw.ctypes.data % line
    return raw[start : start + nbytes].view(dtype)


class Entry(NamedTuple):
    """Which environment of `launch.PACKAGES` a contestant lives in, and what makes it."""

    home: str | None
    make: Callable


CONTESTANTS = {
    "pycoll": Entry(None, Pycoll),
    "pycoll symmetric": Entry(None, partial(Pycoll, symmetric=True)),
    "pycoll over MPICH": Entry("mpich", partial(Pycoll, transport="mpi")),
    "pycoll over Open MPI": Entry("openmpi", partial(Pycoll, transport="mpi")),
    "MPICH": Entry("mpich", partial(Mpi, level="serialized")),
    "MPICH multiple": Entry("mpich", partial(Mpi, level="multiple")),
    "Open MPI": Entry("openmpi", partial(Mpi, level="serialized")),
    "gloo": Entry("torch", Gloo),
    "one pass": Entry(None, partial(OnePass, stores=0)),
    "one pass, string": Entry(None, partial(OnePass, stores=1)),
    "one pass, streaming": Entry(None, partial(OnePass, stores=2)),
}
LIMITS = ("one pass", "one pass, string", "one pass, streaming")
# Who is measured: with pycoll in shared memory, and with pycoll sending messages over an MPI.
LINEUPS = {
    "shm": ("pycoll", "pycoll symmetric", "MPICH", "MPICH multiple", "Open MPI", "gloo"),
    "mpi": ("pycoll over MPICH", "MPICH", "MPICH multiple", "pycoll over Open MPI", "Open MPI"),
}
