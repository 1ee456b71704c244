"""Parameter servers that add up what workers push: the bits of data parallelism."""

from functools import partial

import numpy as np
import pytest

from parallel.engine.test_data_parallel import digest
from parallel.models import CrossEntropy, batches, mlp
from pycoll.errors import ArgumentError, MismatchError, PeerLost
from pycoll.parallel import SGD, AdamW, DataParallel, Mesh, ParameterServer
from pycoll.parallel.optim import UpdateArgs
from pycoll.testing import run_processes, run_threads

STEPS, MICRO = 3, 2
OPTIMIZER = AdamW(lr=0.01)


def own(step, worker, workers):
    return batches(workers * MICRO, seed=step)[worker * MICRO :][:MICRO]


def data_parallel(comm, order, steps=range(STEPS), state=None):
    with DataParallel(
        mlp(), CrossEntropy(), Mesh(comm, dp=-1), optimizer=OPTIMIZER, order=order
    ) as engine:
        if state is not None:
            engine.load_state_dict(state)
        for step in steps:
            engine.step(own(step, comm.rank, comm.world_size))
        return engine.gather()


def served(comm, order="tree", servers=1, steps=range(STEPS), **options):
    options = {"optimizer": OPTIMIZER, "bucket_bytes": 700, **options}
    with ParameterServer(
        comm, mlp(), CrossEntropy(), servers=servers, order=order, **options
    ) as ps:
        if ps.serves:
            ps.serve()
        else:
            for step in steps:
                ps.step(own(step, ps.worker, ps.workers))
            ps.finish()
        return ps.gather(), ps.report(), ps.state_dict()


@pytest.mark.parametrize("order", ["tree", "rank"])
@pytest.mark.parametrize(("workers", "servers"), [(1, 1), (3, 2), (4, 1)])
def test_sums_are_those_of_data_parallelism(order, workers, servers):
    expected = run_threads(workers, data_parallel, order)[0]
    for parameters, report, _ in run_threads(workers + servers, served, order, servers):
        for name, x in expected.items():
            np.testing.assert_array_equal(parameters[name], x)
        assert report.updates == STEPS * 3
        assert report.staleness == report.lead == {0: workers * STEPS * 3}


def test_processes_and_two_servers():
    expected = run_threads(2, data_parallel, "tree")[0]
    for parameters, _, _ in run_processes(4, served, "tree", 2):
        for name, x in expected.items():
            np.testing.assert_array_equal(parameters[name], x)


def test_a_state_goes_on_with_servers_and_without():
    """Three steps, then two: in two rounds, on other servers, and with data parallelism."""
    expected = run_threads(2, partial(data_parallel, steps=range(5)), "tree")[0]
    state = run_threads(3, served)[0][2]

    def go_on(comm):
        with ParameterServer(
            comm, mlp(), CrossEntropy(), servers=2, optimizer=OPTIMIZER, bucket_bytes=700
        ) as ps:
            with pytest.raises(ArgumentError, match="not loaded: all ranks have a state of other"):
                ps.load_state_dict({**state, "parameters": {}})
            ps.load_state_dict(state)
            for step in (3, 4):
                if ps.serves:
                    ps.serve()
                else:
                    ps.step(own(step, ps.worker, ps.workers))
                    ps.finish()
            return ps.gather()

    found = run_threads(4, go_on)
    found += run_threads(2, partial(data_parallel, steps=(3, 4), state=state), "tree")
    for parameters in found:
        for name, x in expected.items():
            np.testing.assert_array_equal(parameters[name], x)


def gradient(x, step, worker):
    return (x * np.cos(step + worker) + worker).astype(x.dtype)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(("shape", "servers"), [((37,), 1), ((5, 9), 3), (None, 2)])
