"""Training by ranks that may die and come back: `Elastic`."""

from __future__ import annotations

import contextlib
import os
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from pycoll.comm import Communicator
from pycoll.errors import ArgumentError, CollError, PeerLost, Revoked
from pycoll.parallel.checkpoint import load, save
from pycoll.parallel.elastic.copies import Copies
from pycoll.parallel.elastic.share import Share
from pycoll.parallel.elastic.transfer import bring, choose
from pycoll.parallel.engine.data_parallel import DataParallel
from pycoll.parallel.engine.report import StepReport
from pycoll.parallel.settings import check_number

_STEP, _DEATHS = "step", (PeerLost, Revoked)
_FUNCTIONS = {
    "build": "build(comm) makes the engine",
    "data": "data(step, samples) returns inputs and targets",
    "lr": "lr(step) returns the rate of a step, and the optimizer has one for all",
    "load": "load(engine) returns the number of steps",
}


@dataclass(frozen=True)
class Change:
    """Ranks left or came; the same on every rank.

    Attributes:
        step: Number of steps that the training had taken, and goes on from.
        ranks: How many there are now.
        left: Ranks that are gone, by their old numbers.
        came: Ranks that are new, by their new numbers.
        repeated: Steps that a rank had finished and that are taken again.
        seconds: From the moment when the first rank noticed until all could go on.
        bytes: Size of the state, of which every rank got its part.
        loaded: Whether it came from a checkpoint, as the ranks had none together.
    """

    step: int
    ranks: int
    left: tuple[int, ...]
    came: tuple[int, ...]
    repeated: int
    seconds: float
    bytes: int
    loaded: bool = False

    def __str__(self) -> str:
        words = [f"step {self.step}: {self.ranks} ranks"]
        for what, ranks in (("left", self.left), ("came", self.came)):
            if ranks:
                words.append(f"{', '.join(map(str, ranks))} {what}")
        words.append(f"{self.repeated} steps are repeated")
        if self.loaded:
            return "; ".join([*words, f"loaded from a checkpoint, {self.seconds:.2f} s"])
        return "; ".join([*words, f"{self.bytes / 1e6:.1f} MB of state, {self.seconds:.2f} s"])


def _check_functions(functions: dict[str, Any]) -> None:
    """Refuse what is no function; two may be None."""
    for name, given in functions.items():
        optional = name in ("lr", "load")
        if not callable(given) and not (optional and given is None):
            known = f"a function{', or None' if optional else ''}"
            raise ArgumentError(f"{name}={given!r}; expected {known}: {_FUNCTIONS[name]}")


def _check(
    sizes: dict[str, int],
    redundancy: int,
    load: Any,
    checkpoint: Any,
    save_every: int | None,
    keep: int | None,
) -> None:
    """Refuse arguments of `Elastic` that cannot be used."""
    for name, size in sizes.items():
        check_number(name, size, "[0, inf)" if name == "steps" else "[1, inf)", whole=True)
    batch, micro_batches = sizes["batch"], sizes["micro_batches"]
    if batch < micro_batches:
        raise ArgumentError(f"batch={batch} has fewer samples than micro_batches={micro_batches}")
    for name, count in (("save_every", save_every), ("keep", keep)):
        if count is not None:
            check_number(name, count, "[1, inf)", whole=True)
    if checkpoint is None and save_every is not None:
        raise ArgumentError(f"save_every={save_every} needs checkpoint=, a folder")
    if checkpoint is not None and load is not None:
        raise ArgumentError("load= and checkpoint= both say where a state comes from; give one")
    if redundancy not in (0, 1):
        raise ArgumentError(f"redundancy={redundancy!r}; accepted: 0, 1")


