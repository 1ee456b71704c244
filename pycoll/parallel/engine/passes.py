"""Forward and backward of one micro-batch; parameters are gathered just before they are needed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from pycoll.errors import ArgumentError
from pycoll.parallel.arrays import move_to
from pycoll.parallel.channels import Ledger, Pending
from pycoll.parallel.engine.failure import Failure
from pycoll.parallel.engine.offload import Kept
from pycoll.parallel.engine.options import Options
from pycoll.parallel.nn.layer import Loss
from pycoll.parallel.precision import cast
from pycoll.parallel.state.bucket import Bucket
from pycoll.parallel.state.gradients import Gradients, Term
from pycoll.parallel.state.layout import Entry, Unit

Sample = tuple[Any, Any]


class Samples(Protocol):
    """Micro-batches: a sequence of them, or what makes each when it is asked for."""

    def __len__(self) -> int:
        """Return how many there are."""
        ...

    def __getitem__(self, i: int, /) -> Sample:
        """Return ``(inputs, targets)`` of one."""
        ...


class _Input(NamedTuple):
    """The input of a layer that runs forward again in the backward pass."""

    x: Any


class Passes:
    """Runs the layers of a model.

    With replicated parameters a layer sees views of the buckets. With sharded ones, the buckets of
    a layer are gathered before it runs and freed after it; the next `prefetch` layers are gathered
    meanwhile, where possible into the vector of a gradient that is being reduced: the channel runs
    these calls one after the other. At most so many full vectors exist at once, gathered
    parameters and gradients together: 3 with stage 2, ``2 + prefetch`` with stage 3. Before there
    are more, reductions are waited for.

    Attributes:
        running: Name of the layer that runs, or ran last.
    """

    running: str = ""

    def __init__(
        self,
        units: Sequence[Unit],
        buckets: Sequence[Bucket],
        loss: Loss,
        options: Options,
        ledger: Ledger,
        kept: Kept | None = None,
        failure: Failure | None = None,
    ) -> None:
        self._store, self._failure = kept or Kept(), failure or Failure()
        self._units, self._buckets, self._loss = units, buckets, loss
        self._compute, self._ledger, self._wrap = options.recipe.compute, ledger, options.wrap
        how = options.recompute
        self._every = 1 if how == "full" else how if isinstance(how, int) else 0
        self._selective = how == "selective"
        self._prefetch = options.prefetch if options.zero == 3 else 0
        self._vectors = {2: 3, 3: 2 + options.prefetch}.get(options.zero)
        self._places: dict[str, tuple[Bucket, Entry]] = {
            entry.parameter.name: (bucket, entry)
            for bucket in buckets
            for entry in bucket.layout.entries
        }
        self._needs = [
            list(dict.fromkeys(self._places[name][0] for name in unit.names.values()))
            for unit in units
        ]
        self._kind = str(buckets[0].parameter.data.dtype) if buckets else ""
        self._forward = range(len(units))
        self._gathered: dict[Bucket, Pending] = {}
        self._lenders: dict[Bucket, Gradients] = {}

    def _acquire(self, order: Sequence[int], at: int) -> dict[str, Any]:
        """Return the parameters of the layer at place `at` of `order`, gathering those ahead."""
        unit = self._units[order[at]]
        self.running = unit.name
        params: dict[str, Any] = {}
        if not (unit.names or self._prefetch):
            return params
        self._gather(order, at)
        for local, name in unit.names.items():
            bucket, entry = self._places[name]
            view = entry.view(self._gathered[bucket].wait())
            if (lender := self._lenders.pop(bucket, None)) is not None:
                lender.land()
            small = cast(view, self._compute)
            params[local] = self._wrap(
                view if small is view else self._ledger.track(small, "compute")
            )
        return params

    def _gather(self, order: Sequence[int], at: int) -> None:
        """Start to gather for the layer at place `at` of `order`, and for those ahead."""
        for index in order[at : at + 1 + self._prefetch]:
            for bucket in self._needs[index]:
                if bucket not in self._gathered:
                    if bucket.scattered:
                        self._land()
                    if (lender := bucket.lender(self._buckets)) is not None:
                        self._lenders[bucket] = lender
                    self._gathered[bucket] = bucket.gather(lender)

    def _release(self, order: Sequence[int], at: int) -> None:
        """Free what the layer at place `at` has used, unless one of the next needs it."""
        if not (needs := self._needs[order[at]]):
            return
        ahead = order[at + 1 : at + 1 + max(1, self._prefetch)]
        for bucket in needs:
            if not any(bucket in self._needs[index] for index in ahead):
                self._gathered.pop(bucket, None)

    def _land(self) -> None:
        """Wait for reductions until there may be one more full vector."""
        if self._vectors is None:
            return
        flying = [b.gradients for b in self._buckets if b.gradients.in_flight]
        held = sum(bucket.scattered for bucket in self._gathered)
        for gradients in flying[: max(0, held + len(flying) + 1 - self._vectors)]:
            gradients.land()

    def prepare(self) -> None:
        """Start to gather for the first layers of a step."""
        self._gathered.clear()  # a step that failed may have left something
        self._lenders.clear()
        self._gather(self._forward, 0)

    def run(self, sample: Sample | None, scale: float) -> tuple[float, int, Any]:
        """Run the layers forward; return sum of losses, number of samples, the argument of `back`.

        None as sample runs no layer, but joins the collectives of the other ranks; so does the rest
        of a step in which a layer has failed. `scale` is the factor of the loss in the backward
        pass.
        """
        saved: list[Any] = []
        x = self._run_layers(None if sample is None else sample[0], saved, idle=sample is None)
        if self._every < 2:  # for the backward pass, while the loss is computed
            self._gather(self._forward[::-1], 0)
        if sample is not None and self._failure.error is None:
            with self._failure:
                total, count, dy = self.loss(x, sample[1], scale)
                return total, count, (dy, saved)
        return 0.0, 0, (None, saved)

    def forward(self, x: Any) -> tuple[Any, Any]:
        """Run the layers forward; return the output, and what both backward passes need."""
        saved: list[Any] = []
        return self._run_layers(x, saved), saved

    def loss(self, x: Any, targets: Any, scale: float) -> tuple[float, int, Any]:
        """Return the sum of losses, the number of samples, and the gradient of the output."""
        self.running = "loss"
        total, count, kept = self._loss.forward(x, self._on_device(targets))
        return float(total), int(count), self._loss.backward(kept, scale)

    def back_input(self, dy: Any, saved: list[Any], later: bool) -> tuple[Any, list[Any]]:
        """Run the layers backward to their input; return its gradient, and those of all outputs.

        `later` tells that `back_weight` does not come next.
        """
        order, gradients = self._forward[::-1], []
        keep = self._store.put if later else self._store.stay
        for at, index in enumerate(order):
            self._restore(saved, index)
            kept, counted = self._fetched(saved, index)
            params = self._acquire(order, at)
            gradients.append(keep(dy))
            unit = self._units[index]
            kept, counted = self._again(unit, params, kept, counted)
            dy = unit.layer.backward_input(params, kept, dy)
            saved[index] = keep(kept)
            del params, kept, counted
            self._release(order, at)
        return dy, gradients[::-1]

    def _fetched(self, saved: list[Any], index: int) -> tuple[Any, Any]:
        """Take out what a layer has kept, while that of the one below is on its way to memory.

        Returns:
            It, and what it counts by until it is used up.
        """
        packed, saved[index] = saved[index], None
        if type(self._store) is Kept:
            return packed, packed
        self._store.fetch(packed)
        below = (kept for kept in saved[:index][::-1] if kept is not None)
        self._store.fetch(next(below, None))
        return self._store.take(packed), packed

    def _again(
        self, unit: Unit, params: dict[str, Any], kept: Any, counted: Any
    ) -> tuple[Any, Any]:
        """Compute what the backward pass of a layer needs, if only its input was kept."""
        if not isinstance(kept, _Input):
            return kept, counted
        kept = unit.layer.forward(params, kept.x)[1]
        return kept, self._store.stay(kept)

    def _restore(self, saved: list[Any], index: int, idle: bool = False) -> None:
        """Run a group of layers forward again before the backward pass comes to its last one."""
        k, layers = self._every, len(self._units)
        if k < 2 or not (index == layers - 1 or (index + 1) % k == 0):
            return
        first = index - index % k
        order = [*range(first, index + 1), *range(index, -1, -1)]  # what is gathered ahead, too
        x = None if idle else self._store.take(saved[first]).x
        for at in range(index + 1 - first):
            params = self._acquire(order, at)
            if not idle and self._failure.error is None:
                with self._failure:
                    x, kept = self._units[first + at].layer.forward(params, x)
                    saved[first + at] = self._store.stay(kept)
                    del kept
            del params
            self._release(order, at)

    def _reduced(self, layer: Any, index: int, x: Any, kept: Any) -> Any:
        """Return what to keep of the forward pass of a layer."""
        if self._every:
            return None if index % self._every else _Input(x)
        forget = getattr(layer, "forget", None) if self._selective else None
        return kept if forget is None else forget(kept)

    def begin(self, term: Term, last: bool) -> None:
        """Expect the gradients of a micro-batch."""
        for bucket in self._buckets:
            bucket.gradients.begin(term, last)

    def back_weight(self, saved: list[Any], gradients: list[Any]) -> None:
        """Run the rest of the backward pass: gradients of parameters go to the buckets."""
        order = self._forward[::-1]
        for at, index in enumerate(order):
            kept, counted = self._fetched(saved, index)
            saved.pop()
            whole = gradients.pop()
            dy = self._store.take(whole)
            unit, params = self._units[index], self._acquire(order, at)
            self._land()
            found, placed = self._weights(unit, params, kept, dy)
            del params, kept, dy, counted, whole
            self._release(order, at)
            self._deliver(unit, found, placed)

    def predict(self, x: Any) -> Any:
        """Run the layers forward and return the output of the last; raise what a layer has."""
        self.prepare()
        self._failure.take()
        y = self._run_layers(x)
        if error := self._failure.take():
            raise error
        return y

    def _run_layers(self, x: Any, saved: list[Any] | None = None, idle: bool = False) -> Any:
        if not idle:  # real numbers in the type of the first layer
            with self._failure:
                x = self._on_device(cast(x, self._compute or self._kind))
        for at in self._forward:
            params = self._acquire(self._forward, at)
            if not idle and self._failure.error is None:
                with self._failure:
                    layer = self._units[at].layer
                    y, kept = layer.forward(params, x)
                    if saved is not None:
                        saved.append(self._store.put(self._reduced(layer, at, x, kept)))
                    x = y
                    del kept, y
            del params
            self._release(self._forward, at)
        return x

    def _on_device(self, x: Any) -> Any:
        """Return an array of NumPy on the device of the parameters, anything else as it is."""
        data = self._buckets[0].parameter.data if self._buckets else x
        if not isinstance(x, np.ndarray) or isinstance(data, np.ndarray):
            return x
        return self._wrap(move_to(x, data))

    def back(self, state: Any) -> None:
        """Run the layers backward; gradients go to the buckets as they arrive."""
        dy, saved = state
        order, failure = self._forward[::-1], self._failure
        for at, index in enumerate(order):
            unit, gradients, placed = self._units[index], dict[str, Any](), set[str]()
            self._restore(saved, index, idle=dy is None or failure.error is not None)
            params, kept, counted, dx = self._acquire(order, at), None, None, None
            if runs := dy is not None and failure.error is None:
                with failure:
                    kept, counted = self._again(unit, params, *self._fetched(saved, index))
                    saved.pop()
                    dx = unit.layer.backward_input(params, kept, dy)
            self._land()
            if runs and failure.error is None:
                with failure:
                    gradients, placed = self._weights(unit, params, kept, dy)
            dy = dx
            del params, kept, counted, dx
            self._release(order, at)
            self._deliver(unit, gradients, placed)

    def _deliver(self, unit: Unit, gradients: dict[str, Any], placed: set[str]) -> None:
        """Give a layer's gradients to their buckets, and keep none."""
        for local, name in reversed(unit.names.items()):
            whole = self._places[name][0].gradients
            whole.add(name, gradients.pop(local, None), local in placed)

    def _weights(
        self, unit: Unit, params: dict[str, Any], kept: Any, dy: Any
    ) -> tuple[dict[str, Any], set[str]]:
        """Return a layer's gradients that are not in their buckets, and names of the others."""
        layer: Any = unit.layer
        out = {}
        if unit.takes_out:
            for local, name in unit.names.items():
                view = self._places[name][0].gradients.place(name)
                if view is not None:
                    out[local] = self._wrap(view)
            gradients = layer.backward_weight(params, kept, dy, out=out)
        else:
            gradients = layer.backward_weight(params, kept, dy)
        if gradients is None and unit.names:  # a forgotten return, and it would never learn
            raise ArgumentError(
                f"layer {unit.name} gave None as its gradients; expected a dict, by name"
            )
        if not gradients:
            return {}, set()
        if unknown := sorted(set(gradients) - set(unit.names)):
            raise ArgumentError(
                f"layer {unit.name} gave gradients of {', '.join(unknown)}, which are not among "
                f"its parameters: {', '.join(unit.names) or 'none'}"
            )
        for local, gradient in gradients.items():
            name = unit.names[local]
            self._places[name][0].gradients.check(name, gradient)
        placed = {local for local, array in out.items() if gradients.get(local) is array}
        rest = {
            local: self._ledger.track(
                move_to(gradient, self._buckets[0].parameter.data), "layer gradient"
            )
            for local, gradient in gradients.items()
            if local not in placed
        }
        return rest, placed
