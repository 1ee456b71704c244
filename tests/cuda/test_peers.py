"""Ranks and the devices they run on: who shares one, and how long they wait for each other."""

import math

import numpy as np
import pytest

from cuda.host_cupy import DeviceArray
from pycoll.config import Config
from pycoll.errors import ArgumentError, PeerRejected
from pycoll.testing import run_threads

PEERS = Config(timeout_s=10, heap_bytes=1 << 28, device_heap_bytes=1 << 20)


def test_limits_that_fit_no_word(host_kernels):
    """Infinity is as long as anybody can wait; what is no number is refused before it is sent."""

    def rank(comm):
        x = DeviceArray(np.ones(4))
        for limit in (math.inf, 1e300):
            assert comm.all_reduce(x, timeout=limit).get().tolist() == [2.0] * 4
        for limit in (math.nan, -math.inf, 10**400, "soon"):
            bad = pytest.raises(ArgumentError, match="a number of seconds above 0")
            with bad if comm.rank else pytest.raises(PeerRejected):
                comm.all_reduce(x, timeout=limit if comm.rank else None)

    run_threads(2, rank, config=PEERS)
    assert [limit for _, limit in host_kernels.launches] == [10**18] * 4
    host_kernels.launches.clear()
    endless = Config(timeout_s=1e300, heap_bytes=1 << 28)
    run_threads(2, lambda comm: comm.all_reduce(DeviceArray(np.ones(4))), config=endless)
    assert [limit for _, limit in host_kernels.launches] == [10**18] * 2
