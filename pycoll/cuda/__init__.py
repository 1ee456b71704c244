"""Arrays on CUDA devices: kernels over peer memory, NCCL, virtual ranks; see docs/cuda.md.

Nothing of CUDA is loaded before it is needed. `pycoll.init` and `pycoll.virtual_ranks` are the ways
in; `missing` tells what a machine lacks.
"""

from pycoll.cuda.probe import missing

__all__ = ["missing"]
