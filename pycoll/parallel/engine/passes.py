"""Forward and backward of one micro-batch, with parameters there just when they are needed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from pycoll.errors import ArgumentError
from pycoll.parallel.analysis.ledger import Ledger, Pending
from pycoll.parallel.arrays import brought
from pycoll.parallel.engine.gradients import Gradients
from pycoll.parallel.engine.precision import cast
from pycoll.parallel.nn.layer import Loss
from pycoll.parallel.state.bucket import Bucket
from pycoll.parallel.state.layout import Entry, Unit

Sample = tuple[Any, Any]


class Passes:
    """Runs the layers of a model.

    With replicated parameters a layer sees views of the buckets. With sharded ones, the buckets of
    a layer are gathered before it runs, and given back after; the next `prefetch` layers are
    gathered meanwhile, where possible into the vector of a gradient that is being reduced: the
    channel does one after the other. Never more than `vectors` full vectors exist at once, gathered
    parameters and gradients together (None: any number); before there are more, reductions land.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        buckets: Sequence[Bucket],
        loss: Loss,
        compute: str,
        prefetch: int,
        vectors: int | None,
        ledger: Ledger,
        wrap: Callable[[Any], Any],
    ) -> None:
        self._units, self._buckets, self._loss = units, buckets, loss
        self._compute, self._prefetch, self._vectors = compute, prefetch, vectors
        self._ledger, self._wrap = ledger, wrap
        self._places: dict[str, tuple[Bucket, Entry]] = {
            entry.parameter.name: (bucket, entry)
            for bucket in buckets
            for entry in bucket.layout.entries
        }
        self._needs = [self._buckets_of(unit) for unit in units]
        self._gathered: dict[int, Pending] = {}
        self._lenders: dict[int, Gradients] = {}

    def _buckets_of(self, unit: Unit) -> list[Bucket]:
        found = {id(self._places[name][0]): self._places[name][0] for name in unit.names.values()}
        return list(found.values())

    def _acquire(self, order: Sequence[int], at: int) -> dict[str, Any]:
        """Return the parameters of the layer at place `at` of `order`, gathering those ahead."""
        self._start(order, at)
        params = {}
        for local, name in self._units[order[at]].names.items():
            bucket, entry = self._places[name]
            view = bucket.view(self._gathered[id(bucket)].wait(), entry)
            if (lender := self._lenders.pop(id(bucket), None)) is not None:
                lender.land()
            small = cast(view, self._compute)
            params[local] = self._wrap(
                view if small is view else self._ledger.track(small, "compute")
            )
        return params

    def _start(self, order: Sequence[int], at: int) -> None:
        """Start to gather for the layer at place `at` of `order`, and for those ahead."""
        for index in order[at : at + 1 + self._prefetch]:
            for bucket in self._needs[index]:
                if id(bucket) not in self._gathered:
                    if bucket.scattered:
                        self._land()
                    if (lender := bucket.lender(self._buckets)) is not None:
                        self._lenders[id(bucket)] = lender
                    self._gathered[id(bucket)] = bucket.gather(lender)

    def _release(self, order: Sequence[int], at: int) -> None:
        """Give back what the layer at place `at` has used, unless one just ahead wants it."""
        ahead = order[at + 1 : at + 1 + max(1, self._prefetch)]
        wanted = {id(bucket) for index in ahead for bucket in self._needs[index]}
        for bucket in self._needs[order[at]]:
            if id(bucket) not in wanted:
                self._gathered.pop(id(bucket), None)

    def prepare(self) -> None:
        """Start to gather for the first layers of a step."""
        self._gathered.clear()  # a step that failed may have left something
        self._lenders.clear()
        self._start(range(len(self._units)), 0)

    def run(self, sample: Sample | None, scale: float) -> tuple[float, int, Any]:
        """Run the layers forward.

        Args:
            sample: Inputs and targets; None runs no layer, but moves what the other ranks need.
            scale: Factor of the loss in the backward pass.

        Returns:
            Sum of losses, number of samples, and what `back` needs.
        """
        order = range(len(self._units))
        saved: list[Any] = []
        x = None if sample is None else self._input(sample[0])
        for at, index in enumerate(order):
            params = self._acquire(order, at)
            if sample is not None:
                x, kept = self._units[index].layer.forward(params, x)
                saved.append(kept)
            del params
            self._release(order, at)
        self._start(order[::-1], 0)  # of the backward pass, beside the loss
        if sample is None:
            return 0.0, 0, (None, saved)
        total, count, kept = self._loss.forward(x, self._on_device(sample[1]))
        return float(total), int(count), (self._loss.backward(kept, scale), saved)

    def _input(self, x: Any) -> Any:
        """Return what the first layer gets: real numbers in its type, on its device."""
        kind = str(self._buckets[0].parameter.data.dtype) if self._buckets else ""
        return self._on_device(cast(x, self._compute or kind))

    def _on_device(self, x: Any) -> Any:
        """Return an array of NumPy on the device of the parameters, anything else as it is."""
        data = self._buckets[0].parameter.data if self._buckets else x
        if not isinstance(x, np.ndarray) or isinstance(data, np.ndarray):
            return x
        return self._wrap(brought(x, data))

    def predict(self, x: Any) -> Any:
        """Run the layers forward and return the output of the last."""
        self.prepare()
        order = range(len(self._units))
        x = self._input(x)
        for at, index in enumerate(order):
            x, _ = self._units[index].layer.forward(self._acquire(order, at), x)
            self._release(order, at)
        return x

    def back(self, state: Any) -> None:
        """Run the layers backward; gradients go to the buckets as they arrive."""
        dy, saved = state
        order = range(len(self._units) - 1, -1, -1)
        for at, index in enumerate(order):
            unit, gradients = self._units[index], {}
            params, placed = self._acquire(order, at), set()
            if dy is not None:
                kept = saved.pop()
                dx = unit.layer.backward_input(params, kept, dy)
                gradients, placed = self._weights(unit, params, kept, dy)
                dy = dx
                del kept, dx
            else:
                self._land()
            del params
            self._release(order, at)
            self._hand_over(unit, gradients, placed)

    def _weights(
        self, unit: Unit, params: dict[str, Any], kept: Any, dy: Any
    ) -> tuple[dict[str, Any], set[str]]:
        """Return the gradients of a layer by name, and which of them are in their buckets."""
        self._land()
        if not unit.takes_out:
            gradients = unit.layer.backward_weight(params, kept, dy)
            return self._checked(unit, gradients, set()), set()
        views = {
            local: self._places[name][0].gradients.place(name) for local, name in unit.names.items()
        }
        out = {local: self._wrap(view) for local, view in views.items() if view is not None}
        layer: Any = unit.layer
        gradients = layer.backward_weight(params, kept, dy, out=out)
        placed = {local for local, array in out.items() if gradients.get(local) is array}
        return self._checked(unit, gradients, placed), placed

    def _checked(self, unit: Unit, gradients: dict[str, Any], placed: set[str]) -> dict[str, Any]:
        """Return the gradients that are not in their buckets, as arrays like these, counted."""
        unknown = sorted(set(gradients) - set(unit.names))
        if unknown:
            raise ArgumentError(
                f"layer {unit.name} gave gradients of {', '.join(unknown)}, which are not among "
                f"its parameters: {', '.join(unit.names) or 'none'}"
            )
        like = self._buckets[0].parameter.data if gradients else None
        return {
            local: self._ledger.track(brought(gradient, like), "layer gradient")
            for local, gradient in gradients.items()
            if local not in placed
        }

    def _land(self) -> None:
        """Wait for reductions until there may be one more full vector."""
        if self._vectors is None:
            return
        flying = [b.gradients for b in self._buckets if b.gradients.in_flight]
        held = sum(b.scattered and id(b) in self._gathered for b in self._buckets)
        for gradients in flying[: max(0, held + len(flying) + 1 - self._vectors)]:
            gradients.land()

    def _hand_over(self, unit: Unit, gradients: dict[str, Any], placed: set[str]) -> None:
        for bucket, names in _by_bucket(unit, self._places):
            for local, name in names:
                gradient = gradients.pop(local, None)
                bucket.gradients.add(name, gradient, local in placed)


def _by_bucket(
    unit: Unit, places: dict[str, tuple[Bucket, Entry]]
) -> Iterable[tuple[Bucket, list[tuple[str, str]]]]:
    """Yield the parameters of a unit by bucket, in the order in which buckets are reduced."""
    found: dict[int, tuple[Bucket, list[tuple[str, str]]]] = {}
    for local, name in reversed(unit.names.items()):
        bucket = places[name][0]
        found.setdefault(id(bucket), (bucket, []))[1].append((local, name))
    return list(found.values())
