"""What split layers refuse, and what they say then."""

import numpy as np
import pytest

from pycoll.errors import ArgumentError
from pycoll.parallel.nn import Linear, initial
from pycoll.parallel.nn.transformer import Attention, TransformerConfig
from pycoll.parallel.random import Key
from pycoll.parallel.tensor.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from pycoll.testing import RankFailed, run_threads

KEY = Key(11).fold("block3", "part")
B, S, H = 2, 12, 24

BAD = {
    "axis 0 of block3.part.weight has length 25, .* ranks 0 to 1: 25 is not divisible by 2": (
        lambda comm: ColumnParallelLinear(H, 25, KEY, comm)
    ),
    "axis 1 of block3.part.weight has length 25": lambda c: RowParallelLinear(25, H, KEY, c),
    "axis 0 of block3.part.weight has length 257": (
        lambda comm: VocabParallelEmbedding(257, H, KEY, comm)
    ),
    "3 heads cannot be split over 2": (
        lambda comm: Attention(TransformerConfig(18, 3, comm=comm), KEY)
    ),
    "comm is an int; expected the communicator": (
        lambda comm: ColumnParallelLinear(H, 24, KEY, comm.world_size)
    ),
    r"part.weight on rank \d of 2 .* has shape \(24, 24\), expected \(12, 24\)": (
        lambda comm: ColumnParallelLinear(H, 24, KEY, comm).forward(
            initial(Linear(H, 24, KEY)), np.ones((B, S, H))
        )
    ),
    r"the input of block3.part on rank \d of 2 .* expected \(2, 12, 12\)": (
        lambda comm: run_own(RowParallelLinear(24, H, KEY, comm), np.ones((B, S, 24)))
    ),
    r"rank \d of 2 .*: the sequence of .* \(2, 7, 24\) has length 7, which is not divisible by 2": (
        lambda comm: run_own(
            RowParallelLinear(24, H, KEY, comm, sequence_parallel=True), np.ones((B, 7, 12))
        )
    ),
}


def run_own(layer, x):
    return layer.forward(initial(layer), x.astype(np.float32))


@pytest.mark.parametrize("text", BAD)
def test_refusals(text):
    def rank(comm):
        with pytest.raises(ArgumentError, match=text):
            BAD[text](comm)

    run_threads(2, rank)


def test_a_layer_on_the_wrong_communicator():
    """Parameters made for two ranks, used by a layer of a communicator of four."""

    def rank(comm):
        pair = comm.split(comm.rank // 2)
        params = initial(ColumnParallelLinear(H, 24, KEY, pair))
        layer = ColumnParallelLinear(H, 24, KEY, comm)
        layer.forward(params, np.ones((B, S, H), np.float32))

    with pytest.raises(RankFailed, match=r"weight on rank \d of 4 .* the same communicator"):
        run_threads(4, rank)


def test_configurations_are_checked():
    for options, text in (
        ({"heads": 5}, "not divisible by heads=5"),
        ({"heads": 4, "sequence_parallel": True}, "needs comm"),
        ({"heads": 4, "dropout": 0.1}, "needs a cursor"),
    ):
        with pytest.raises(ArgumentError, match=text):
            TransformerConfig(H, **options)
