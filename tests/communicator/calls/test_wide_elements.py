"""Elements that are wider than a slot of a cell, as long strings are."""

import numpy as np
import pytest

from pycoll.config import Config
from pycoll.errors import ArgumentError
from pycoll.testing import run_processes, run_threads

SMALL = Config(timeout_s=10, cell_bytes=4096, heap_bytes=1 << 30)


@pytest.mark.parametrize("width", [1024, 2000, 4096, 30_001])
@pytest.mark.parametrize("count", [1, 3])
def test_they_are_moved_in_parts(width, count):
    def rank(comm):
        me = np.array([f"{comm.rank}{i}" + "x" * width for i in range(count)]).astype(f"S{width}")
        all_ = comm.all_gather(me)
        first = comm.broadcast(me.copy(), root=1)
        back = comm.all_to_all(np.tile(me, 3))
        rows = comm.all_gather_v(me[: 1 + (comm.rank > 0) * (count - 1)])
        held = comm.empty(count, me.dtype)
        held[:] = me
        symmetric = comm.all_gather(held)
        return me, all_, first, back, rows, symmetric

    results = run_processes(3, rank, config=SMALL)
    inputs = [result[0] for result in results]
    whole = np.concatenate(inputs)
    for _, all_, first, back, rows, symmetric in results:
        assert (all_ == whole).all()
        assert (symmetric == whole).all()
        assert (first == inputs[1]).all()
        assert (back == whole).all()
        assert (rows == np.concatenate([inputs[0][:1], inputs[1], inputs[2]])).all()


def test_what_to_do_where_a_cell_is_too_small():
    def rank(comm):
        x = np.zeros(7, "S1000")
        with pytest.raises(ArgumentError, match=r"call init\(cell_bytes=8192\)") as caught:
            comm.all_to_all(x, algorithm="direct")
        comm.barrier()
        return str(caught.value)

    assert "PYCOLL_CELL_BYTES" in run_threads(7, rank, config=SMALL)[0]
