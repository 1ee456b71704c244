"""Causal attention of a divided sequence whose keys and values go round the ranks.

Each rank keeps its queries. Softmax is formed block by block, with the largest score and the sum of
the exponentials so far (Milakov and Gimelshein, arXiv 1805.02867, section 3). In the backward pass
the gradients of keys and values travel with them and come home after a full round.

Source: Liu, Zaharia and Abbeel, "Ring attention with blockwise transformers for near-infinite
context", arXiv 2310.01889, section 3; zigzag: Brandon et al., "Striped attention", arXiv
2311.09431, section 3, for the imbalance that it removes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from pycoll.errors import ArgumentError
from pycoll.parallel.arrays import Array, cast, matmul, move_to, namespace, row_dot, widen
from pycoll.parallel.context.split import Context
from pycoll.parallel.nn.attention import CausalAttention, transposed
from pycoll.parallel.nn.layer import Params
from pycoll.parallel.nn.positional import draw_mask, masked, span


class _Saved(NamedTuple):
    """Input, output ``[b, heads, s, width]`` and logarithm of the sum of exponentials, by query."""

    x: Array
    y: Array
    total: Array


class _Block(NamedTuple):
    """A block of the attention: where its queries and keys lie on their ranks."""

    queries: slice
    keys: slice
    diagonal: bool
    keep: Array | None


@dataclass(frozen=True)
class RingAttention(CausalAttention):
    """`CausalAttention` of a sequence of which each rank has a part.

    ``[b, s / n, heads * 3 * width]`` -> ``[b, s / n, heads * width]``.

    Cost: forward n - 1 messages of keys and values, backward as many, and n of their gradients,
    which are float32 where keys have 16 bits.

    Attributes are those of `CausalAttention`, and:
        context: How the sequence is divided: ``zigzag`` or ``ring``.
    """

    context: Context | None = None

    def __post_init__(self) -> None:
        """Refuse heads that ranks cannot share evenly, and another kind of context."""
        super().__post_init__()
        if self.context is None or self.context.kind == "ulysses":
            raise ArgumentError(f"{self.key.name}: context={self.context!r}; expected zigzag, ring")

    def forward(self, params: Params, x: Array) -> tuple[Array, Any]:
        """Return the output; saves input, output and sums of exponentials."""
        self._check(x)
        xp, (q, *own) = namespace(x), self._heads(x)
        q = widen(q)
        y, top = xp.zeros_like(q), xp.full_like(q[..., :1], -np.inf)
        total = xp.zeros_like(top)
        for source, parts, _ in self._round(own):
            keys, values = map(widen, parts)
            for block in self._blocks(x, source):
                rows = block.queries
                scores = self._scores(q, keys, block)
                high = xp.maximum(top[:, :, rows], xp.max(scores, axis=-1, keepdims=True))
                shrink = xp.exp(top[:, :, rows] - high)
                scores = xp.exp(scores - high)
                total[:, :, rows] *= shrink
                total[:, :, rows] += xp.sum(scores, axis=-1, keepdims=True)
                y[:, :, rows] *= shrink
                chosen = masked(scores, block.keep, self.drop)
                y[:, :, rows] += matmul(chosen, values[:, :, block.keys])
                top[:, :, rows] = high
        y /= total
        total = xp.log(total)
        total += top
        out = xp.reshape(xp.moveaxis(y, 1, 2), (*x.shape[:2], x.shape[2] // 3))
        return cast(out, x.dtype), _Saved(x, y, total)

    def backward_input(self, params: Params, saved: Any, dy: Array) -> Array:
        """Return the gradients of queries, keys and values, as they lie in the input."""
        x, y, total = saved
        xp = namespace(x)
        q, *moved = self._heads(x)
        q = widen(q)
        shape = (*x.shape[:2], self.heads // self.ranks, self.width)
        dout = xp.moveaxis(xp.reshape(widen(dy), shape), 1, 2)
        weight, dq = row_dot(dout, y), xp.zeros_like(q)
        for source, parts, landing in self._round(moved, home=True):
            keys, values = map(widen, parts)
            for block in self._blocks(x, source):
                rows, columns = block.queries, block.keys
                p = xp.exp(self._scores(q, keys, block) - total[:, :, rows])
                own = dout[:, :, rows]
                dp = masked(matmul(own, transposed(values[:, :, columns])), block.keep, self.drop)
                dp -= weight[:, :, rows]
                dp *= p
                dp *= self.width**-0.5
                dq[:, :, rows] += matmul(dp, keys[:, :, columns])
                chosen = masked(p, block.keep, self.drop)
                dkeys, dvalues = landing.wait()
                dvalues[:, :, columns] += matmul(transposed(chosen), own)
                dkeys[:, :, columns] += matmul(transposed(dp), q[:, :, rows])
        last = landing.wait()
        dx = xp.empty_like(x)
        for place, value in zip(self._heads(dx), (dq, *last), strict=True):
            place[...] = cast(value, x.dtype)
        return dx

    def forget(self, saved: Any) -> Any:
        """Keep what is saved: no weights are."""
        return saved

    def _scores(self, q: Array, keys: Array, block: _Block) -> Array:
        own = q[:, :, block.queries] * self.width**-0.5
        scores = matmul(own, transposed(keys[:, :, block.keys]))
        if block.diagonal:
            size = scores.shape[-1]
            hidden = np.triu(np.full((size, size), -np.inf, np.float32), 1)
            scores += move_to(hidden, scores, scores.dtype)
        return scores

    def _check(self, x: Array) -> None:
        """Refuse a length that cannot be divided, before anything is sent."""
        context: Any = self.context
        length, pieces = x.shape[1], context.pieces(context.comm.rank)
        if length % len(pieces):
            raise ArgumentError(
                f"the input of {self.key.name} has {length} positions on each of "
                f"{context.comm.world_size} context-parallel ranks; zigzag needs an even number"
            )

    def _blocks(self, x: Array, source: int) -> Iterator[_Block]:
        """Yield the blocks of this rank's queries with the keys of another rank."""
        context: Any = self.context
        own, other = context.pieces(context.comm.rank), context.pieces(source)
        size = x.shape[1] // len(own)
        for i, j, diagonal in context.blocks(context.comm.rank, source):
            queries, keys = (slice(at * size, (at + 1) * size) for at in (i, j))
            keep = self._keep(x, own[i] * size, other[j] * size, size)
            yield _Block(queries, keys, diagonal, keep)

    def _keep(self, x: Array, query: int, key: int, size: int) -> Array | None:
        """Return which weights of a block are kept: those that one rank would keep."""
        own, length = self.heads // self.ranks, x.shape[1] * self.context.comm.world_size
        whole = np.broadcast_to(np.zeros((), bool), (x.shape[0], own, length, length))
        heads = span(own, self.comm)
        more = [slice(query, query + size), slice(key, key + size)]
        keep = draw_mask(whole, self.key, self.drop, self.cursor, self.heads, heads, more)
        return None if keep is None else move_to(keep, x)

    def _round(
        self, own: Sequence[Array], home: bool = False
    ) -> Iterator[tuple[int, tuple[Array, ...], _Shift]]:
        """Yield the arrays of each rank, first one's own, while the next ones are on their way.

        With `home` also what their rank gets back, zeros at first: the receiver adds to it before
        it goes on. After the last step it is that of this rank, once it has landed.
        """
        context: Any = self.context
        n, rank, xp = context.comm.world_size, context.comm.rank, namespace(own[0])
        back = tuple(xp.zeros_like(widen(part)) for part in own) if home else ()
        parts, landing = tuple(own), _Shift(context, back, moves=False)
        following = landing
        try:
            for step in range(n):
                if step < n - 1:
                    following = _Shift(context, parts, tag=0)
                yield (rank - step) % n, parts, landing
                if home and n > 1:
                    landing.move_on(tag=1)
                parts = following.wait() if step < n - 1 else parts
        except BaseException:  # of this rank, in the attention or in a transfer
            following.forget()
            landing.forget()
            raise


