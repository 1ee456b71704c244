"""A GPT: token and position embedding, blocks, a last normalisation, and the head."""

from __future__ import annotations

from pycoll.parallel.nn.containers import Chain
from pycoll.parallel.nn.layer import Layer, Loss
from pycoll.parallel.nn.layers import Embedding
from pycoll.parallel.nn.losses import CrossEntropy
from pycoll.parallel.nn.positional import Position
from pycoll.parallel.nn.transformer import Block, TransformerConfig
from pycoll.parallel.random import Key
from pycoll.parallel.tensor.layers import VocabParallelCrossEntropy, VocabParallelEmbedding

__all__ = ["GPT", "TransformerConfig"]


class GPT:
    """A decoder-only transformer: tokens ``[b, s]`` -> logits ``[b, s, vocabulary]``.

    With tensor parallelism each rank has ``vocabulary / n`` columns of the logits, which is what
    `loss` expects. With context parallelism tokens and targets are each rank's part of the sequence
    (`Context.take`).

    Attributes:
        config: Its sizes.
        layers: ``embedding``, ``block0`` ..., ``norm``, ``head``: the units of sharding.
    """

    def __init__(self, config: TransformerConfig, seed: int, tied: bool = False) -> None:
        """Make the layers.

        Args:
            config: Sizes, and how the model is split.
            seed: Seed of the initial parameters, which do not depend on the mesh.
            tied: The head uses the table of the token embedding, as GPT-2 does.
        """
        self.config = config
        key = Key(seed)
        blocks = [f"block{i}" for i in range(config.depth)]
        tied_to = "embedding.token.weight" if tied else None
        head = config.widening(config.vocabulary, key.fold("head"), bias=False, tied_to=tied_to)
        self.layers: list[tuple[str, Layer]] = [
            ("embedding", _embedding(config, key.fold("embedding"))),
            *((name, Block(config, key.fold(name))) for name in blocks),
            ("norm", config.norm(key.fold("norm"))),
            ("head", head),
        ]

    def loss(self) -> Loss:
        """Return the cross-entropy that fits the logits."""
        comm = self.config.comm
        return CrossEntropy() if comm is None else VocabParallelCrossEntropy(comm)


def _embedding(c: TransformerConfig, key: Key) -> Chain:
    token, size = key.fold("token"), (c.vocabulary, c.features)
    if c.comm is None:
        table: Layer = Embedding(*size, token, std=c.std, dtype=c.dtype)
    else:
        table = VocabParallelEmbedding(*size, token, c.comm, c.sequence_parallel, c.std, c.dtype)
    where = (c.sequence, c.std, c.dtype, c.context)
    position = Position(c.length, c.features, key.fold("position"), *where)
    return Chain(("token", table), ("position", position), *c.drop(key))
