"""What a program uses of parameter servers: `ParameterServer`."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np

from pycoll.comm import Communicator
from pycoll.errors import ArgumentError, PeerLost, Revoked
from pycoll.parallel.channels import Ledger
from pycoll.parallel.compare import name_ranks
from pycoll.parallel.engine.data_parallel import DataParallel
from pycoll.parallel.engine.passes import Samples
from pycoll.parallel.engine.report import StepReport
from pycoll.parallel.server.parts import Parts
from pycoll.parallel.server.serving import Served
from pycoll.parallel.server.worker import Lines
from pycoll.parallel.settings import check_number, refusal


class ParameterServer:
    """Trains with servers that hold the parameters, and workers that push gradients to them.

    ::

        with ParameterServer(comm, model, CrossEntropy(), mode="async", optimizer=SGD(0.1)) as ps:
            if ps.serves:
                ps.serve()
            else:
                for batch in batches:
                    report = ps.step([batch])
                ps.finish()
            parameters = ps.gather()

    The last `servers` ranks serve; the others are workers. Buckets of parameters are divided over
    the servers. A worker pushes a bucket as soon as its gradient is complete, while the backward
    pass goes on; the server answers with the parameters of the bucket. See docs/parameter-server.md
    for the modes.

    Attributes:
        comm: The present communicator, of the workers and servers that live.
        serves: Whether this rank is a server.
        worker: Number of this worker, from 0; None on servers.
        workers: How many workers there were at first.
        engine: On workers that train a model: what runs it. Its parameters are those of the last
            step or `pull`.
        ledger: The bytes that this rank sent.
    """

    def __init__(
        self,
        comm: Communicator,
        model: Any,
        loss: Any = None,
        *,
        servers: int = 1,
        mode: str = "sync",
        staleness: int | None = None,
        on_death: str = "raise",
        record: bool = False,
        **settings: Any,
    ) -> None:
        """Divide ranks and parameters; a collective. Servers start with the values they were given.

        Args:
            comm: The ranks; stays the caller's.
            model: A model of layers; or the first parameters, as an array or arrays by name, of
                float32 or float64.
            loss: The loss to minimize, for `step`.
            servers: Number of servers.
            mode: ``"sync"``: the gradients of all workers are added up and applied once, as by
                `DataParallel`. ``"async"``: each is applied when it comes. ``"ssp"``: so, too, but
                no worker runs more than `staleness` steps ahead of the slowest.
            staleness: That number.
            on_death: ``"raise"``: a death is `PeerLost` on every rank. ``"drop"``: the others go on
                without a worker that died; a server that died is `PeerLost`. Not with ``"sync"``.
            record: Whether servers note in which `order` they did what.
            settings: ``optimizer``, ``order``, ``bucket_bytes``, ``precision`` (fp32, fp64),
                ``recompute``, ``fused`` and ``wrap``, as for `DataParallel`.

        Raises:
            ArgumentError: For what cannot be used; on every rank, if it is so on any.
            MismatchError: If ranks have different settings or parameters.
        """
        plan = {"servers": servers, "mode": mode, "staleness": staleness}
        plan |= {"on_death": on_death, "record": record}
        self._parts = self._prepare(comm, model, loss, plan, settings)
        self.comm: Communicator = comm.dup()
        self.ledger: Ledger = self._parts.ledger
        self.engine: DataParallel | None = self._parts.engine
        self.workers: int = comm.world_size - servers
        self.serves: bool = self._parts.serves
        self.worker: int | None = None if self.serves else comm.rank
        self._drops = on_death == "drop"
        self._alive = list(range(comm.world_size))  # ranks in `comm` of those in `self.comm`
        self._steps = dict.fromkeys(range(self.workers), 0)
        self._open, self._rounds = False, 0

    def _prepare(
        self, comm: Communicator, model: Any, loss: Any, plan: dict[str, Any], settings: Any
    ) -> Parts:
        return Parts(comm, model, loss, plan, settings)

    @property
    def order(self) -> list[tuple[str, int, int]]:
        """On servers, with `record`: ``("push" or "pull", worker, bucket)``, as they were served.

        The worker is its rank in the communicator that served it; a push is applied at once, but
        with ``"sync"``, where the last worker's is. A pull is an answer.
        """
        self._require(self.serves, "order")
        return self._parts.service.order or []

    def serve(self) -> Served:
        """Serve until all workers have called `finish`; on servers.

        Returns:
            What this server has done so far; `report` adds up what all have.

        Raises:
            MismatchError: If workers push with different learning rates in one step (sync).
            PeerLost: If a rank died; see ``on_death``.
            CollTimeout: If nothing comes in the time of the communicator.
        """
        self._require(self.serves, "serve")
        self._steps = dict.fromkeys(self._steps, 0)

        def serve() -> None:
            self._parts.service.run(self.comm, self._steps)
            self._rounds += 1

        self._attempt(serve)
        return self._parts.service.served

    def step(self, micro_batches: Samples, lr: float | None = None) -> StepReport:
        """Compute gradients with the newest parameters, and push them; on workers with a model.

        Args:
            micro_batches: ``(inputs, targets)`` of this worker, one after the other.
            lr: Learning rate of this push; by default the optimizer's. With ``"sync"`` the same on
                all workers.

        Returns:
            Loss, samples and gradient norm of this worker.

        Raises:
            ArgumentError: For what cannot be used, and for a loss that is not finite: nothing was
                pushed. For a gradient that is not finite: some buckets may have been.
        """
        self._require(self.engine is not None, "step")
        rate = self._rate(lr)

        def step() -> StepReport:
            self._join_round()
            return self._parts.step(micro_batches, rate)

        return self._attempt(step)

    def pull(self) -> Any:
        """Return the parameters after this worker's last push, in the form they were given.

        After `finish` this begins another round, in which servers have to serve: use `gather`.
        Those of a model are views, which later steps change.
        """
        self._require(not self.serves, "pull")

        def pull() -> Any:
            self._join_round()
            self._parts.worker.settle()
            return self._parts.form.shaped(self._parts.views())

        return self._attempt(pull)

    def push(self, gradient: Any, samples: int = 1, lr: float | None = None) -> None:
        """Push ``gradient`` of a sum of losses over ``samples``, in the form of the parameters.

        It is divided by them (by those of all workers, with ``"sync"``); with 1, give the gradient
        of the mean. The array may be changed at once. ``lr`` replaces that of the optimizer.

        Raises:
            ArgumentError: For what cannot be used; nothing was pushed.
        """
        self._require(not self.serves, "push")
        check_number("samples", samples, "[1, inf)", whole=True)
        rate = self._rate(lr)
        given = self._parts.checked(gradient)

        def push() -> None:
            self._join_round()
            self._parts.push(given, samples, rate)

        self._attempt(push)

    def finish(self) -> None:
        """End this worker's part of a round: it pushes nothing more until `serve` is called again.

        Returns when all workers have called it.
        """
        self._require(not self.serves, "finish")

        def finish() -> None:
            self._join_round()
            self._parts.worker.end()
            self._rounds, self._open = self._rounds + 1, False

        self._attempt(finish)

    def gather(self) -> Any:
        """Return the servers' parameters, in the form they were given, on every rank; a collective.

        It is for the time when no worker trains. On workers it sets the parameters in use as well.
        """
        self._between_rounds("gather")
        parts = self._parts
        return self._attempt(lambda: parts.form.shaped(parts.gather(self.comm, self._places)))

    def report(self) -> Served:
        """Return what all servers have done, on every rank; a collective."""
        self._between_rounds("report")
        mine = self._parts.service.served if self.serves else Served()
        facts = [mine.updates, [*mine.staleness.items()], [*mine.lead.items()], mine.lost]
        total, lost = Served(), set[int]()
        for updates, staleness, lead, gone in self._attempt(
            lambda: self.comm.all_gather_object(facts)
        ):
            total.add(Served(updates, Counter(dict(staleness)), Counter(dict(lead))))
            lost.update(gone)
        total.lost = sorted(lost)
        return total

    def state_dict(self) -> dict[str, Any]:
        """Return parameters and states of the optimizer, on every rank; a collective.

        It is that of `DataParallel`, which can load it; an array that was given is in pieces.
        """
        self._between_rounds("state_dict")
        return self._attempt(lambda: self._parts.state_dict(self.comm, self._places))

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Load ``saved`` of any servers' `state_dict`, or of `DataParallel`'s; a collective.

        Raises:
            ArgumentError: On every rank, if it does not fit. Some servers may have changed.
            MismatchError: On every rank, if ranks have different ones.
        """
        self._between_rounds("load_state_dict")
        self._parts.load_state_dict(self.comm, saved)

    @property
    def _places(self) -> list[int]:
        """Ranks of the servers of all buckets."""
        return [self._alive.index(place) for place in self._parts.places]

    def _require(self, fits: bool, call: str) -> None:
        if not fits:
            who = "a server: it calls serve" if self.serves else f"worker {self.worker}"
            if call == "step" and not self.serves:
                who += ", which was given no loss: it calls pull and push"
            raise ArgumentError(f"{call} is not for rank {self.comm.rank}, {who}")

    def _between_rounds(self, call: str) -> None:
        if self._open:
            raise ArgumentError(f"{call} is for the time when no worker trains: call finish first")

    def _rate(self, lr: float | None) -> float:
        if lr is not None and (problem := refusal("lr", lr, "[0, inf)")):
            raise ArgumentError(problem)
        return math.nan if lr is None else float(lr)

    def _join_round(self) -> None:
        if not self._open:
            self._parts.worker.begin(Lines(self.comm, self._places))
            self._parts.worker.steps, self._open = 0, True

    def _attempt(self, call: Callable[[], Any]) -> Any:
        """Do what a death may interrupt; do it again without those that died, if that is wanted."""
        rounds = self._rounds
        while True:
            try:
                return call()
            except (PeerLost, Revoked) as error:
                if not self._drops:
                    raise
                self._go_on(error)
                if self._rounds > rounds:  # all workers had ended
                    return None
            except Exception as error:
                if self._open and self._parts.worker.torn:
                    self.close(error)
                raise

    def _go_on(self, error: Exception) -> None:
        """Come to a communicator of those that are left, and begin the round again."""
        worker, row, before = self._parts.worker, None, self._alive
        while row is None:
            old = self.comm
            try:
                self.comm = old.shrink()
                old.close()
                steps = worker.steps if worker is not None and self._open else 0
                mine = [before[old.rank], self._rounds, steps]
                row = self.comm.all_gather(np.array([mine]))
            except (PeerLost, Revoked):
                before = self._alive
        self._alive = row[:, 0].tolist()
        if gone := sorted(set(self._parts.places) - set(self._alive)):
            raise PeerLost(
                f"{name_ranks(gone)}, a server, died, and its parameters with it; start again from "
                "a state that was saved"
            ) from error
        self._steps = {r: int(row[r, 2]) for r, w in enumerate(self._alive) if w < self.workers}
        if not self._steps:
            raise PeerLost("all workers died") from error
        if self.serves:
            lost = sorted(set(range(self.workers)) - set(self._alive))
            self._parts.service.served.lost = lost
        if (most := int(row[:, 1].max())) > self._rounds:
            self._rounds, self._open = most, False
        elif self._open:
            worker.begin(Lines(self.comm, self._places))

    def close(self, error: BaseException | None = None) -> None:
        """Leave; with an ``error``, ranks that wait raise, too. Not a collective.

        A worker that has not called `finish` leaves with an error.
        """
        if error is None and self._open:
            error = ArgumentError(f"worker {self.worker} was closed before it called finish")
        self._parts.close(error)
        self.comm.__exit__(type(error) if error else None, error, None)

    def __enter__(self) -> ParameterServer:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self.close(error)