class Elastic:
    """Takes the steps of a training, and goes on when ranks die and when others come.

    ::

        run = Elastic(pycoll.init(), build, data, steps=1000, batch=64, micro_batches=8)
        for report in run:
            if run.comm.rank == 0:
                print(run.step, report.loss)
        run.close()

    under ``pycoll run -n 8 --elastic``. Whatever happens, the state after step s is that of s
    steps, each with its `batch` samples once. A step that a death interrupts is taken by all or by
    none: the ranks that are left, and those that have come, choose the newest state that they have
    together, give each other what each lacks, and go on from there. See docs/elastic.md.

    Attributes:
        comm: The present communicator.
        step: Number of steps taken. After a change it may be one less than before.
        change: What changed before the last step, or None.
        changes: All changes that this rank has seen.
    """

    comm: Communicator
    steps: int
    step: int
    _engine: DataParallel | None = None
    _error: CollError | None = None

    def __init__(
        self,
        comm: Communicator,
        build: Callable[[Communicator], DataParallel],
        data: Callable[[int, range], Any],
        *,
        steps: int,
        batch: int,
        micro_batches: int,
        lr: Callable[[int], float] | None = None,
        redundancy: int = 1,
        load: Callable[[DataParallel], int] | None = None,
        checkpoint: str | os.PathLike[str] | None = None,
        save_every: int | None = None,
        keep: int | None = 2,
    ) -> None:
        """Prepare; ranks meet when the first step is asked for.

        Args:
            comm: What `pycoll.init` returned; it belongs to this object from now on.
            build: Makes the engine of a communicator, on a mesh of its ranks along ``dp``. It is
                called again whenever ranks change.
            data: ``data(step, samples)`` returns inputs and targets of one micro-batch. `samples`
                is a range of numbers that count all samples of the training.
            steps: Number of steps.
            batch: Samples of a step, over all ranks.
            micro_batches: Parts of a step, over all ranks; ranks take neighbouring ones.
            lr: Learning rate of each step; by default the optimizer's.
            redundancy: 1: with ``zero`` above 0 every rank keeps the shard of the rank before it,
                too, so that no step is lost unless two neighbours die at once. 0: it does not.
            load: Loads a state into the engine where no rank has one, or a shard is lost, and
                returns how many steps it has. A collective.
            checkpoint: In place of `load`: a folder of checkpoints, of which the newest is loaded.
                If there is none where no rank has a state, the training begins.
            save_every: Save there after so many steps, in the background.
            keep: How many checkpoints stay.

        Raises:
            ArgumentError: For numbers that cannot be used, and what is no function.
        """
        _check_functions({"build": build, "data": data, "lr": lr, "load": load})
        sizes = {"steps": steps, "batch": batch, "micro_batches": micro_batches}
        _check(sizes, redundancy, load, checkpoint, save_every, keep)
        self.comm, self._build, self._data = comm, build, data
        self.steps, self._sizes, self._lr, self._load = steps, (batch, micro_batches), lr, load
        self._folder, self._save_every, self._keep = checkpoint, save_every, keep
        self.step = self._epoch = 0
        self.change: Change | None = None
        self.changes: list[Change] = []
        self._copies, self._since = Copies(redundancy), time.monotonic()

    @property
    def engine(self) -> DataParallel:
        """The present engine.

        Raises:
            ArgumentError: Before the first step, while ranks change, and after `close`.
        """
        if self._engine is None:
            raise ArgumentError("there is no engine before the first step and while ranks change")
        return self._engine

    def __iter__(self) -> Iterator[StepReport]:
        """Take one step after the other, and return when every rank has taken all of them."""
        while True:
            before = len(self.changes)
            report = None
            while report is None:
                try:
                    if self._error is not None:
                        raise self._error
                    if self._engine is None:
                        self._join()
                    if self.step >= self.steps:
                        self.comm.barrier()
                        return
                    if int(self.comm.all_reduce(np.array([self.comm.newcomers]), "max")[0]):
                        self._renew(None)
                    else:
                        report = self._take_step()
                except _DEATHS as error:
                    self._renew(error)
            self.change = self.changes[-1] if len(self.changes) > before else None
            yield report

    def _take_step(self) -> StepReport:
        place = self.comm.rank, self.comm.world_size
        share = Share(self._data, self.step, self._sizes, place)
        report = self.engine.step(share, None if self._lr is None else self._lr(self.step))
        self.step += 1
        self._copies.take(self.engine, self._epoch, self.step)
        if self._save_every and self.step % self._save_every == 0:
            extra = {_STEP: self.step}
            save(self._folder, self.engine, keep=self._keep, extra=extra, background=True)
        return report

    def _renew(self, error: CollError | None) -> None:
        """Come to a new communicator with all who are left and all who have come."""
        self._error, self._since = None, time.monotonic()
        self._warn(self._drop_engine(error), every=False)
        old = self.comm
        if not old.can_grow and error is None:
            return
        self.comm = old.grow() if old.can_grow else old.shrink()
        old.close()

    def _drop_engine(self, error: CollError | None) -> BaseException | None:
        """Close the engine; return why its last save has failed, if nobody has heard of it."""
        engine, self._engine = self._engine, None
        failed = None
        if engine is not None:
            if engine.saving is not None:
                failed = engine.saving.failure()  # the next engine saves in the same folder
            with contextlib.suppress(CollError):
                engine.close(error)
            engine.mesh.close()
        return failed

    def _warn(self, failed: BaseException | None, every: bool) -> None:
        """Say that a save has failed; not `every` time, for a death ends the one under way."""
        if failed is not None and (every or not isinstance(failed, _DEATHS)):
            text = f"a save in the background failed: {failed}"
            warnings.warn(text, RuntimeWarning, stacklevel=3)

    def _join(self) -> None:
        """Make an engine, and give it the newest state that the ranks have together."""
        engine = self._build(self.comm)
        self._check(engine)
        engine.failure.holds = False  # a rank that fails leaves, and another comes in its place
        versions = self._copies.versions
        chosen, newest = choose(engine, versions)
        before, moved, loaded = self.step, 0, False
        if chosen is not None and chosen.whole:
            moved = bring(engine, chosen, versions)
            self.step = chosen.step
        else:
            self.step, loaded = self._load_state(engine, lost=chosen is not None), True
        self._epoch = newest + 1
        self._copies.take(engine, self._epoch, self.step)
        cost = np.array([float(before - self.step), time.monotonic() - self._since])
        cost = self.comm.all_reduce(cost if versions else np.zeros(2), "max")
        self._copies.keep_only(self._epoch)  # all ranks have come to this point
        self._engine = engine
        if chosen is not None:
            left, came = tuple(sorted(chosen.left)), tuple(sorted(chosen.came))
            place = self.step, self.comm.world_size, left, came
            repeated, seconds = int(max(0.0, cost[0])), float(cost[1])
            self.changes.append(Change(*place, repeated, seconds, moved, loaded))

    def _load_state(self, engine: DataParallel, lost: bool) -> int:
        """Return how many steps a state has that was saved, or 0 at the beginning."""
        if self._load is not None:
            return self._load(engine)
        if self._folder is not None:
            found = load(self._folder, engine, if_any=True)
            if found.path:
                extra = found.extra if isinstance(found.extra, dict) else {}
                return int(extra.get(_STEP, found.steps))
        if lost:
            known = f" in {os.fspath(self._folder)} yet" if self._folder is not None else ""
            hint = (
                "start the job again"
                if known
                else "use redundancy=1, against the death of one rank at a time, and checkpoint= "
                "with save_every="
            )
            raise ArgumentError(
                "a shard of the states is lost with the ranks that died, and there is no "
                f"checkpoint{known}: {hint}"
            )
        return 0

    def _check(self, engine: DataParallel) -> None:
        if not isinstance(engine, DataParallel):
            raise ArgumentError(f"build returned {type(engine).__name__}, expected DataParallel")
        if engine.options.sync_every:
            raise ArgumentError(
                "sync_every: each replica has a state of its own, which a death would take with it"
            )
        if engine.mesh.size("dp") != engine.mesh.world.world_size:
            raise ArgumentError(
                f"build made {engine.mesh!r}; ranks can leave and come along dp only: make it with "
                "Mesh(comm, dp=-1)"
            )

    @contextlib.contextmanager
    def forgiving(self) -> Iterator[None]:
        """Let collectives of the loop's body fail when a rank dies; the next step sees to it.

        ::

            for report in run:
                with run.forgiving():
                    loss = evaluate(run.engine)
        """
        try:
            yield
        except _DEATHS as error:
            self._error = error

    def finish(self, work: Callable[[], Any]) -> Any:
        """Return what a collective gives after the last step; call it again if a rank dies.

        ::

            for report in run:
                ...
            parameters = run.finish(lambda: run.engine.gather())

        Call it once, after the loop, on every rank: one that is started meanwhile comes to it by
        way of the loop, which has no step left for it.

        Args:
            work: Called on every rank, more than once if ranks change meanwhile.
        """
        while True:
            try:
                if self._error is not None:
                    raise self._error
                if self._engine is None:
                    self._join()
                    self.comm.barrier()  # newcomers are at the end of their loop
                result = work()
                self.comm.barrier()
                return result
            except _DEATHS as error:
                self._renew(error)

    def close(self) -> None:
        """Close engine and communicator, once the last save has ended.

        Raises:
            ArgumentError: If that could not be written, as on a full disk. If a rank has died
                meanwhile, it is a warning.
        """
        failed = self._drop_engine(None)
        self.comm.close()
        if failed is not None and not isinstance(failed, _DEATHS):
            raise failed
        self._warn(failed, every=True)
