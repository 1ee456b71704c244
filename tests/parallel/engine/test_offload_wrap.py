"""Offload where layers work on arrays of another library, which `wrap` makes."""

from functools import partial

import numpy as np
import pytest

from pycoll.errors import ArgumentError
from pycoll.parallel import DataParallel, Mesh, Options, estimate
from pycoll.parallel.channels import Ledger
from pycoll.parallel.engine.offload import Offloaded
from pycoll.parallel.gpt import GPT
from pycoll.parallel.nn import TransformerConfig
from pycoll.parallel.state.storage import Storage
from pycoll.testing import run_threads


def wrapped(comm, wrap, **options):
    """Train a GPT on arrays of another library; return parameters, and the last report."""
    network = GPT(
        TransformerConfig(vocabulary=32, features=32, heads=2, depth=3, length=16), seed=1
    )
    tokens = np.random.default_rng(0).integers(0, 32, (3, 4, 17))
    options = {"wrap": wrap, "zero": 1, **options}
    with (
        Mesh(comm, dp=-1) as mesh,
        DataParallel(network, network.loss(), mesh, **options) as engine,
    ):
        reports = [engine.step([(rows[:, :-1], rows[:, 1:])] * 2) for rows in tokens]
        sample = tokens[0][:, :-1], None
        told = estimate(network, mesh=mesh, micro_batches=2, sample=sample, **options)
        return engine.gather(), reports[-1], told


@pytest.mark.parametrize("library", ["array_api_strict", "torch", ""])
@pytest.mark.parametrize("offload", ["activations", "optimizer", "all"])
def test_arrays_of_another_library_have_the_same_bits(library, offload):
    """Where layers keep wrapped arrays, these are moved and wrapped again."""
    other = pytest.importorskip(library, reason=f"{library} is not installed") if library else None
    pytest.importorskip("array_api_compat", reason="array-api-compat is not installed")
    wrap = getattr(other, "from_numpy", getattr(other, "asarray", np.ndarray.view))
    for recompute in ("none", 2):
        expected = run_threads(2, partial(wrapped, recompute=recompute), wrap)[0][0]
        more = {"recompute": recompute, "offload": offload}
        for found, report, told in run_threads(2, partial(wrapped, **more), wrap):
            for name, value in expected.items():
                assert found[name].tobytes() == value.tobytes()
            assert (report.stored.get("activation", 0) > 0) == (offload != "optimizer")
            assert told.peak == pytest.approx(report.peak_bytes, rel=0.01)
            assert told.stored_activation == report.stored.get("activation", 0)


def test_what_cannot_be_shared_stays():
    """As tensors that belong to a graph: NumPy cannot have their memory."""

    class Array:
        def __init__(self, data, alone=False):
            self.data, self.alone = data, alone

        def __array__(self, dtype=None, copy=None):
            if self.alone:
                raise RuntimeError("it needs a gradient")
            return self.data

    ledger = Ledger()
    kept = Offloaded(Storage(None), ledger, Array)
    free, alone = Array(np.arange(1000.0)), Array(np.arange(1000.0), alone=True)
    packed = kept.put([free, alone])
    assert ledger.stored["activation"] == ledger.live["activation"] == free.data.nbytes
    found = kept.take(packed)
    assert type(found[0]) is Array
    assert (found[0].data == free.data).all()
    assert found[1] is alone


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {"wrap": np.copy},
            "and wrap=.*copy.*: numpy.asarray does not give the memory",
        ),
        ({"wrap": list.sort}, "and wrap=.* fails .* TypeError"),
        ({"wrap": memoryview, "device": "cuda"}, "and wrap=.* layers have to keep arrays of CuPy"),
    ],
)
@pytest.mark.parametrize("offload", ["activations", "all"])
def test_what_is_refused_names_both(options, text, offload):
    text = f"offload='{offload}' {text}.*; offload='optimizer' goes with every wrap"
    with pytest.raises(ArgumentError, match=text):
        Options(offload=offload, **options)
    Options(offload="optimizer", **options)
