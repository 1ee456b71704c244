"""Parallel training on top of the communicator; see docs/parallel.md."""

from pycoll.parallel.analysis.estimate import Estimate, estimate
from pycoll.parallel.analysis.planner import Prediction, plan
from pycoll.parallel.analysis.workload import Speed, Workload
from pycoll.parallel.channels import Ledger
from pycoll.parallel.checkpoint import Loaded, Saving, load, save
from pycoll.parallel.elastic.run import Change, Elastic
from pycoll.parallel.engine.data_parallel import DataParallel
from pycoll.parallel.engine.options import Options
from pycoll.parallel.engine.report import Scalars, StepReport
from pycoll.parallel.hooks.compress import Compress
from pycoll.parallel.hooks.powersgd import PowerSGD
from pycoll.parallel.hooks.top_k import TopK
from pycoll.parallel.mesh import Mesh
from pycoll.parallel.nn.layer import Layer, Loss, Model, ParameterSpec, Sequential
from pycoll.parallel.optim import SGD, AdamW, WarmupCosine, WarmupLinear, linear_scale
from pycoll.parallel.pipeline import Pipeline
from pycoll.parallel.precision import RECIPES, LossScale, Precision
from pycoll.parallel.sampler import Sampler
from pycoll.parallel.server.parameter_server import ParameterServer
from pycoll.parallel.server.serving import Served
from pycoll.parallel.state.averaging import Average, DiLoCo, Gossip
from pycoll.parallel.state.hook import Hook
from pycoll.parallel.state.placement import PRESETS, Placed, Placement, Preset

__all__ = [
    "PRESETS",
    "RECIPES",
    "SGD",
    "AdamW",
    "Average",
    "Change",
    "Compress",
    "DataParallel",
    "DiLoCo",
    "Elastic",
    "Estimate",
    "Gossip",
    "Hook",
    "Layer",
    "Ledger",
    "Loaded",
    "Loss",
    "LossScale",
    "Mesh",
    "Model",
    "Options",
    "ParameterServer",
    "ParameterSpec",
    "Pipeline",
    "Placed",
    "Placement",
    "PowerSGD",
    "Precision",
    "Prediction",
    "Preset",
    "Sampler",
    "Saving",
    "Scalars",
    "Sequential",
    "Served",
    "Speed",
    "StepReport",
    "TopK",
    "WarmupCosine",
    "WarmupLinear",
    "Workload",
    "estimate",
    "linear_scale",
    "load",
    "plan",
    "save",
]