def test_arrays(dtype, shape, servers):
    workers, optimizer = 2, SGD(0.1, momentum=0.9)
    start = {"a": np.linspace(-1, 1, 20, dtype=dtype).reshape(4, 5), "b": np.ones(19, dtype)}
    given = start if shape is None else np.linspace(-1, 1, 45, dtype=dtype)[: np.prod(shape)]
    given = given if shape is None else given.reshape(shape)

    def rank(comm):
        with ParameterServer(
            comm, given, servers=servers, optimizer=optimizer, bucket_bytes=100
        ) as ps:
            if ps.serves:
                ps.serve()
            for step in () if ps.serves else range(STEPS):
                x = ps.pull()
                g = partial(gradient, step=step, worker=ps.worker)
                change = {k: g(v) for k, v in x.items()} if shape is None else g(x)
                ps.push(change, samples=3, lr=0.1 / (step + 1))
            if not ps.serves:
                sent = ps.ledger.wire["gradient", "server"]
                assert sent >= STEPS * sum(np.asarray(v).nbytes for v in _values(given))
                ps.finish()
            return ps.gather()

    expected = [x.copy() for x in _values(given)]
    for x in expected:
        slots = {"momentum": np.zeros_like(x)}
        for step in range(STEPS):
            total = gradient(x, step, 0) + gradient(x, step, 1)
            args = UpdateArgs(step + 1, 0.1 / (step + 1), x, total, slots, 1 / (3 * workers))
            optimizer.update(args, fused=False)
    for found in run_threads(workers + servers, rank):
        for mine, theirs in zip(_values(found), expected, strict=True):
            assert mine.shape == theirs.shape
            np.testing.assert_array_equal(mine, theirs)


def _values(x):
    return list(x.values()) if isinstance(x, dict) else [x]


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"servers": 2}, "leave no worker"),
        ({"servers": 0}, "servers=0"),
        ({"mode": "fast"}, "accepted: sync, async, ssp"),
        ({"mode": "ssp"}, "mode='ssp' needs staleness"),
        ({"mode": "ssp", "staleness": -1}, "staleness=-1; accepted are integers"),
        ({"staleness": 1}, "staleness is for mode='ssp'"),
        ({"on_death": "drop"}, "Elastic trains"),
        ({"clip_norm": 1.0}, "clip_norm: not for parameter servers"),
        ({"precision": "fp16"}, "accepted: fp32, fp64"),
        ({"optimizer": 3}, "expected an optimizer"),
        ({"model": np.arange(3)}, "expected float32 or float64"),
        ({"model": np.zeros(0)}, "without elements"),
        ({"model": {}}, "no arrays"),
        ({"model": 3}, "the model is an int"),
        ({"model": [1.0]}, "), a NumPy array, or arrays by name"),
        ({"loss": 3}, "expected a loss"),
    ],
)
def test_refused_on_every_rank(wrong, text):
    """Also if one rank alone is wrong; the communicator stays usable."""

    def rank(comm):
        for odd in (0, 1):
            arguments = {"model": mlp(), "loss": CrossEntropy()}
            arguments |= wrong if comm.rank == odd else {}
            with pytest.raises(ArgumentError, match="no parameter server was made: rank") as raised:
                ParameterServer(comm, **arguments)
            assert text in str(raised.value)
        return int(comm.all_reduce(1))

    assert run_threads(2, rank) == [2, 2]


def test_what_differs():
    def rank(comm):
        with pytest.raises(MismatchError, match="mode="):
            ParameterServer(comm, np.zeros(4), mode="async" if comm.rank else "sync")
        with pytest.raises(MismatchError, match=r"of shape \(\d,\); rank"):
            ParameterServer(comm, {"a": np.zeros(4 + comm.rank)})

    run_threads(2, rank)


def test_a_push_that_is_refused_changes_nothing():
    def rank(comm):
        with ParameterServer(comm, np.zeros(6), servers=1, optimizer=SGD(1.0)) as ps:
            if ps.serves:
                for call in (ps.pull, ps.finish, lambda: ps.push(np.zeros(6))):
                    with pytest.raises(ArgumentError, match="a server: it calls serve"):
                        call()
                ps.serve()
            else:
                bad = np.array([0, 1, np.nan, 0, 0, 0])
                for wrong in (np.zeros(5), "abc", bad, np.zeros(6, complex)):
                    with pytest.raises(ArgumentError, match="gradient"):
                        ps.push(wrong)
                for keywords in ({"samples": 0}, {"lr": -1}):
                    with pytest.raises(ArgumentError):
                        ps.push(np.zeros(6), **keywords)
                with pytest.raises(ArgumentError, match="which was given no loss"):
                    ps.step([])
                ps.push(np.ones(6))
                with pytest.raises(ArgumentError, match="call finish first"):
                    ps.gather()
                ps.finish()
            return ps.gather().tolist()

    assert run_threads(2, rank) == [[-1.0] * 6] * 2


def test_a_worker_that_forgets_to_finish():
    """The server is told what happened, not that a peer has closed."""

    def rank(comm):
        with ParameterServer(comm, np.zeros(2), optimizer=SGD(0.1)) as ps:
            if ps.serves:
                with pytest.raises(PeerLost, match="worker 0 was closed before it called finish"):
                    ps.serve()
            else:
                ps.push(np.ones(2))

    run_processes(2, rank)


