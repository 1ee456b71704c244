"""Parameter servers for PyTorch modules: the bits of data parallelism, and what is refused."""

import threading

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from pycoll.errors import ArgumentError  # noqa: E402
from pycoll.parallel import SGD, Mesh  # noqa: E402
from pycoll.testing import run_threads  # noqa: E402
from pycoll.torch.data_parallel import DataParallel  # noqa: E402
from pycoll.torch.parameter_server import ParameterServer  # noqa: E402

LOCK = threading.Lock()  # ranks are threads here, and PyTorch has one generator
OPTIMIZER = SGD(0.1, momentum=0.9)


def module():
    with LOCK:
        torch.manual_seed(3)
        return torch.nn.Sequential(torch.nn.Linear(8, 19), torch.nn.Tanh(), torch.nn.Linear(19, 5))


def loss(output, targets):
    return torch.nn.functional.cross_entropy(output, targets, reduction="sum"), len(targets)


def batch(step, place):
    rng = np.random.default_rng([step, place])
    x, y = rng.standard_normal((6, 8)).astype("f4"), rng.integers(0, 5, 6)
    return torch.from_numpy(x), torch.from_numpy(y)


def data_parallel(comm):
    with DataParallel(module(), loss, Mesh(comm, dp=-1), optimizer=OPTIMIZER) as engine:
        for step in range(4):
            engine.step([batch(step, comm.rank)])
        return engine.gather()


@pytest.mark.parametrize("servers", [1, 2])
def test_sums_are_those_of_data_parallelism(servers):
    def rank(comm):
        own = module()
        with ParameterServer(
            comm, own, loss, servers=servers, optimizer=OPTIMIZER, bucket_bytes=200
        ) as ps:
            if ps.serves:
                ps.serve()
            else:
                for step in range(4):
                    assert np.isfinite(ps.step([batch(step, comm.rank)]).loss)
                pulled = ps.pull()
                for name, p in own.named_parameters():
                    np.testing.assert_array_equal(pulled[f"{name}"], p.detach().numpy())
                ps.finish()
            return ps.gather()

    expected = run_threads(2, data_parallel)[0]
    for found in run_threads(2 + servers, rank):
        for name, x in expected.items():
            np.testing.assert_array_equal(found[name], x)


def test_bounded_staleness_learns():
    def rank(comm):
        options = {"mode": "ssp", "staleness": 2, "optimizer": SGD(0.05)}
        with ParameterServer(comm, module(), loss, **options) as ps:
            if ps.serves:
                ps.serve()
                return ps.report()
            losses = [ps.step([batch(0, comm.rank)]).loss for _ in range(30)]
            ps.finish()
            assert losses[-1] < 0.8 * losses[0]
            return ps.report()

    report = run_threads(3, rank)[0]
    assert max(report.lead) <= 2
    assert report.updates == 60


def test_refused():
    def rank(comm):
        for wrong, text in (((3, loss), "is a int"), ((module(), 3), "expected a function")):
            with pytest.raises(ArgumentError, match=text):
                ParameterServer(comm, *wrong)

    run_threads(2, rank)