class _Shift:
    """Arrays of one shape on their way to the next rank, and those of the one before."""

    def __init__(
        self, context: Context, parts: tuple[Array, ...], tag: int = 0, moves: bool = True
    ) -> None:
        self._comm: Any = context.comm
        self._parts, self._works = parts, tuple[Any, ...]()
        if moves:
            self.move_on(tag)

    def move_on(self, tag: int) -> None:
        """Send the arrays to the next rank, in exchange for those of the one before."""
        parts = self.wait()
        xp, n, rank = namespace(parts[0]), self._comm.world_size, self._comm.rank
        out = xp.concatenate([xp.reshape(part, (-1,)) for part in parts])
        into = xp.reshape(xp.empty_like(out), (len(parts), *parts[0].shape))
        self._works = (
            self._comm.irecv(xp.reshape(into, (-1,)), (rank - 1) % n, tag),
            self._comm.isend(out, (rank + 1) % n, tag),
        )
        self._parts = tuple(into[i, ...] for i in range(len(parts)))

    def wait(self) -> tuple[Array, ...]:
        """Return the arrays once they are here, and this rank's own have left."""
        for work in self._works:
            work.wait()
        self._works = ()
        return self._parts

    def forget(self) -> None:
        """Receive nothing any more, after an error."""
        for work in self._works[:1]:
            work.forget()
        self._works = ()
