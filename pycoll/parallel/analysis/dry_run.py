"""A step without arrays: what `passes` and `gradients` allocate, free and send, in their order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from pycoll.parallel.analysis.ledger import VOLUME
from pycoll.parallel.engine.accumulate import Turn, turns
from pycoll.parallel.engine.options import Options
from pycoll.parallel.engine.precision import dtype_of
from pycoll.parallel.state.layout import Layout, Unit


class _Flat:
    """The gradient of one bucket: sums kept, and a reduction in flight."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.sums = 0
        self.started = False
        self.flight: tuple[int, Turn] | None = None  # its bytes, but for those that are lent
        self.lent = False
        self.waiting: dict[str, int] = {}


class DryRun:
    """Counts bytes beyond those at rest.

    Attributes:
        peak: Largest number of bytes at once.
        wire: Bytes sent, by purpose.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        layouts: Sequence[Layout],
        options: Options,
        axes: Mapping[str, int],
    ) -> None:
        self.peak = self._live = 0
        self.wire: Counter[str] = Counter()
        self._units, self._options = units, options
        self._n, self._replicas, self._tensor = (axes.get(a, 1) for a in ("dp", "replica", "tp"))
        recipe = options.recipe
        self._item = dtype_of(recipe.parameter).itemsize
        self._grad = dtype_of(recipe.gradient).itemsize
        self._compute = dtype_of(recipe.compute or recipe.parameter).itemsize
        self._lends = recipe.parameter == recipe.gradient
        self._casts = recipe.compute not in ("", recipe.parameter)
        self._prefetch = options.prefetch if options.zero == 3 else 0
        self._vectors = {2: 3, 3: 2 + options.prefetch}.get(options.zero)
        self._flats = [_Flat(layout) for layout in layouts]
        self._places = {
            entry.parameter.name: (flat, entry.parameter)
            for flat in self._flats
            for entry in flat.layout.entries
        }
        self._gathered: dict[int, int] = {}  # by bucket, how many bytes
        self._lenders: dict[int, _Flat] = {}

    def _add(self, nbytes: int) -> int:
        self._live += nbytes
        self.peak = max(self.peak, self._live)
        return nbytes

    def step(self, k: int) -> None:
        """Walk through a step of k micro-batches."""
        plan = turns(k, self._options.order)
        forward = range(len(self._units))
        for j, turn in enumerate(plan):
            for at in forward:
                copies = self._acquire(forward, at)
                self._live -= copies
                self._release(forward, at)
            self._start(forward[::-1], 0)
            for flat in self._flats:
                flat.started = False
                flat.waiting = {e.parameter.name: e.parameter.uses for e in flat.layout.entries}
            self._back(turn, j == len(plan) - 1)
        for flat in self._flats:
            self._land(flat)
            size = self._grad * flat.layout.padded
            if self._options.zero:
                size //= self._n
            self._send("replica gradient", "all_reduce", self._replicas, size)
            if self._options.zero in (1, 2):
                whole = self._item * flat.layout.padded
                self._send("parameter", "all_gather", self._n, whole)

    def _send(self, purpose: str, collective: str, n: int, nbytes: int) -> None:
        self.wire[purpose] += VOLUME[collective](n, nbytes) if n > 1 else 0

    def _needs(self, unit: Unit) -> list[_Flat]:
        return list({id(f): f for f, _ in map(self._places.get, unit.names.values())}.values())

    def _size(self, unit: Unit) -> int:
        return sum(self._places[name][1].size for name in unit.names.values())

    def _start(self, order: Sequence[int], at: int) -> None:
        """Gather parameters, into gradients in flight where they fit."""
        if self._options.zero < 3 or self._n == 1:
            return
        for index in order[at : at + 1 + self._prefetch]:
            for flat in self._needs(self._units[index]):
                if id(flat) not in self._gathered:
                    self._land_some()
                    whole = flat.layout.padded * self._item
                    self._gathered[id(flat)] = self._borrow(flat, whole) or self._add(whole)
                    self._send("parameter", "all_gather", self._n, whole)

    def _borrow(self, bucket: _Flat, nbytes: int) -> int:
        """Take over the vector of a gradient in flight if it is large enough; return its bytes."""
        for flat in self._flats if self._lends else []:
            size = flat.layout.padded * self._grad
            if flat.flight is not None and not flat.lent and size >= nbytes:
                flat.lent, flat.flight = True, (flat.flight[0] - size, flat.flight[1])
                self._lenders[id(bucket)] = flat
                return size
        return 0

    def _land_some(self) -> None:
        """Land reductions until there may be one more full vector."""
        if self._vectors is not None:
            flying = [flat for flat in self._flats if flat.flight is not None and not flat.lent]
            for flat in flying[: max(0, len(self._gathered) + len(flying) + 1 - self._vectors)]:
                self._land(flat)

    def _acquire(self, order: Sequence[int], at: int) -> int:
        """Gather parameters; return the bytes of converted copies."""
        self._start(order, at)
        unit = self._units[order[at]]
        for flat in self._needs(unit):
            if (lender := self._lenders.pop(id(flat), None)) is not None:
                self._land(lender)
        return self._add(self._size(unit) * self._compute) if self._casts else 0

    def _release(self, order: Sequence[int], at: int) -> None:
        ahead = order[at + 1 : at + 1 + max(1, self._prefetch)]
        wanted = {id(flat) for index in ahead for flat in self._needs(self._units[index])}
        for flat in self._needs(self._units[order[at]]):
            if id(flat) not in wanted:
                self._live -= self._gathered.pop(id(flat), 0)

    def _back(self, turn: Turn, last: bool) -> None:
        order = range(len(self._units) - 1, -1, -1)
        for at, index in enumerate(order):
            unit = self._units[index]
            copies = self._acquire(order, at)
            self._land_some()
            for name in unit.names.values():
                if self._in_place(unit, name, turn):
                    self._store(self._places[name][0], turn)
                else:
                    self._add(self._places[name][1].size * self._compute)
            self._live -= copies
            self._release(order, at)
            for flat in {id(f): f for f in self._reversed_needs(unit)}.values():
                self._hand_over(unit, flat, turn, last)

    def _in_place(self, unit: Unit, name: str, turn: Turn) -> bool:
        """Tell whether a layer writes a gradient into its bucket."""
        adds = turn.add and self._options.zero < 2
        return unit.takes_out and not adds and self._places[name][1].uses == 1

    def _reversed_needs(self, unit: Unit) -> list[_Flat]:
        return [self._places[name][0] for name in reversed(unit.names.values())]

    def _hand_over(self, unit: Unit, flat: _Flat, turn: Turn, last: bool) -> None:
        for name in reversed(unit.names.values()):
            place, parameter = self._places[name]
            if place is not flat:
                continue
            flat.waiting[name] -= 1
            if flat.waiting[name] == 0:
                self._store(flat, turn)
                if not any(flat.waiting.values()):
                    self._whole(flat, turn, last)
            if not self._in_place(unit, name, turn):
                self._live -= parameter.size * self._compute

    def _store(self, flat: _Flat, turn: Turn) -> None:
        if flat.started:
            return
        flat.started = True
        if self._options.zero >= 2:
            self._add(flat.layout.padded * self._grad)
        else:
            self._begin(flat, turn, flat.layout.padded * self._grad)

    def _begin(self, flat: _Flat, turn: Turn, nbytes: int) -> None:
        if not turn.add:
            self._add(nbytes if flat.sums else 0)
            flat.sums += 1

    def _end(self, flat: _Flat, turn: Turn, nbytes: int) -> None:
        flat.sums -= turn.merges
        self._live -= turn.merges * nbytes

    def _whole(self, flat: _Flat, turn: Turn, last: bool) -> None:
        whole = flat.layout.padded * self._grad
        shard = whole // self._n
        if self._options.zero > 1 or last:
            for parameter in (entry.parameter for entry in flat.layout.entries):
                nbytes = parameter.size * self._grad * parameter.spec.sequence
                self._send("sequence", "all_reduce", self._tensor, nbytes)
        if self._options.zero < 2:
            self._end(flat, turn, whole)
            if last:
                flat.sums = 0
                kind = "reduce_scatter" if self._options.zero else "all_reduce"
                self._send("gradient", kind, self._n, whole)
            return
        self._land(flat)
        self._begin(flat, turn, shard)
        flat.flight = (whole + self._add(shard if turn.add else 0), turn)
        self._send("gradient", "reduce_scatter", self._n, whole)

    def _land(self, flat: _Flat) -> None:
        if flat.flight is None:
            return
        nbytes, turn = flat.flight
        flat.flight, flat.lent = None, False
        self._live -= nbytes
        self._end(flat, turn, flat.layout.padded * self._grad // self._n)
