"""The pipeline engine: runs a proven program, one stage on each rank of the mesh's ``pp`` axis.

It is the data-parallel engine with its layers divided among stages: every stage has the buckets of
its own layers, with any ZeRO stage, and the ranks of a stage reduce them as usual. Micro-batches go
from stage to stage as tagged messages, in the order that the proof has accepted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

from pycoll.errors import ArgumentError, MismatchError
from pycoll.parallel.engine.agreement import most_micro_batches
from pycoll.parallel.engine.data_parallel import DataParallel
from pycoll.parallel.engine.options import Options
from pycoll.parallel.engine.passes import Passes, Sample
from pycoll.parallel.mesh import Mesh
from pycoll.parallel.nn.layer import Loss, Model
from pycoll.parallel.pipeline.program import Op, Program, Schedule
from pycoll.parallel.pipeline.proof import prove
from pycoll.parallel.pipeline.registry import find
from pycoll.parallel.pipeline.transfers import Transfers
from pycoll.parallel.settings import refusal
from pycoll.parallel.state import values
from pycoll.parallel.state.bucket import Bucket
from pycoll.parallel.state.gradients import Sums, plan_sum
from pycoll.parallel.state.layout import Parameter, Unit


class Pipeline(DataParallel):
    """Trains a model whose layers are divided over the stages of a pipeline.

    ::

        mesh = Mesh(comm, dp=2, pp=2)
        engine = Pipeline(model, loss, mesh, schedule="1f1b", micro_batches=8, zero=1)
        for batch in batches:
            report = engine.step(batch)  # a list of 8 pairs (inputs, targets)

    Every rank makes the same model and the same calls. The ranks that differ along ``pp`` only are
    given the same micro-batches: the first stage uses the inputs, the one with the loss the
    targets. Gradients are added in the order of the micro-batches, whatever the schedule, so that
    parameters are, bit for bit, those of `DataParallel` on as many ``dp`` ranks.

    Attributes:
        program: What the stages do in a step.
        stage: The stage of this rank.
        cuts: For each chunk of the model the names of its layers.
    """

    AXES = ("replica", "dp", "pp", "tp")

    def __init__(
        self,
        model: Model,
        loss: Loss,
        mesh: Mesh,
        schedule: str | Schedule = "1f1b",
        micro_batches: int = 8,
        cut: Sequence[str] | None = None,
        options: Options | None = None,
        **changes: Any,
    ) -> None:
        """Prove the schedule and make the buffers of this rank's stage; a collective.

        Args:
            model: Layers; see `pycoll.parallel.nn.layer`.
            loss: The loss to minimize.
            mesh: The ranks; stages lie along ``pp``.
            schedule: A schedule, or the name of one: ``naive``, ``gpipe``, ``1f1b``,
                ``interleaved:2``, ``zb_h1``, ``zb_v``, ``dualpipe_v``.
            micro_batches: Micro-batches of a step, on each rank.
            cut: Names of the layers that begin the second and later chunks; None: chunks get
                nearly equal numbers of parameters.
            options: Settings; by default those of `Options`.
            changes: Settings by name, which override `options`.

        Raises:
            ArgumentError: For a setting, a cut or a model that cannot be used.
            ScheduleError: For a schedule that is not right, naming stages and operations.
            MismatchError: If ranks have different models, settings or values.
        """
        if not isinstance(mesh, Mesh):
            raise ArgumentError(f"mesh={mesh!r}; expected a mesh, such as Mesh(comm, pp=-1)")
        chosen = find(schedule)
        if chosen.steps > 1:
            raise ArgumentError(
                f"schedule={chosen.name!r} has no flush; `Pipeline` runs schedules that have one"
            )
        if changes.get("unused", options.unused if options else "zero") != "zero":
            raise ArgumentError(
                "unused='error': a pipeline does not compare graphs yet; use 'zero'"
            )
        if changes.get("device", options.device if options else "cpu") != "cpu":
            raise ArgumentError(
                "device='cuda': activations go from stage to stage on CPUs only yet"
            )
        self.program: Program = prove(chosen.program(mesh.size("pp"), micro_batches)).program
        self.stage = mesh.coordinate("pp")
        self._cut = cut
        super().__init__(model, loss, mesh, options, **changes)
        self._transfers = Transfers(self.groups.pipeline, self.ledger)

    def _facts(self) -> list[str]:
        return [f"schedule={self.program}", f"cut={self._cut}"]

    def _make_buckets(
        self, units: Sequence[Unit], owned: Sequence[Sequence[Parameter]]
    ) -> list[Bucket]:
        """Make the buckets of every chunk of this stage."""
        sizes = [sum(parameter.size for parameter in group) for group in owned]
        starts = cut_units([unit.name for unit in units], sizes, self.program.depth, self._cut)
        bounds = [*starts, len(units)]
        self.cuts = [tuple(unit.name for unit in units[a:b]) for a, b in pairwise(bounds)]
        self._check_ties(units)
        self._owners = {
            parameter.name: self.program.owner(chunk)
            for chunk, (a, b) in enumerate(pairwise(bounds))
            for group in owned[a:b]
            for parameter in group
        }
        self._parts: dict[int, tuple[slice, list[Bucket]]] = {}
        for chunk in reversed(range(self.program.depth)):
            if self.program.owner(chunk) == self.stage:
                part = slice(bounds[chunk], bounds[chunk + 1])
                self._parts[chunk] = part, super()._make_buckets(units, owned[part])
        return [bucket for _, buckets in self._parts.values() for bucket in buckets]

    def _make_passes(self, model: Model, loss: Loss, units: Sequence[Unit]) -> dict[int, Passes]:
        super()._make_passes(model, loss, [])  # checks the loss
        return {
            chunk: Passes(units[part], buckets, loss, self.options, self.ledger)
            for chunk, (part, buckets) in self._parts.items()
        }

    def _check_ties(self, units: Sequence[Unit]) -> None:
        place = {name: i for i, names in enumerate(self.cuts) for name in names}
        for unit in units:
            for local, name in unit.names.items():
                owner = next(u.name for u in units if name in u.specs)
                if place[owner] != place[unit.name]:
                    raise ArgumentError(
                        f"{unit.name}.{local} is tied to {name}, which is in another chunk of the "
                        f"pipeline ({place[unit.name]} and {place[owner]}); keep both in one chunk "
                        "by cut=, or do not tie them"
                    )

    def _accumulate(self, micro_batches: Sequence[Sample], lr: Any) -> tuple[float, int, list[str]]:
        """Run the program; return sum of losses and samples of all ranks, and problems here."""
        for bucket in self.buckets:
            bucket.gradients.reset()
        self._begin_hook()
        for passes in self._passes.values():
            passes.prepare()
        self._check_count(micro_batches, refusal("lr", lr, "[0, inf)"))
        run = _Step(self, micro_batches)
        for op in self.program.stages[self.stage]:
            run.do(op)
        return *self._share_loss(run.losses), []

    def _check_count(self, micro_batches: Sequence[Sample], refused: str) -> None:
        m = self.program.m
        sized = hasattr(micro_batches, "__len__")
        if not refused and sized and len(micro_batches) != m:
            refused = f"{len(micro_batches)} micro-batches, for a pipeline of {m}"
        most_micro_batches(micro_batches, self.groups, refused)

    def _share_loss(self, losses: Sequence[tuple[float, int]]) -> tuple[float, int]:
        """Return sum of losses and number of samples of all ranks, known to the last chunk."""
        both = np.zeros(2)
        if losses:
            totals = Sums(both, partial(np.zeros, 2))
            plan = plan_sum(len(losses), self.options.order)
            for term, (loss, count) in zip(plan, losses, strict=True):
                total = totals.begin(term)
                total += (loss, count)
                totals.end(term)
            both = self.groups.data.all_reduce(totals.take(), "count", self.options.order).wait()
        last = self.program.owner(self.program.depth - 1)
        both = self.groups.pipeline.comm.broadcast(both, root=last)
        return float(both[0]), int(both[1])

    def predict(self, x: Any) -> Any:
        """Return the output of the last layer, on every rank; a collective.

        Args:
            x: The input, the same on all ranks that differ along ``pp`` only.
        """
        for chunk in range(self.program.depth):
            if chunk:
                ends = self.program.owner(chunk - 1), self.program.owner(chunk)
                x = self._transfers.hand_over(x, *ends)
            if chunk in self._passes:
                x = self._passes[chunk].predict(x)
        return self._transfers.share(x, self.program.owner(self.program.depth - 1))

    def gather(self) -> dict[str, np.ndarray]:
        """Return all parameters of all stages in full, by name, on every rank; a collective."""
        return self._from_stages(values.gather_parameters(self.buckets, self.groups))

    def _from_stages(self, own: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return what all stages have, by the name of a parameter."""
        found = {}
        for parameter in self.parameters:
            name = parameter.name
            found[name] = self._transfers.share(own.get(name), self._owners[name])
        return found

    def state_dict(self) -> dict[str, Any]:
        """Return parameters and states of all stages; see `DataParallel.state_dict`."""
        found = super().state_dict()
        kinds = ["parameters", *self.options.optimizer.slots]
        return found | {kind: self._from_stages(found.get(kind, {})) for kind in kinds}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Load the result of `state_dict` of any engine; see `DataParallel.load_state_dict`."""
        super().load_state_dict(self._own_part(saved))

    def _own_part(self, saved: Any) -> Any:
        if not isinstance(saved, dict):
            return saved
        others = {name for name, owner in self._owners.items() if owner != self.stage}
        kinds = ["parameters", *self.options.optimizer.slots]
        return saved | {
            kind: {name: value for name, value in saved[kind].items() if name not in others}
            for kind in kinds
            if isinstance(saved.get(kind), dict)
        }


class _Step:
    """One run of a stage's part of a program.

    Attributes:
        losses: Loss and number of samples of each micro-batch, if this stage has the last chunk.
    """

    def __init__(self, engine: Pipeline, micro_batches: Sequence[Sample]) -> None:
        self._engine, self._samples, self._program = engine, micro_batches, engine.program
        self._terms = plan_sum(engine.program.m, engine.options.order)
        self._values: dict[tuple[str, int, int], Any] = {}
        self._saved: dict[tuple[int, int], Any] = {}
        self._gradients: dict[tuple[int, int], Any] = {}
        self.losses: list[tuple[float, int]] = []
        self._do: dict[str, Callable[[Op], None]] = {
            "F": self._forward,
            "B": self._backward,
            "W": self._weight,
            "SEND": self._send,
            "RECV": self._receive,
            "FREE": lambda op: None,  # what W has used up is gone with it
            "REDUCE": lambda op: None,  # the last W of a bucket starts its reduction
            "STEP": lambda op: None,  # all ranks agree on it, in `DataParallel.step`
        }

    def do(self, op: Op) -> None:
        """Carry out an operation; errors of layers tell where they were raised."""
        try:
            self._do[op.kind](op)
        except (ArgumentError, MismatchError) as error:
            layers = ", ".join(self._engine.cuts[op.chunk])
            where = f"stage {self._engine.stage}, {op.kind} of micro-batch {op.micro}, chunk "
            where += f"{op.chunk} ({layers})"
            raise type(error)(f"{where}: {error}") from error

    def _forward(self, op: Op) -> None:
        i, c = op.micro, op.chunk
        engine, passes = self._engine, self._engine._passes[c]
        inputs, targets = self._samples[i]  # on every stage: taking one may set a `Cursor`
        x = inputs if c == 0 else self._values.pop(("x", i, c - 1))
        y, self._saved[i, c] = passes.forward(x)
        if c < self._program.depth - 1:
            self._values["x", i, c] = y
            return
        loss, count, dy = passes.loss(y, targets, engine.loss_scale.value)
        self.losses.append((loss, count))
        self._values["dx", i, c + 1] = dy

    def _backward(self, op: Op) -> None:
        i, c = op.micro, op.chunk
        self._samples[i]  # layers that run forward again draw the same random numbers
        dy = self._values.pop(("dx", i, c + 1))
        dx, self._gradients[i, c] = self._engine._passes[c].back_input(dy, self._saved[i, c])
        if c:
            self._values["dx", i, c] = dx

    def _weight(self, op: Op) -> None:
        i, c = op.micro, op.chunk
        passes = self._engine._passes[c]
        passes.begin(self._terms[i], i == self._program.m - 1)
        passes.back_weight(self._saved.pop((i, c)), self._gradients.pop((i, c)))

    def _send(self, op: Op) -> None:
        to = op.chunk + (1 if op.what == "x" else -1)
        x = self._values.pop((op.what, op.micro, op.chunk))
        self._engine._transfers.send(x, self._program.owner(to), _tag(op))

    def _receive(self, op: Op) -> None:
        x = self._engine._transfers.receive(self._program.owner(op.chunk), _tag(op))
        self._values[op.what, op.micro, op.chunk] = x


def _tag(op: Op) -> int:
    """Return the tag of a transfer; the next one is that of its head."""
    return (op.micro << 12 | op.chunk << 1 | (op.what == "dx")) << 1


def cut_units(
    names: Sequence[str], sizes: Sequence[int], chunks: int, cut: Sequence[str] | None
) -> list[int]:
    """Return the first unit of each chunk.

    Args:
        names: Names of the units.
        sizes: Parameters of each unit.
        chunks: Number of chunks.
        cut: Names of the units that begin the second and later chunks; None: the largest chunk is
            as small as it can be.

    Raises:
        ArgumentError: If there are too few units, or a name is not known or out of order.
    """
    if len(names) < chunks:
        raise ArgumentError(
            f"a pipeline of {chunks} chunks needs at least {chunks} layers; the model has "
            f"{len(names)}: {', '.join(names)}"
        )
    if cut is None:
        return _balanced([size + 1 for size in sizes], chunks)
    unknown = [name for name in cut if name not in names]
    starts = [0, *(names.index(name) for name in cut if name in names)]
    if unknown or len(starts) != chunks or sorted(set(starts)) != starts:
        raise ArgumentError(
            f"cut={list(cut)!r}; expected the names of {chunks - 1} layers in their order, each "
            f"the first of a chunk, out of {', '.join(names[1:])}"
        )
    return starts


def _balanced(sizes: Sequence[int], chunks: int) -> list[int]:
    """Return starts of runs whose largest sum is least, by dynamic programming."""
    total = np.concatenate([[0], np.cumsum(sizes)])
    n = len(sizes)
    best = np.full((chunks + 1, n + 1), np.inf)
    start = np.zeros((chunks + 1, n + 1), int)
    best[0, 0] = 0
    for k in range(1, chunks + 1):
        for end in range(k, n - chunks + k + 1):
            worst = np.maximum(best[k - 1, k - 1 : end], total[end] - total[k - 1 : end])
            first = int(np.argmin(worst))
            best[k, end], start[k, end] = worst[first], first + k - 1
    starts, end = [], n
    for k in range(chunks, 0, -1):
        end = int(start[k, end])
        starts.append(end)
    return starts[::-1]
