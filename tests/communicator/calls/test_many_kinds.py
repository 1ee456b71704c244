"""Calls of many kinds in turn: those that are remembered do not push each other out."""

import numpy as np


def test_three_hundred_shapes(run):
    """Of so many hardly any is forgotten before it comes again, wherever their types lie."""

    def rank(comm):
        arrays = [np.ones(i + 1, np.float32) for i in range(300)]
        outs = [np.empty_like(x) for x in arrays]
        prepared = []
        for _ in range(2):
            for x, out in zip(arrays, outs, strict=True):
                comm.all_reduce(x, out=out)
        session, prepare = comm._session, comm._session.prepare
        session.prepare = lambda *call: prepared.append(call) or prepare(*call)
        for x, out in zip(arrays, outs, strict=True):
            assert (comm.all_reduce(x, out=out) == comm.world_size).all()
        del session.prepare
        return len(prepared)

    assert max(run(2, rank)) < 30


def test_more_kinds_than_are_remembered(run):
    def rank(comm):
        for _ in range(2):
            for i in range(3000):
                assert comm.all_reduce(np.ones(i % 1500 + 1))[-1] == comm.world_size
        return True

    assert all(run(2, rank))
