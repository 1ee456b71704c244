"""Attention, MLP and block of a transformer, on one rank or split over tensor-parallel ranks.

The block is that of GPT-2, with the normalisation before each part (Radford et al., "Language
models are unsupervised multitask learners", 2019, section 2.3).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pycoll.errors import ArgumentError
from pycoll.parallel.channels import LayerComm
from pycoll.parallel.context.ring import RingAttention
from pycoll.parallel.context.split import Context
from pycoll.parallel.context.ulysses import UlyssesAttention
from pycoll.parallel.nn.attention import CausalAttention
from pycoll.parallel.nn.containers import Chain, Residual
from pycoll.parallel.nn.layer import Layer
from pycoll.parallel.nn.layers import GELU, LayerNorm, Linear
from pycoll.parallel.nn.positional import Dropout
from pycoll.parallel.random import Cursor, Key
from pycoll.parallel.tensor.layers import ColumnParallelLinear, RowParallelLinear


@dataclass(frozen=True)
class TransformerConfig:
    """Sizes of a transformer, and how it is split.

    Attributes:
        features: Width of the residual stream.
        heads: Attention heads; a divisor of `features`.
        depth: Number of blocks.
        vocabulary: Number of tokens.
        length: Largest number of positions.
        dropout: Probability of dropout, of attention weights and at the end of each part.
        std: Standard deviation of initial weights; of those that end in the residual stream it is
            ``std / sqrt(2 depth)``.
        dtype: Type of parameters and activations.
        comm: The tensor-parallel ranks; None: nothing is split.
        sequence_parallel: Between the split layers each rank has part of the sequence.
        regather: See `ColumnParallelLinear`.
        cursor: Position of training; needed for dropout.
        context: How the sequence is divided over context-parallel ranks; None: it is not.
    """

    features: int
    heads: int
    depth: int = 1
    vocabulary: int = 256
    length: int = 128
    dropout: float = 0.0
    std: float = 0.02
    dtype: str = "float32"
    comm: LayerComm | None = None
    sequence_parallel: bool = False
    regather: bool = True
    cursor: Cursor | None = None
    context: Context | None = None

    def __post_init__(self) -> None:
        """Refuse what does not fit together."""
        if self.features % self.heads:
            raise ArgumentError(f"features={self.features} is not divisible by heads={self.heads}")
        if self.sequence_parallel and self.comm is None:
            raise ArgumentError("sequence_parallel=True needs comm, the tensor-parallel ranks")
        if self.dropout and self.cursor is None:
            raise ArgumentError(f"dropout={self.dropout} needs a cursor")

    @property
    def sequence(self) -> LayerComm | None:
        """Ranks over which the sequence is split between the split layers."""
        return self.comm if self.sequence_parallel else None

    def widening(self, out_features: int, key: Key, **more: Any) -> Layer:
        """Return a linear layer that begins at the residual stream."""
        size, more = (self.features, out_features, key), {"dtype": self.dtype, **more}
        if self.comm is None:
            return Linear(*size, std=self.std, **more)
        more |= {"sequence_parallel": self.sequence_parallel, "regather": self.regather}
        return ColumnParallelLinear(*size, self.comm, std=self.std, **more)

    def narrowing(self, in_features: int, key: Key) -> Layer:
        """Return a linear layer that ends in the residual stream."""
        size, std = (in_features, self.features, key), self.std * (2 * self.depth) ** -0.5
        if self.comm is None:
            return Linear(*size, std=std, dtype=self.dtype)
        split = {"sequence_parallel": self.sequence_parallel, "dtype": self.dtype}
        return RowParallelLinear(*size, self.comm, std=std, **split)

    def norm(self, key: Key) -> LayerNorm:
        """Return a layer normalisation of the residual stream."""
        return LayerNorm(
            self.features, key, dtype=self.dtype, sequence_parallel=self.sequence_parallel
        )

    def drop(self, key: Key) -> list[tuple[str, Layer]]:
        """Return the dropout at the end of a part, if there is any."""
        if not self.dropout or self.cursor is None:
            return []
        return [
            (
                "dropout",
                Dropout(
                    self.dropout, key.fold("dropout"), self.cursor, self.sequence, self.context
                ),
            )
        ]

    def attention(self, key: Key) -> Layer:
        """Return the attention between its two linear layers."""
        more = (self.heads, self.features // self.heads, key, self.comm, self.dropout, self.cursor)
        if self.context is None:
            return CausalAttention(*more)
        kind = UlyssesAttention if self.context.kind == "ulysses" else RingAttention
        return kind(*more, self.context)


class Attention(Chain):
    """Causal multi-head self-attention with its linear layers: ``[b, s, h]`` -> the same."""

    def __init__(self, config: TransformerConfig, key: Key) -> None:
        """Make the layers ``qkv``, ``heads`` and ``projection``."""
        c = config
        super().__init__(
            ("qkv", c.widening(3 * c.features, key.fold("qkv"))),
            ("heads", c.attention(key.fold("heads"))),
            ("projection", c.narrowing(c.features, key.fold("projection"))),
            *c.drop(key),
        )


class MLP(Chain):
    """Two linear layers with GELU between them, four times as wide: ``[b, s, h]`` -> the same."""

    def __init__(self, config: TransformerConfig, key: Key) -> None:
        """Make the layers ``expand``, ``gelu`` and ``contract``."""
        super().__init__(
            ("expand", config.widening(4 * config.features, key.fold("expand"))),
            ("gelu", GELU()),
            ("contract", config.narrowing(4 * config.features, key.fold("contract"))),
            *config.drop(key),
        )


class Block(Chain):
    """``x + attention(norm(x))``, then ``x + mlp(norm(x))``."""

    def __init__(self, config: TransformerConfig, key: Key) -> None:
        """Make the parts ``attention`` and ``mlp``, each with its ``norm``."""
        parts: list[tuple[str, Layer]] = []
        for name, part in (("attention", Attention), ("mlp", MLP)):
            inner = key.fold(name)
            norm = config.norm(inner.fold("norm"))
            parts.append((name, Residual(("norm", norm), *part(config, inner).layers)))
        super().__init__(*parts)
