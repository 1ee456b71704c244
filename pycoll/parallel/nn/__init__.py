"""Layers with an explicit forward and backward, parameters passed in; `layer` is the contract.

Linear, embedding, normalisation and activations are in `layers`; `containers` chains them,
`transformer` builds blocks, split over ranks or not. They use `pycoll.parallel.arrays` and
`random`. Read `layer` first.
"""

from pycoll.parallel.nn.attention import CausalAttention
from pycoll.parallel.nn.containers import Chain, Residual
from pycoll.parallel.nn.layer import Layer, Loss, Model, ParameterSpec, Sequential
from pycoll.parallel.nn.layers import GELU, Embedding, LayerNorm, Linear, ReLU, Tanh, initial
from pycoll.parallel.nn.losses import CrossEntropy
from pycoll.parallel.nn.positional import Dropout, Position
from pycoll.parallel.nn.transformer import MLP, Attention, Block, TransformerConfig

__all__ = [
    "GELU",
    "MLP",
    "Attention",
    "Block",
    "CausalAttention",
    "Chain",
    "CrossEntropy",
    "Dropout",
    "Embedding",
    "Layer",
    "LayerNorm",
    "Linear",
    "Loss",
    "Model",
    "ParameterSpec",
    "Position",
    "ReLU",
    "Residual",
    "Sequential",
    "Tanh",
    "TransformerConfig",
    "initial",
]
