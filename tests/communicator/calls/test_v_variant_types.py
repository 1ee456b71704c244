"""The v-variants on elements of different types, which are compared like their sizes."""

import re

import numpy as np
import pytest

from pycoll.errors import MismatchError
from pycoll.testing import run_processes, run_threads


@pytest.fixture(params=["threads", "processes"])
def run(request):
    return run_threads if request.param == "threads" else run_processes


OF_ANY_TYPE = {
    "all_gather_v": lambda comm, dtype: comm.all_gather_v(np.ones(3, dtype)),
    "gather_v": lambda comm, dtype: comm.gather_v(np.ones(comm.rank, dtype)),
    "scatter_v": lambda comm, dtype: comm.scatter_v(np.ones(3, dtype), [0, 1, 2]),
    "reduce_scatter_v": lambda comm, dtype: comm.reduce_scatter_v(np.ones(3, dtype), [0, 1, 2]),
    "all_to_all_v": lambda comm, dtype: comm.all_to_all_v(np.ones(3, dtype), [0, 1, 2]),
}


@pytest.mark.parametrize("kind", OF_ANY_TYPE)
def test_types_that_differ(run, kind):
    """They are compared with the sizes, so the communicator stays usable."""

    def rank(comm):
        with pytest.raises(MismatchError, match="field 'dtype' differs: rank 2 differs") as caught:
            OF_ANY_TYPE[kind](comm, np.complex128 if comm.rank == 2 else np.float64)
        return str(caught.value), float(comm.all_reduce(np.ones(1))[0])

    for text, total in run(3, rank):
        assert re.search(rf"rank 0: {kind}\(float64\) at test_v_variant_types", text)
        assert re.search(rf"rank 2: {kind}\(complex128\) at test_v_variant_types", text)
        assert total == 3.0
