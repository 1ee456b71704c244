"""What one rank has: the buckets of a server, or those of a worker with what fills them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from pycoll.comm import Communicator
from pycoll.errors import ArgumentError, CollError
from pycoll.parallel.channels import Channel, Groups, Ledger
from pycoll.parallel.compare import check_same, gather_problems
from pycoll.parallel.engine.agreement import check_mesh, check_structure
from pycoll.parallel.engine.data_parallel import DataParallel
from pycoll.parallel.engine.options import Options
from pycoll.parallel.engine.passes import Samples
from pycoll.parallel.engine.report import StepReport
from pycoll.parallel.mesh import Mesh
from pycoll.parallel.nn.layer import Loss
from pycoll.parallel.optim import SGD
from pycoll.parallel.precision import dtype_of
from pycoll.parallel.server.placing import Form, form_of, lay_out, parameters_of, spread
from pycoll.parallel.server.serving import Service
from pycoll.parallel.server.worker import Counted, Pushing, Remote, Worker, check_finite
from pycoll.parallel.settings import check_number, describe
from pycoll.parallel.state import values
from pycoll.parallel.state.bucket import Bucket
from pycoll.parallel.state.hook import Hook
from pycoll.parallel.state.layout import Layout

_BUCKET_BYTES = 4 << 20
_SETTINGS = ("bucket_bytes", "fused", "optimizer", "order", "precision", "recompute", "wrap")


class Parts:
    """Buckets and what works on them.

    Attributes:
        form: How the program gives and gets parameters.
        layouts: Layouts of all buckets.
        places: Rank of the server of each bucket, among all ranks at first.
        serves: Whether this rank is a server.
        buckets: The buckets that this rank has, by number: all of them on a worker.
        service: The server's loop, on a server.
        worker: What sends and receives, on a worker.
        engine: What runs the model, on a worker that has one and a loss.
    """

    service: Service = None  # type: ignore[assignment]
    worker: Worker = None  # type: ignore[assignment]

    def __init__(
        self,
        comm: Communicator,
        model: Any,
        loss: Any,
        plan: dict[str, Any],
        settings: dict[str, Any],
    ) -> None:
        """Make buckets; a collective. See `ParameterServer` for the arguments."""
        self.ledger: Ledger = Ledger()
        problem = ""
        self.engine: DataParallel | None = None
        world, self._mesh = Channel(comm, "server", self.ledger), Mesh(comm.split(comm.rank), dp=1)
        try:
            _check(plan, settings, comm.world_size)
            self.form: Form
            self.layouts: list[Layout]
            self.form, options = self.understand(model, loss, plan["servers"], settings)
            self._options, self.layouts = lay_out(self.form.model, options, plan["servers"])
            check_mesh(parameters_of(self.layouts), self._mesh)
        except ArgumentError as error:
            problem = str(error)
        if problems := gather_problems(problem, world):
            self._leave()
            raise ArgumentError(f"no parameter server was made: {problems}")
        facts = [f"{name}={describe(value)}" for name, value in plan.items()]
        facts += [f"{k}={describe(getattr(options, k))}" for k in _SETTINGS if k != "wrap"]
        check_structure(parameters_of(self.layouts), facts, world)
        workers = comm.world_size - plan["servers"]
        self.places: list[int] = [workers + s for s in spread(self.layouts, plan["servers"])]
        self.serves: bool = comm.rank >= workers
        self._rank = comm.rank
        self._groups = Groups(self._mesh, self.ledger)
        if self.serves:
            self._make_server(plan)
        else:
            self._make_worker(loss)

    def understand(
        self, model: Any, loss: Any, servers: int, settings: dict[str, Any]
    ) -> tuple[Form, Options]:
        """Return the form of parameters, and the options.

        Raises:
            ArgumentError: For what cannot be used.
        """
        if loss is not None and (isinstance(loss, type) or not isinstance(loss, Loss)):
            raise ArgumentError(f"loss={loss!r}; expected a loss, such as CrossEntropy()")
        options = Options(**{"bucket_bytes": _BUCKET_BYTES, "optimizer": SGD(), **settings})
        form = form_of(model, servers, int(options.bucket_bytes))
        return form, replace(options, precision=form.precision or options.precision)

    def make_engine(self, loss: Any, options: Options) -> DataParallel:
        """Make what runs the model on a worker."""
        return DataParallel(self.form.model, loss, self._mesh, options)

    def _make_server(self, plan: dict[str, Any]) -> None:
        options, groups = self._options, self._groups
        self.buckets: dict[int, Bucket] = {
            b: Bucket(layout, options.settings, groups)
            for b, layout in enumerate(self.layouts)
            if self.places[b] == self._rank
        }
        values.initialise(list(self.buckets.values()), groups, "trust")
        lead = {"sync": None, "async": math.inf, "ssp": plan["staleness"]}[plan["mode"]]
        lr, record = options.optimizer.lr, plan["record"]
        self.service = Service(self.buckets, options.order, lr, lead, record)

    def _make_worker(self, loss: Any) -> None:
        quiet = replace(self._options, optimizer=Remote(self._options.optimizer.lr), start="trust")
        if loss is None:
            made = [Bucket(layout, quiet.settings, self._groups) for layout in self.layouts]
        else:
            self._counted = Counted(loss)
            self._hook = Pushing(self._counted)
            self.engine = self.make_engine(self._counted, replace(quiet, hook=self._hook))
            made = self.engine.buckets
        self.buckets = dict(enumerate(made))
        self.worker = Worker(made, self.ledger)
        if self.engine is not None:
            self._hook.connect(self.worker, made)

    def step(self, micro_batches: Samples, lr: float) -> StepReport:
        """Compute gradients with the newest parameters, and push them."""
        assert self.engine is not None
        self.worker.settle()
        self._counted.samples, self._hook.lr = 0, lr
        report = self.engine.step(micro_batches)
        self.worker.end_step()
        return report

    def push(self, gradient: dict[str, np.ndarray], samples: float, lr: float) -> None:
        """Push a gradient that was checked."""
        self.worker.settle()
        for bucket in self.buckets.values():
            for entry in bucket.layout.entries:
                entry.view(bucket.gradients.kept)[...] = gradient[entry.parameter.name]
            check_finite(bucket.gradients.kept, bucket.layout)
        self.worker.announce(samples, lr)
        for b, bucket in self.buckets.items():
            self.worker.push(b, bucket.gradients.kept)
        self.worker.end_step()

    def checked(self, gradient: Any) -> dict[str, np.ndarray]:
        """Return a gradient by full names of parameters.

        Raises:
            ArgumentError: If it does not fit.
        """
        given = self.form.flat(gradient)
        shapes = {p.name: tuple(p.spec.shape) for p in parameters_of(self.layouts)}
        if odd := sorted(set(given) ^ set(shapes)):
            raise ArgumentError(f"the gradient is not one of these parameters: {', '.join(odd)}")
        for name, x in given.items():
            if x.shape != shapes[name] or x.dtype.kind not in "fiu":
                raise ArgumentError(
                    f"the gradient of {name} is {x.dtype} of shape {x.shape}; expected real "
                    f"numbers of shape {shapes[name]}"
                )
        return given

    def views(self) -> dict[str, np.ndarray]:
        """Return the parameters of this rank's buckets, which later steps change."""
        return {
            entry.parameter.name: entry.view(bucket.parameter.data)
            for bucket in self.buckets.values()
            for entry in bucket.layout.entries
        }

    def gather(
        self, comm: Communicator, places: Sequence[int], kind: str = "parameters"
    ) -> dict[str, np.ndarray]:
        """Return the servers' parameters or states on every rank, copied; a collective."""
        found: dict[str, np.ndarray] = {}
        for b, layout in enumerate(self.layouts):
            bucket, own = self.buckets.get(b), None
            if bucket is not None and kind == "parameters":
                own = bucket.parameter.data
            elif bucket is not None and self.serves:
                own = bucket.slots[kind]
            # Ordinary memory on every rank: not all have the bucket, which may be symmetric.
            data = np.empty(layout.padded, dtype_of(self._options.recipe.state))
            if own is not None:
                data[:] = own
            comm.broadcast(data, places[b])
            found |= {e.parameter.name: e.view(data).copy() for e in layout.entries}
        return found

    def state_dict(self, comm: Communicator, places: Sequence[int]) -> dict[str, Any]:
        """Return parameters and states of the optimizer on every rank; a collective."""
        steps = max(self.service.versions.values()) if self.serves else 0
        found = {"steps": int(comm.all_reduce(steps, "max")), "loss_scale": None, "hook": {}}
        return found | {kind: self.gather(comm, places, kind) for kind in self._kinds}

    def load_state_dict(self, comm: Communicator, saved: Any) -> None:
        """Load it; a collective."""
        world, problem = Channel(comm, "server", self.ledger), ""
        check_same([describe(saved)], "saved states", world)
        try:
            names = {p.name for p in parameters_of(self.layouts)}
            if not isinstance(saved, Mapping) or set(saved.get("parameters", ())) != names:
                raise ArgumentError("a state of other parameters, or none")
            if self.serves:
                self._restore(saved)
        except CollError as error:
            problem = str(error)
        if problems := gather_problems(problem, world):
            raise ArgumentError(f"the saved state was not loaded: {problems}")

    def _restore(self, saved: Mapping[str, Any]) -> None:
        own = {p.name for b in self.buckets for p in parameters_of([self.layouts[b]])}
        part = {
            kind: {name: x for name, x in saved[kind].items() if name in own}
            for kind in self._kinds
            if isinstance(saved.get(kind), Mapping)
        }
        made, scale = list(self.buckets.values()), self._options.scaling[0]
        steps, _ = values.restore(made, self._groups, scale, Hook(), {**saved, **part})
        self.service.versions = dict.fromkeys(self.buckets, steps)

    @property
    def _kinds(self) -> tuple[str, ...]:
        return ("parameters", *self._options.optimizer.slots)

    def close(self, error: BaseException | None = None) -> None:
        """Close the communicators of this rank alone."""
        if self.engine is not None:
            self.engine.close(error)
        self._groups.close(error)
        self._leave()

    def _leave(self) -> None:
        self._mesh.close()
        self._mesh.world.close()


