"""The pipeline engine: runs a proven program, one stage on each rank of the mesh's ``pp`` axis.

It is the data-parallel engine with its layers divided among stages: every stage has the buckets of
its own layers, with any ZeRO stage, and the ranks of a stage reduce them as usual. Micro-batches go
from stage to stage as tagged messages, in the order that the proof has accepted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

from pycoll.errors import ArgumentError
from pycoll.parallel.engine.agreement import most_micro_batches, reduced
from pycoll.parallel.engine.data_parallel import DataParallel
from pycoll.parallel.engine.options import Options, changed
from pycoll.parallel.engine.passes import Passes, Sample, Samples
from pycoll.parallel.engine.report import StepReport
from pycoll.parallel.mesh import Mesh
from pycoll.parallel.nn.layer import Loss, Model
from pycoll.parallel.pipeline.asynchronous import Stream, check_options
from pycoll.parallel.pipeline.cuts import Cut, checked, cut_units, layer_times
from pycoll.parallel.pipeline.program import Program, Schedule
from pycoll.parallel.pipeline.proof import prove
from pycoll.parallel.pipeline.registry import find
from pycoll.parallel.pipeline.run import Run, turns
from pycoll.parallel.pipeline.ties import make_ties, untie, with_copies
from pycoll.parallel.pipeline.transfers import Transfers
from pycoll.parallel.precision import LossScale
from pycoll.parallel.settings import refusal
from pycoll.parallel.state import values
from pycoll.parallel.state.bucket import Bucket, Values
from pycoll.parallel.state.gradients import sum_losses
from pycoll.parallel.state.layout import Parameter, Unit, unit_parameters
from pycoll.parallel.state.parts import Part


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

    AXES: tuple[str, ...] = ("replica", "dp", "cp", "pp", "tp")
    _TELLS = True

    def __init__(
        self,
        model: Model,
        loss: Loss,
        mesh: Mesh,
        schedule: str | Schedule = "1f1b",
        micro_batches: int = 8,
        cut: Cut | None = None,
        options: Options | None = None,
        *,
        sample: Sample | None = None,
        **changes: Any,
    ) -> None:
        """Prove the schedule and make the buffers of this rank's stage; a collective.

        Args:
            model: Layers; see `pycoll.parallel.nn.layer`.
            loss: The loss to minimize.
            mesh: The ranks; stages lie along ``pp``.
            schedule: A schedule, or the name of one: ``1f1b``, ``interleaved:2``, ``pipedream``,
                ...; see docs/pipelines.md.
            micro_batches: Micro-batches of a step, on each rank.
            cut: Chunks have nearly equal ``"parameters"`` (or None) or take nearly equal
                ``"time"``; or names of the layers that begin the second and later ones.
            options: Settings; by default those of `Options`.
            sample: With ``cut="time"``: the micro-batch on which every layer is timed.
            changes: Settings by name, which override `options`.

        Raises:
            ArgumentError: For a setting, a cut or a model that cannot be used.
            ScheduleError: For a schedule that is not right, naming stages and operations.
            MismatchError: If ranks have different models, settings or values.
        """
        if not isinstance(mesh, Mesh):
            raise ArgumentError(f"mesh={mesh!r}; expected a mesh, such as Mesh(comm, pp=-1)")
        chosen, given = find(schedule), changed(options, changes)
        if given.device != "cpu":
            raise ArgumentError("device='cuda': activations go from stage to stage on CPUs only")
        if chosen.steps > 1:
            check_options(chosen.name, given)
        self.program: Program = prove(chosen.program(mesh.size("pp"), micro_batches)).program
        self.stage: int = mesh.coordinate("pp")
        self._cut, self._sample, self._loss = checked(cut), sample, loss
        super().__init__(model, loss, mesh, given)
        self.transfers: Transfers = Transfers(self.groups.pipeline, self.ledger)
        self._turns = turns(self.program, self.program.stages[self.stage])
        for tie in self._joins:
            tie.begin(self.transfers)
        self._stream = Stream(self) if chosen.steps > 1 else None

    @property
    def versions(self) -> int:
        """Most versions of its parameters that this stage has held at once."""
        return 1 if self._stream is None else self._stream.most_versions

    def _make_units(self, model: Model) -> list[Unit]:
        units = super()._make_units(model)
        unit_parameters(units)  # refuses ties that are none
        units, self._ties = untie(units)
        if self._ties and self.program.schedule.steps > 1:
            copy, owner = next(iter(self._ties.items()))
            raise ArgumentError(
                f"{copy} is tied to {owner}: with schedule={self.program.schedule.name!r} stages "
                "take steps by themselves, and copies would not stay the same"
            )
        return units

    def _facts(self) -> list[str]:
        return [f"schedule={self.program}", f"cut={self._cut}"]

    def _make_buckets(
        self, units: Sequence[Unit], owned: Sequence[Sequence[Parameter]]
    ) -> list[Bucket]:
        """Make the buckets of every chunk of this stage."""
        sizes = [sum(parameter.size for parameter in group) for group in owned]
        if self._cut == "time":
            whom = self._loss, self._sample, self.options, self.groups.world
            sizes = layer_times(units, *whom)
        starts = cut_units([unit.name for unit in units], sizes, self.program.depth, self._cut)
        bounds = [*starts, len(units)]
        self.cuts: list[tuple[str, ...]] = [
            tuple(unit.name for unit in units[a:b]) for a, b in pairwise(bounds)
        ]
        self._owners = {
            parameter.name: self.program.owner(chunk)
            for chunk, (a, b) in enumerate(pairwise(bounds))
            for group in owned[a:b]
            for parameter in group
        }
        self._parts: dict[int, tuple[slice, list[Bucket]]] = {}
        tied = {*self._ties, *self._ties.values()}
        plain, single = list[Bucket](), dict[str, Bucket]()
        for chunk in reversed(range(self.program.depth)):
            if self.program.owner(chunk) == self.stage:
                part = slice(bounds[chunk], bounds[chunk + 1])
                rest = [[p for p in group if p.name not in tied] for group in owned[part]]
                shared = [p for group in owned[part] for p in group if p.name in tied]
                make = partial(super()._make_buckets, units)
                own = {p.name: make([[p]])[0] for p in shared}
                buckets = make(rest)
                self._parts[chunk] = part, buckets + list(own.values())
                plain, single = plain + buckets, single | own
        self._plain = plain
        self._joins = make_ties(self._ties, self._owners, single, self.stage)
        return [*plain, *single.values()]

    def _make_passes(self, model: Model, loss: Loss, units: Sequence[Unit]) -> dict[int, Passes]:
        return {
            chunk: Passes(units[part], buckets, loss, self.options, self.ledger, self.kept)
            for chunk, (part, buckets) in self._parts.items()
        }

    def step(self, micro_batches: Samples, lr: float | None = None) -> StepReport:
        """Train on one batch; see `DataParallel.step`.

        With a schedule without a flush the batch is not over when this returns: the report has the
        loss of the step before, NaN at first, and the norm of this stage. `flush` ends it.
        """
        if self._stream is None:
            return super().step(micro_batches, lr)
        return self._stream.step(micro_batches, self.options.optimizer.lr if lr is None else lr)

    def flush(self) -> StepReport | None:
        """Finish the micro-batches in flight; a collective.

        Whatever reads parameters does it by itself: `predict`, `gather`, `state_dict`.

        Returns:
            The report of the last step of a schedule without a flush, if any is in flight.
        """
        return None if self._stream is None else self._stream.flush()

    def graph_problems(self, micro: int, chunk: int) -> list[str]:
        """Return a problem if batch ``micro`` gave ``chunk`` gradients of others than the first."""
        return self._graphs.problems(micro, self._parts[chunk][1], chunk)

    def _reduced_buckets(self) -> Iterator[Bucket]:
        yield from reduced(self._plain, self.groups)
        for tie in self._joins:
            for bucket in tie.own.values():
                bucket.gradients.finish().wait()
        for tie in self._joins:
            yield from tie.join(self.transfers)

    def _accumulate(
        self, micro_batches: Samples, lr: Any, facts: Callable[[], str]
    ) -> tuple[np.ndarray, list[str]]:
        """Run the program; see `DataParallel`. The first wait is a time to form `facts`."""
        for bucket in self.buckets:
            bucket.gradients.reset()
        self._begin_hook()
        for passes in self._passes.values():
            passes.prepare()
        self._check_count(micro_batches, refusal("lr", lr, "[0, inf)"))
        run = Run(self, micro_batches.__getitem__)
        with self.ending():
            run.all(self._turns, facts)
            both = self._share_losses(run.losses)
        return both, run.problems

    @contextmanager
    def ending(self) -> Iterator[None]:
        """End the engine on all ranks if the block fails: transfers are on their way."""
        try:
            yield
        except BaseException as error:
            self.transfers.drop()
            self.failure.end(error)
            raise

    def _check_count(self, micro_batches: Samples, refused: str) -> None:
        m = self.program.m
        sized = hasattr(micro_batches, "__len__")
        if not refused and sized and len(micro_batches) != m:
            refused = f"{len(micro_batches)} micro-batches, for a pipeline of {m}"
        most_micro_batches(micro_batches, self.groups, refused)

    def _share_losses(self, losses: Sequence[tuple[float, int]]) -> np.ndarray:
        """Return sum of losses and samples on the first rank with the last chunk, else zeros."""
        if not losses:
            return np.zeros(2)
        order = self.options.order
        both = self.groups.data.total(sum_losses(losses, order), "count", order)
        return both if self.groups.stage.rank == 0 else np.zeros(2)

    def predict(self, x: Any) -> Any:
        """Return the output of the last layer, on every rank; a collective.

        Args:
            x: The input, the same on all ranks that differ along ``pp`` only.

        Raises:
            Exception: What a layer of this rank has raised. Others have `PeerLeft`, and the engine
                has ended.
        """
        self.flush()
        with self.ending():
            for chunk in range(self.program.depth):
                if chunk:
                    ends = self.program.owner(chunk - 1), self.program.owner(chunk)
                    x = self.transfers.hand_over(x, *ends)
                if chunk in self._passes:
                    x = self._passes[chunk].predict(x)
            return self.transfers.share(x, self.program.owner(self.program.depth - 1))

    def gather(self) -> dict[str, np.ndarray]:
        """Return all parameters of all stages in full, by name, on every rank; a collective."""
        self.flush()
        return self._from_stages(values.gather_parameters(self.buckets, self.groups))

    def _from_stages(self, own: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return what all stages have, by the name of a parameter."""
        found = {}
        for name in [p.name for p in self.parameters if p.name not in self._ties]:
            found[name] = self.transfers.share(own.get(name), self._owners[name])
        return found

    def state_dict(self) -> dict[str, Any]:
        """Return parameters and states of all stages; see `DataParallel.state_dict`."""
        self.flush()
        found = super().state_dict()
        kinds = ["parameters", *self.options.optimizer.slots]
        return found | {kind: self._from_stages(found.get(kind, {})) for kind in kinds}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Load the result of `state_dict` of any engine; see `DataParallel.load_state_dict`."""
        self.flush()
        super().load_state_dict(self._own_part(saved))
        if self._stream is not None:
            self._stream.restart()

    def parts(self) -> Iterator[Part]:
        """Return what this rank saves, copies of tied parameters left out; a collective."""
        self.flush()
        parts = super().parts()
        return (part for part in parts if part.name not in self._ties)

    def wanted(self) -> Iterator[Part]:
        """Return what this rank loads; copies are what they are tied to."""
        parts = super().wanted()
        return (part._replace(name=self._ties.get(part.name, part.name)) for part in parts)

    def take(self, values: Values, steps: int, scale: LossScale) -> None:
        """Set the state of this rank; see `DataParallel.take`."""
        self.flush()

        def owned(kind: str, name: str, start: int, stop: int) -> Any:
            return values(kind, self._ties.get(name, name), start, stop)

        super().take(owned, steps, scale)
        if self._stream is not None:
            self._stream.restart()

    def settle(self) -> None:
        """Wait until this rank has all parameters of the last step; not a collective."""
        if self._stream is not None:
            self._stream.settle()
        super().settle()

    def _own_part(self, saved: Any) -> Any:
        if not isinstance(saved, dict):
            return saved
        others = {name for name, owner in self._owners.items() if owner != self.stage}
        kinds = ["parameters", *self.options.optimizer.slots]
        return saved | {
            kind: {
                name: value
                for name, value in with_copies(saved[kind], self._ties).items()
                if name not in others
            }
            for kind in kinds
            if isinstance(saved.get(kind), dict)
        }
