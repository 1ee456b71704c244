"""Routes of a mixture of experts between ranks of one host: they read rows where these are.

A rank copies its rows, once for all their routes, into symmetric memory, with the experts of the
routes. With one exchange of a few numbers the others know where they are; then every rank reads
just the rows that it wants, straight into the result, or into the sum.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from pycoll import _C
from pycoll.errors import ArgumentError, MismatchError
from pycoll.torch.backend.group import ProcessGroupPycoll
from pycoll.torch.inference.route_sums import add_up, check_results, check_routes, no_expert, wide
from pycoll.torch.operations.ragged import Use
from pycoll.torch.tensors.layout import DTYPES, code, source
from pycoll.types import type_name

_COLUMNS = _C.ROUTE_COLUMNS  # of a rank's row, before the counts of its experts
_ROW_BYTES = 3
_ADDED_BY_KERNEL = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


@dataclass(frozen=True)
class SharedRoutes:
    """The routes of one dispatch; rows are ``[rows, hidden]``.

    Attributes:
        group: The group that they go through.
        experts: ``[tokens * k]``, int64: of this rank's routes.
        num_experts: E.
        places: Where their results are: pairs of a rank and one of the rows that it has got.
        counts: ``[E / n]``: how many rows each expert of this rank gets.
        tokens: How many tokens this rank has, and experts a token.
    """

    group: ProcessGroupPycoll
    experts: torch.Tensor
    num_experts: int
    places: torch.Tensor
    counts: torch.Tensor
    tokens: tuple[int, int]

    def there(self, x: torch.Tensor) -> torch.Tensor:
        """Send every token to its experts, and return what this rank's experts get."""
        return self._again(x, self.tokens[1])

    def there_each(self, rows: torch.Tensor) -> torch.Tensor:
        """Send a row for each route, and return what this rank's experts get."""
        return self._again(rows, 1)

    def _again(self, rows: torch.Tensor, per_row: int) -> torch.Tensor:
        given, shown = source(rows, "x"), (per_row, self.experts, self.num_experts)
        return self.group.show_made(
            "dispatch",
            lambda: _show(self.group, given, *shown),
            lambda table: _gathered(self.group, table, given, None),
        )

    def back(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the results for this rank's routes, ``[tokens, k, hidden]``."""
        given = source(rows, "y")

        def use(table: np.ndarray) -> torch.Tensor:
            out = given.new_empty((*self.tokens, given.shape[1]))
            places, count = self.places.data_ptr(), len(self.experts)
            _C.fetch_routes(self.group.heap, table, places, count, out.data_ptr())
            return out

        return self._shown(given, use)

    def total(self, rows: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
        """Return the weighted sum of the results of each token, ``[tokens, hidden]``."""
        if rows.dtype not in _ADDED_BY_KERNEL:
            return add_up(self.back(rows), weights).to(rows.dtype)
        given = source(rows, "y")
        if weights is None:
            weights = given.new_ones(self.tokens)
        factors = source(weights.cpu(), "weights").to(wide(given.dtype))

        def use(table: np.ndarray) -> torch.Tensor:
            out = given.new_empty((self.tokens[0], given.shape[1]))
            inputs = int(DTYPES[given.dtype]), self.places.data_ptr(), factors.data_ptr()
            shape = *self.tokens, given.shape[1]
            _C.sum_routes(self.group.heap, table, *inputs, *shape, out.data_ptr())
            return out

        return self._shown(given, use)

    def _shown(self, rows: torch.Tensor, use: Use) -> torch.Tensor:
        """Show the results of this rank's experts, and use those of all ranks."""

        def make() -> tuple[torch.Tensor, Any]:
            check_results(rows, int(self.counts.sum()))
            return _show(self.group, rows, 1, None, 0)

        return self.group.show_made("combine", make, lambda table: use(_alike(table, "y")))


def by_shared_memory(
    group: ProcessGroupPycoll,
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    num_experts: int,
) -> tuple[SharedRoutes, torch.Tensor]:
    """Send every token to its experts; return the routes, and what this rank's experts get."""
    n, rank = group.size(), group.rank()
    found: list[SharedRoutes] = []
    experts = torch.empty(0, dtype=torch.int64)

    def make() -> tuple[torch.Tensor, Any]:
        nonlocal x, experts
        check_routes(x, ids, weights, num_experts, n)
        x, experts = source(x, "x"), source(ids.cpu(), "topk_ids").reshape(-1).long()
        return _show(group, x, ids.shape[1], experts, num_experts)

    def use(table: np.ndarray) -> torch.Tensor:
        places = torch.empty(2 * len(experts), dtype=torch.int32)
        rows = _gathered(group, table, x, places)
        counts = torch.from_numpy(_of_rank(table, rank).sum(0))
        shape = ids.shape[0], ids.shape[1]
        found.append(SharedRoutes(group, experts, num_experts, places, counts, shape))
        return rows

    return group.show_made("dispatch", make, use), found[0]


def _show(
    group: ProcessGroupPycoll,
    rows: torch.Tensor,
    per_row: int,
    experts: torch.Tensor | None,
    num_experts: int,
) -> tuple[torch.Tensor, Any]:
    """Put rows, and the experts of their routes, where all ranks reach them."""
    width = rows.shape[1] * rows.element_size()
    if not width or not rows.is_cpu:
        raise ArgumentError(
            f"rows of shape {list(rows.shape)} on {rows.device}; expected some elements in each, "
            "on the CPU as on the other ranks"
        )
    block = group.block(_C.shown_bytes(len(rows), per_row, width))
    own = np.empty(_COLUMNS + num_experts, np.int64)
    own[1:_COLUMNS] = len(rows), per_row, width, code(rows.dtype)
    chosen = 0 if experts is None else experts.data_ptr()
    if not _C.show_routes(group.heap, block.ctypes.data, rows.data_ptr(), chosen, own):
        raise no_expert(num_experts)
    return torch.from_numpy(own).view(1, -1), block


def _gathered(
    group: ProcessGroupPycoll, table: np.ndarray, x: torch.Tensor, places: torch.Tensor | None
) -> torch.Tensor:
    """Return the rows of this rank's experts, and fill in where results of its routes will be."""
    rank = group.rank()
    out = x.new_empty((int(_of_rank(_alike(table, "x"), rank).sum()), x.shape[1]))
    where = 0 if places is None else places.data_ptr()
    _C.gather_routes(group.heap, table, rank, out.data_ptr(), where)
    return out


def _of_rank(table: np.ndarray, rank: int) -> np.ndarray:
    """Return how many rows the experts of a rank get from each rank, ``[n, E / n]``."""
    each = (table.shape[1] - _COLUMNS) // len(table)
    return table[:, _COLUMNS + rank * each : _COLUMNS + (rank + 1) * each]


def _alike(table: np.ndarray, what: str) -> np.ndarray:
    """Return a table of rows of one size and type; all ranks see one that is not."""
    form = table[:, _ROW_BYTES:_COLUMNS]
    if (form != form[0]).any():
        said = ", ".join(
            f"rank {rank}: {width} bytes of {type_name(kind)}"
            for rank, (width, kind) in enumerate(form.tolist())
        )
        raise MismatchError(f"rows of {what} differ between the ranks: {said}")
    return table