class Lazy:
    """Micro-batches that are made when they are taken; the last one is none."""

    def __len__(self):
        return 2

    def __getitem__(self, j):
        return batches(1)[0] if j == 0 else None


def test_nothing_is_pushed_of_a_step_with_a_micro_batch_that_is_none():
    def rank(comm):
        with ParameterServer(comm, mlp(), CrossEntropy(), optimizer=SGD(0.1)) as ps:
            if ps.serves:
                return ps.serve().updates
            with pytest.raises(ArgumentError, match="not taken: a NoneType as micro-batch 1 of 2"):
                ps.step(Lazy())
            ps.step(batches(1))
            ps.finish()
            return 1

    assert run_threads(2, rank) == [1, 1]


def test_calls_that_are_not_for_a_rank():
    def rank(comm):
        with ParameterServer(comm, np.zeros(2), optimizer=SGD(0.1)) as ps:
            call = (lambda: ps.push(np.ones(2))) if ps.serves else ps.serve
            with pytest.raises(ArgumentError, match=r"is not for rank \d, (a server|worker 0)"):
                call()
            if ps.serves:
                return ps.serve().updates
            with pytest.raises(ArgumentError, match="given no loss: it calls pull and push"):
                ps.step([(np.ones((1, 2)), np.ones(1))])
            with pytest.raises(ArgumentError, match="is a dict; expected an array of"):
                ps.push({"w": np.ones(2)})
            ps.finish()
            return 0

    assert run_threads(2, rank) == [0, 0]


def test_a_loss_that_is_not_finite_is_not_pushed():
    def rank(comm):
        with ParameterServer(comm, mlp(), CrossEntropy(), optimizer=SGD(0.1)) as ps:
            if ps.serves:
                return ps.serve().updates
            (x, y), *_ = own(0, 0, 1)
            with pytest.raises(ArgumentError, match="nothing of this step was pushed"):
                ps.step([(x * np.float32(np.nan), y)])
            with pytest.raises(ArgumentError, match="no rank has a micro-batch"):
                ps.step([])
            ps.step([(x, y)])
            return ps.finish()

    assert run_threads(2, rank) == [None, 1]


@pytest.mark.parametrize(("layer", "pushed"), [("linear2", False), ("linear0", True)])
def test_a_gradient_that_is_not_finite(layer, pushed):
    """If a part of the step was pushed, the worker leaves with the error; else it can go on."""

    def rank(comm):
        model = mlp()
        odd = dict(model.layers)[layer]
        odd.backward_weight = lambda params, saved, dy: {"weight": np.full(odd.shape, np.inf)}
        with ParameterServer(comm, model, CrossEntropy(), bucket_bytes=700) as ps:
            if ps.serves and pushed:
                with pytest.raises(PeerLost, match="is not finite"):
                    ps.serve()
            elif ps.serves:
                assert ps.serve().updates == 0
            else:
                with pytest.raises(ArgumentError, match=f"gradient of {layer}.* is not finite"):
                    ps.step(own(0, 0, 1))
                if not pushed:
                    ps.finish()

    run_threads(2, rank)


def test_rates_that_differ():
    def rank(comm):
        with ParameterServer(comm, np.zeros(3)) as ps:
            if ps.serves:
                ps.serve()
            ps.push(np.ones(3), lr=0.5 / (1 + comm.rank))
            ps.finish()

    def failing(comm):
        with pytest.raises((MismatchError, PeerLost), match=r"rank 0: 0\.5; rank 1: 0\.25"):
            rank(comm)

    run_threads(3, failing)


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("count", [10, 5_000, 200_000])
def test_gathering_from_several_servers(mode, count):
    """Buckets of which only one server has the states, of all sizes, in symmetric memory or not."""

    def rank(comm):
        first = {"w": np.ones(3, "f4"), "big": np.zeros(count, "f4")}
        options = {"servers": 2, "mode": mode, "optimizer": SGD(0.5), "bucket_bytes": 4096}
        with ParameterServer(comm, first, **options) as server:
            if server.serves:
                server.serve()
            else:
                for _ in range(2):
                    server.push({k: np.ones_like(v) for k, v in server.pull().items()})
                server.finish()
            found = server.gather()
            parameters = server.state_dict()["parameters"].items()
            saved = {name.removeprefix("given."): x for name, x in parameters}
            for each in (found, saved):
                assert {k: v.shape for k, v in each.items()} == {"w": (3,), "big": (count,)}
            return [digest(each) for each in (found, saved)] + [float(found["w"][0])]

    results = run_processes(4, rank)
    assert results == results[:1] * 4
    assert results[0][0] == results[0][1]