def _check(plan: dict[str, Any], settings: dict[str, Any], ranks: int) -> None:
    """Refuse arguments of `ParameterServer` that cannot be used."""
    if unknown := sorted(set(settings) - set(_SETTINGS)):
        raise ArgumentError(
            f"{', '.join(unknown)}: not for parameter servers; accepted: {', '.join(_SETTINGS)}"
        )
    for name, accepted in (("mode", ("sync", "async", "ssp")), ("on_death", ("raise", "drop"))):
        if plan[name] not in accepted:
            raise ArgumentError(f"{name}={plan[name]!r}; accepted: {', '.join(accepted)}")
    if settings.get("precision", "fp32") not in ("fp32", "fp64"):
        raise ArgumentError(f"precision={settings['precision']!r}; accepted: fp32, fp64")
    check_number("servers", plan["servers"], "[1, inf)", whole=True)
    if plan["servers"] >= ranks:
        raise ArgumentError(f"servers={plan['servers']} of {ranks} ranks leave no worker")
    if plan["mode"] == "ssp":
        if plan["staleness"] is None:
            raise ArgumentError(
                "mode='ssp' needs staleness, the steps by which a worker may be ahead of the "
                "slowest: an integer in [0, inf)"
            )
        check_number("staleness", plan["staleness"], "[0, inf)", whole=True)
    elif plan["staleness"] is not None:
        raise ArgumentError(f"staleness is for mode='ssp', not {plan['mode']!r}")
    if plan["mode"] == "sync" and plan["on_death"] == "drop":
        raise ArgumentError(
            "on_death='drop': a sum that lacks a worker is another step; Elastic trains "
            "synchronously through deaths"
        )
