"""A program of which type checkers know every type; `test_typed_results.py` runs it, too."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

import pycoll
from pycoll import parallel

if sys.version_info >= (3, 11):
    from typing import assert_type
elif TYPE_CHECKING:
    from typing_extensions import assert_type
else:

    def assert_type(value: Any, kind: Any) -> Any:
        """Do nothing."""
        return value


def main(comm: pycoll.Communicator) -> None:
    """Call what has a type of its own."""
    n = comm.world_size
    x: NDArray[np.float64] = np.ones((2 * n, 3))
    y: NDArray[np.float64] = np.empty_like(x)
    single = comm.zeros((2 * n, 3))
    assert_type(single, NDArray[np.float32])
    assert_type(comm.empty(4, np.int64), NDArray[np.int64])
    assert_type(comm.empty_like(x), NDArray[Any])

    assert_type(comm.all_reduce(x), NDArray[np.float64])
    assert_type(comm.all_reduce(x, "max", order="rank", timeout=5), NDArray[np.float64])
    assert_type(comm.all_reduce(x, np.hypot), NDArray[np.float64])
    assert_type(comm.all_reduce(single, out=None), NDArray[np.float32])
    assert_type(comm.all_reduce(x.tolist(), out=y), NDArray[np.float64])
    assert_type(comm.all_reduce(x, async_op=True), pycoll.Work).wait()
    assert_type(comm.reduce_scatter(x), NDArray[np.float64])
    assert_type(comm.all_gather(x), NDArray[np.float64])
    assert_type(comm.all_to_all(x, out=y), NDArray[np.float64])
    assert_type(comm.broadcast(x), NDArray[np.float64])
    assert_type(comm.scatter(x), NDArray[np.float64])
    assert_type(comm.scan(x), NDArray[np.float64])
    assert_type(comm.exscan(x), NDArray[np.float64])
    assert_type(comm.all_gather_v(x), NDArray[np.float64])
    assert_type(comm.all_to_all_v(x, np.full(n, 2)), NDArray[np.float64])
    at_root = comm.reduce(x, root=n - 1)
    if comm.rank == n - 1:
        at_root.sum()  # no complaint that it may be None

    parallel.Options(optimizer=parallel.AdamW(1e-3), hook=parallel.TopK(0.1))
    mesh = parallel.Mesh(comm, dp=-1)
    assert_type(mesh.dp.world_size, int)

    assert_type(comm.all_gather_object({"rank": comm.rank}), list[dict[str, int]])
    group = comm.split(0)
    assert_type(group, pycoll.Communicator | None)
    assert_type(comm.dup(), pycoll.Communicator)
    assert_type(comm.grid((n,)).move(x, 0), NDArray[np.float64])
