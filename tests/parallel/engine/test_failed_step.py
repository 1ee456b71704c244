"""A step that has raised on every rank leaves nothing behind that changes the next one."""

import threading
import time

import numpy as np
import pytest

from parallel.models import CrossEntropy, Linear, batches
from pycoll.parallel import SGD, DataParallel, Mesh, Sequential
from pycoll.parallel.channels import Pending
from pycoll.parallel.state.hook import Hook
from pycoll.testing import run_threads

SIZES = (7, 19, 5)


class Late(Pending):
    """A reduction that is slow: it reads and writes its arrays only after a while."""

    def __init__(self, reduce):
        self._found = []
        self._thread = threading.Thread(target=self._run, args=(reduce,), daemon=True)
        self._thread.start()

    def _run(self, reduce):
        time.sleep(0.3)
        self._found.append(reduce())

    def done(self):
        return not self._thread.is_alive()

    def wait(self):
        self._thread.join(10)
        return self._found[0]


class SlowAtFirst(Hook):
    """Is slow with the first bucket, which has a communicator of its own."""

    def __init__(self, comm):
        self._comms = [comm]

    def all_reduce(self, key, data, *rest):
        if not self._comms:
            return super().all_reduce(key, data, *rest)
        comm = self._comms.pop()
        return Late(lambda: comm.all_reduce(data, out=data))

    def reduce_scatter(self, key, data, out, *rest):
        if not self._comms:
            return super().reduce_scatter(key, data, out, *rest)
        comm = self._comms.pop()
        return Late(lambda: comm.reduce_scatter(data, out=out))


class Stumbling(Linear):
    stumbles = False

    def backward_weight(self, params, saved, dy):
        if self.stumbles:
            raise ValueError("a bad batch")
        return super().backward_weight(params, saved, dy)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_a_reduction_that_a_failed_step_has_started(zero):
    def rank(comm, fails):
        first, last = Stumbling(*SIZES[:2], seed=0), Linear(*SIZES[1:], seed=1)
        model = Sequential([("first", first), ("last", last)])
        options = {"zero": zero, "bucket_bytes": 256, "optimizer": SGD(0.1)}
        options["hook"] = SlowAtFirst(comm.dup())
        with DataParallel(model, CrossEntropy(), Mesh(comm, dp=-1), **options) as engine:
            samples = batches(2, sizes=SIZES)
            for first.stumbles in (True, False) if fails else (False,):
                try:  # the gradients of `last` are on their way when `first` stumbles
                    engine.step(samples[comm.rank :][:1])
                except ValueError:
                    assert first.stumbles
            return engine.gather()

    wanted = run_threads(2, rank, False)
    for found, want in zip(run_threads(2, rank, True), wanted, strict=True):
        for name, value in want.items():
            np.testing.assert_array_equal(found[name], value)
