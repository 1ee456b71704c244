"""Parallel training on top of the communicator; see docs/parallel.md."""

from pycoll.parallel.data_parallel import DataParallel
from pycoll.parallel.estimate import Estimate, estimate
from pycoll.parallel.hooks import Compress, Hook
from pycoll.parallel.layer import Layer, Loss, Model, ParameterSpec, Sequential
from pycoll.parallel.ledger import Ledger
from pycoll.parallel.mesh import Mesh
from pycoll.parallel.optim import SGD, AdamW, WarmupCosine, WarmupLinear, linear_scale
from pycoll.parallel.options import Options
from pycoll.parallel.placement import PRESETS, Placed, Placement, Preset
from pycoll.parallel.powersgd import PowerSGD
from pycoll.parallel.precision import RECIPES, LossScale, Precision
from pycoll.parallel.report import StepReport
from pycoll.parallel.sparse import TopK

__all__ = [
    "PRESETS",
    "RECIPES",
    "SGD",
    "AdamW",
    "Compress",
    "DataParallel",
    "Estimate",
    "Hook",
    "Layer",
    "Ledger",
    "Loss",
    "LossScale",
    "Mesh",
    "Model",
    "Options",
    "ParameterSpec",
    "Placed",
    "Placement",
    "PowerSGD",
    "Precision",
    "Preset",
    "Sequential",
    "StepReport",
    "TopK",
    "WarmupCosine",
    "WarmupLinear",
    "estimate",
    "linear_scale",
]
