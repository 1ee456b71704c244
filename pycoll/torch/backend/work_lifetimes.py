"""Works that PyTorch keeps in C++, where nothing keeps their Python half.

Only the C++ half of a work counts there. When the Python half has gone, ``wait`` is that of
PyTorch's own class, which waits for ever, and ``getFuture`` is "not implemented".
"""

from __future__ import annotations

import functools
import weakref

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

_METHOD = "_set_forward_pass_work_handle"  # with it DDP's `join` counts the ranks that still train
_works: weakref.WeakKeyDictionary[dist.Reducer, dist.Work] = weakref.WeakKeyDictionary()


def keep_works() -> None:
    """Make DDP's reducers keep the Python half of the work they are given; harmless if repeated."""
    plain = getattr(dist.Reducer, _METHOD, None)
    if plain is None or hasattr(plain, "__wrapped__"):
        return

    @functools.wraps(plain)
    def kept(reducer: dist.Reducer, work: dist.Work, use_static_world_size: bool) -> None:
        _works[reducer] = work
        plain(reducer, work, use_static_world_size)

    setattr(dist.Reducer, _METHOD, kept)


def keep_in_flight(work: dist.Work, tensors: list[torch.Tensor]) -> dist.Work:
    """Return a work, for which `wait_tensor` waits if its tensors may be inputs of a graph.

    That is so inside of ``allow_inflight_collective_as_graph_input_ctx``. PyTorch keeps a work of
    C++ that waits for the future.
    """
    allowed = getattr(c10d, "_allow_inflight_collective_as_graph_input", None)
    if allowed is not None and allowed():
        lasting = c10d._create_work_from_future(work.get_future())
        for tensor in tensors:
            c10d._register_work(tensor, lasting)
    return work
