"""A call on an object and one on an array are different calls, whatever moves."""

import numpy as np
import pytest

from pycoll.errors import MismatchError
from pycoll.testing import run_threads


def test_a_broadcast_of_an_object_beside_one_of_bytes():
    def rank(comm):
        x = np.zeros(512, np.uint8)
        calls = lambda: comm.broadcast_object({"a": 1}), lambda: comm.broadcast(x)
        with pytest.raises(MismatchError, match=r"broadcast_object"):
            calls[comm.rank]()
        return not x.any()

    assert run_threads(2, rank) == [True] * 2
