"""Error feedback: what a compressing hook did not send is added to the next gradient."""

from __future__ import annotations

from typing import Any

import numpy as np

from pycoll.errors import ArgumentError
from pycoll.parallel.channels import Channel, Pending
from pycoll.parallel.settings import describe
from pycoll.parallel.state.hook import Hook
from pycoll.parallel.state.layout import Layout
from pycoll.parallel.state.placement import own_block


class ErrorFeedback(Hook):
    """Base class of hooks that send part of a gradient now and the rest later.

    A hook keeps float32 or float64 arrays by table and name; the first table has what is unsent of
    each bucket. Arrays made in a step count once all ranks agree that the step is taken: otherwise
    a rank that found an infinity in its part of a layer would go on with other arrays than a rank
    with another part.
    """

    stages: tuple[int, ...] = (0, 1, 2)
    devices: tuple[str, ...] = ("cpu",)

    def __init__(self, *tables: str) -> None:
        self._unsent, *_ = tables
        self._tables: dict[str, dict[str, Any]] = {table: {} for table in tables}
        self._next: dict[tuple[str, str], Any] = {}

    def _get(self, table: str, name: str) -> Any:
        """Return an array of this step, or of the last one taken; None at first."""
        return self._next.get((table, name), self._tables[table].get(name))

    def _put(self, table: str, name: str, array: Any) -> None:
        """Keep an array if the step is taken."""
        self._next[table, name] = array

    def _add_unsent(self, key: str, data: Any, channel: Channel) -> Any:
        """Return a gradient plus what is unsent of its bucket, as a new array."""
        error = self._get(self._unsent, key)
        if error is None:
            error = np.zeros_like(data)
        if (error.shape, error.dtype) != (data.shape, data.dtype):
            raise ArgumentError(
                f"{type(self).__name__} was given {error.dtype}{list(error.shape)} as what is "
                f"unsent of the bucket of {key}, which is {data.dtype}{list(data.shape)}; a saved "
                '"hook" fits the same mesh, bucket_bytes and precision only: drop it'
            )
        return channel.ledger.track(error + data, "hook")

    def reduce_scatter(
        self, key: str, data: Any, out: Any, layout: Layout, channel: Channel, order: str
    ) -> Pending:
        """Reduce a bucket on every rank, then take this rank's block; see `Hook.reduce_scatter`.

        It sends the bytes of `Hook.all_reduce`; with stage 2, once for each micro-batch.
        """

        def take_block(total: Any) -> Any:
            out[...] = own_block(total, channel.rank, channel.world_size)
            return out

        return self.all_reduce(key, data, layout, channel, order).then(take_block)

    def begin(self, factor: float) -> None:
        """Drop what no step has taken, and give what is unsent the scale of the next gradients.

        What becomes too large for its type stays the largest number. An infinity would stay
        forever, and every later step would be skipped; the largest number falls with the loss
        scale. ``factor`` is as in `Hook.begin`.
        """
        self._next.clear()
        for array in self._tables[self._unsent].values() if factor != 1 else ():
            limit = np.finfo(array.dtype).max
            with np.errstate(over="ignore"):
                array *= array.dtype.type(factor)
            np.clip(array, -limit, limit, out=array)

    def settle(self) -> None:
        """Keep what this step has made; see `Hook.settle`."""
        for (table, name), array in self._next.items():
            self._tables[table][name] = array
        self._next.clear()

    def state(self) -> dict[str, Any]:
        """Return copies of all arrays, named ``"table name"``."""
        return {
            f"{table} {name}": array.copy()
            for table, arrays in self._tables.items()
            for name, array in arrays.items()
        }

    def load(self, state: dict[str, Any]) -> None:
        """Take what `state` gave on this rank.

        Raises:
            ArgumentError: If it is that of another hook, or of one with other settings.
        """
        tables: dict[str, dict[str, Any]] = {table: {} for table in self._tables}
        for key, x in state.items():
            table, _, name = key.partition(" ")
            array = np.array(x)
            if table not in tables or not self._fits(table, array):
                raise ArgumentError(f"{key} {list(array.shape)} is not of {describe(self)}")
            tables[table][name] = array
        self._tables = tables

    def _fits(self, table: str, array: Any) -> bool:
        """Tell whether a saved array can be one of a table."""
        return True
