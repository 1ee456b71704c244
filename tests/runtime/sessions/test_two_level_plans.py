"""How calls in two levels are cut into slices."""

from itertools import pairwise

import pytest

from pycoll import algorithms
from pycoll.algorithms.two_level.stages import Hosts
from pycoll.runtime.calls.plans import CallSpec
from pycoll.runtime.sessions.two_level_plans import (
    LEAST_PIECE,
    MOST_SLICE,
    SLICES,
    in_blocks,
    slices_of,
)
from pycoll.types import DType, Kind

EAGER_BYTES = (
    32 << 10
)  # kEagerBytes of csrc/transports/messages/message_link.h: calls that fit do not overlap
HOSTS = [(0, 0, 1, 1), (0, 0, 0, 0, 1, 1, 1, 1), (0, 1, 2, 0, 1, 2, 0, 1), (0, 1, 1, 2, 3)]
NAMES = {"all_reduce": "ring", "all_gather": "ring", "all_to_all": "direct"}


def spec_of(collective, count, itemsize):
    algorithm = algorithms.find(collective, NAMES[collective])
    kind, dtype = Kind[collective.upper()], int(DType.FLOAT32 if itemsize == 4 else DType.FLOAT64)
    return CallSpec(kind, collective, algorithm, (), False, dtype, itemsize, count)


@pytest.mark.parametrize("of", HOSTS)
@pytest.mark.parametrize("collective", NAMES)
@pytest.mark.parametrize("count", [0, 1, 63, 4097, 70_001, 1 << 20, 40_000_000])
def test_slices(of, collective, count):
    hosts = Hosts(of, min(map(len, Hosts(of).groups)))
    count -= count % hosts.n
    for itemsize in (4, 8):
        spec = spec_of(collective, count, itemsize)
        blocks = hosts.n if in_blocks(spec) else 1
        found = list(slices_of(spec, hosts))
        assert found[0][0] == 0
        assert found[-1][1] == count // blocks
        assert all(end == begin for (_, end), (begin, _) in pairwise(found))
        sizes = [(high - low) * blocks * itemsize for low, high in found]
        slack = 64 * blocks * itemsize
        assert max(sizes) <= max(MOST_SLICE, LEAST_PIECE * hosts.n) + slack
        assert len(found) <= max(SLICES + 1, count * itemsize // MOST_SLICE + 1)
        for nbytes in sizes[:-1]:
            messages = (
                blocks if blocks > 1 else hosts.columns * (hosts.count if hosts.count > 2 else 1)
            )
            assert nbytes // messages > EAGER_BYTES
