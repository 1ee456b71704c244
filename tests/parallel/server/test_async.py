"""Pushes that are applied when they come: a serial simulation has the same bits; bounds hold."""

import random
import threading
import time
from collections import Counter, defaultdict

import numpy as np
import pytest

from parallel import serial
from parallel.models import CrossEntropy, Linear, Relu, batches, mlp
from pycoll.parallel import SGD, ParameterServer, Sequential
from pycoll.testing import run_processes, run_threads

STEPS = 6


def sample(worker, step):
    return batches(1, seed=100 * worker + step)[0]


def simulate(orders, buckets, workers):
    """Do what workers and servers did, one after the other; return parameters and staleness.

    `orders` are those of all servers, `buckets` the names of parameters by bucket.
    """
    model, loss = mlp(), CrossEntropy()
    params = serial.first_values(model)
    optimizers = [serial.SGD(0.05) for _ in buckets]
    views = [dict(params) for _ in range(workers)]
    versions, seen, staleness = Counter(), {}, Counter()
    pulls, pushes, grads = Counter(), Counter(), {}
    places = [0] * len(orders)

    def gradient(w, step):
        if (w, step) not in grads:
            assert all(pulls[w, b] == step + 1 for b in range(len(buckets)))
            grads[w, step] = serial.gradients(model, loss, views[w], sample(w, step))
        return grads[w, step]

    def advance(what, w, b):
        if what == "pull":
            views[w] |= {name: params[name].copy() for name in buckets[b]}
            pulls[w, b] += 1
            seen[w, b] = versions[b]
            return True
        step = pushes[w, b]
        if any(pulls[w, c] <= step for c in range(len(buckets))):
            return False  # parameters that another server has sent come first
        _, count, found = gradient(w, step)
        own = {name: params[name] for name in buckets[b]}
        optimizers[b].step(own, found, 1 / count, ())
        params.update(own)
        pushes[w, b] += 1
        staleness[versions[b] - seen[w, b]] += 1
        versions[b] += 1
        return True

    while any(place < len(order) for place, order in zip(places, orders, strict=True)):
        before = list(places)
        for s, order in enumerate(orders):
            while places[s] < len(order) and advance(*order[places[s]]):
                places[s] += 1
        assert places != before
    return params, staleness


def train(comm, servers, mode, staleness):
    dice = random.Random(comm.rank)
    with ParameterServer(
        comm,
        mlp(),
        CrossEntropy(),
        servers=servers,
        mode=mode,
        staleness=staleness,
        optimizer=SGD(0.05, momentum=0.9),
        bucket_bytes=700,
        record=True,
    ) as ps:
        if ps.serves:
            ps.serve()
        else:
            for step in range(STEPS):
                time.sleep(dice.uniform(0, 0.004) * (1 + ps.worker))
                ps.step([sample(ps.worker, step)])
            ps.finish()
        names = [[e.parameter.name for e in layout.entries] for layout in ps._parts.layouts]
        return ps.gather(), ps.report(), names, ps.order if ps.serves else None


@pytest.mark.parametrize(
    ("run", "servers", "mode", "staleness"),
    [
        (run_threads, 1, "async", None),
        (run_processes, 2, "async", None),
        (run_threads, 2, "ssp", 1),
        (run_processes, 1, "ssp", 0),
    ],
)
def test_a_serial_simulation_of_the_recorded_order_has_the_same_bits(run, servers, mode, staleness):
    workers = 3
    results = run(workers + servers, train, servers, mode, staleness)
    names, orders = results[0][2], [result[3] for result in results[workers:]]
    expected, seen = simulate(orders, names, workers)
    for parameters, report, _, _ in results:
        assert report.staleness == seen
        assert report.updates == STEPS * workers * len(names) == sum(report.lead.values())
        for name, x in expected.items():
            np.testing.assert_array_equal(parameters[name], x)
    if staleness is not None:
        assert max(results[0][1].lead) <= staleness
    for order in orders:  # as they say it themselves
        leads, clocks = Counter(), defaultdict(Counter)
        for what, w, b in order:
            if what == "push":
                clock = clocks[b]
                leads[clock[w] - min(clock[w] for w in range(workers))] += 1
                clock[w] += 1
        assert sum(leads.values()) == STEPS * workers * len(clocks)


@pytest.mark.parametrize("bound", [0, 1, 3])
def test_nobody_is_more_than_so_many_steps_ahead(bound):
    """Worker 1 waits until worker 0 is as far ahead as it may be; it comes no further."""
    ahead, goes_on = threading.Event(), threading.Event()

    def rank(comm):
        with ParameterServer(
            comm, np.zeros(5), mode="ssp", staleness=bound, optimizer=SGD(1.0)
        ) as ps:
            if ps.serves:
                return ps.serve().lead
            if ps.worker == 1:
                assert ahead.wait(10)
                ps.pull()
                assert not goes_on.wait(0.05)  # worker 0 cannot go on before this push
            for step in range(bound + 2):
                ps.pull()
                if ps.worker == 0 and step == bound + 1:
                    goes_on.set()
                ps.push(np.ones(5))
                if ps.worker == 0 and step == bound:
                    ahead.set()
            ps.finish()

    lead = run_threads(3, rank)[2]
    assert max(lead) == bound
    assert sum(lead.values()) == 2 * (bound + 2)


def test_without_a_bound_a_worker_runs_ahead():
    done = threading.Event()

    def rank(comm):
        with ParameterServer(comm, np.zeros(5), mode="async", optimizer=SGD(1.0)) as ps:
            if ps.serves:
                ps.serve()
            else:
                if ps.worker == 1:
                    ps.pull()
                    assert done.wait(10)
                for _ in range(4 - 3 * ps.worker):
                    ps.push(np.ones(5))
                ps.pull()
                done.set()
                ps.finish()
            return ps.report(), ps.gather().tolist()

    for report, found in run_threads(3, rank):
        assert found == [-5.0] * 5
        assert report.lead == {0: 2, 1: 1, 2: 1, 3: 1}
        assert report.staleness == {0: 4, 4: 1}


def test_gradients_leave_while_the_backward_pass_goes_on():
    """The first layer waits in its backward pass for an update of the last one's bucket."""
    updated = threading.Event()

    class Telling(SGD):
        def update(self, args, fused=True):
            super().update(args, fused)
            updated.set()

    class Waiting(Linear):
        def backward_weight(self, params, saved, dy):
            assert updated.wait(10)
            return super().backward_weight(params, saved, dy)

    def rank(comm):
        layers = [("a", Waiting(7, 9, 0)), ("relu", Relu()), ("b", Linear(9, 5, 1))]
        with ParameterServer(
            comm,
            Sequential(layers),
            CrossEntropy(),
            mode="async",
            optimizer=Telling(0.1),
            bucket_bytes=200,
        ) as ps:
            if ps.serves:
                return ps.serve().updates
            ps.step([sample(0, 0)])
            return ps.finish()

    assert run_threads(2, rank)[1] > 1
