"""Calls on tensors as servers of models make them: docs/inference.md.

`ragged` has the collectives on rows that differ in number from rank to rank, `experts` the dispatch
and combine of mixtures of experts, `communicator` the methods that servers call, in one object.
Uses the process group only. Read `ragged` first.
"""

from pycoll.torch.inference.communicator import CpuCommunicator
from pycoll.torch.inference.experts import Dispatched, combine, dispatch
from pycoll.torch.inference.ragged import all_gatherv, all_to_allv, reduce_scatterv

__all__ = [
    "CpuCommunicator",
    "Dispatched",
    "all_gatherv",
    "all_to_allv",
    "combine",
    "dispatch",
    "reduce_scatterv",
]
