"""A GPT on the engine: every mesh and stage trains the model of one rank."""

import numpy as np
import pytest

from parallel.gpt_training import BATCH, SIZE, WHOLE, train
from pycoll.parallel import AdamW, DataParallel, Ledger, Mesh
from pycoll.parallel.channels import Metered
from pycoll.parallel.gpt import GPT, TransformerConfig
from pycoll.testing import RankFailed, run_processes, run_threads


def run_one(options):
    return run_threads(1, lambda comm: train(comm, {}, **options), timeout=60)


def everywhere(n, axes, **options):
    return run_processes(n, lambda comm: train(comm, axes, **options), timeout=60)


@pytest.mark.parametrize("tied", [False, True])
def test_it_learns(tied):
    ((losses, norms, _),) = run_one({"tied": tied})
    assert losses[0] == pytest.approx(np.log(12), rel=0.05)
    assert losses[-1] < 0.7 * losses[0]
    assert max(norms) > 0.5  # clipping has had work to do


@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize(
    ("n", "axes", "zero"),
    [
        (2, {"dp": 2}, 0),
        (4, {"dp": 4}, 1),
        (4, {"dp": 4}, 3),
        (4, {"replica": 2, "dp": 2}, 1),
    ],
)
def test_data_parallel_meshes_give_the_same_bits(n, axes, zero, dropout):
    """Also with dropout: masks follow the samples."""
    ((losses, norms, params),) = run_one({"steps": 10, "dropout": dropout})
    for got in everywhere(n, axes, steps=10, zero=zero, dropout=dropout):
        assert got[:2] == (losses, norms)
        assert {name: a.tobytes() for name, a in got[2].items()} == {
            name: a.tobytes() for name, a in params.items()
        }


@pytest.fixture(scope="module")
def one_rank():
    (found,) = run_one({})
    return found


@pytest.mark.parametrize(
    ("zero", "sequence_parallel"), [(0, True), (1, False), (2, True), (3, True), (3, False)]
)
def test_two_by_two(one_rank, zero, sequence_parallel):
    """50 steps on dp=2, tp=2, with clipping: losses, norms and parameters of one rank."""
    losses, norms, params = one_rank
    found = everywhere(4, {"dp": 2, "tp": 2}, zero=zero, sequence_parallel=sequence_parallel)
    for got_losses, got_norms, got in found:
        np.testing.assert_allclose(got_losses, losses, rtol=1e-5)
        np.testing.assert_allclose(got_norms[0], norms[0], rtol=1e-6)
        np.testing.assert_allclose(got_norms, norms, rtol=1e-3)
        assert {k: a.shape for k, a in got.items()} == {k: a.shape for k, a in params.items()}
    digests = {b"".join(a.tobytes() for a in got.values()) for *_, got in found}
    assert len(digests) == 1


@pytest.mark.parametrize("axes", [{"tp": 2}, {"tp": 4}, {"dp": 2, "tp": 2}])
def test_tensor_parallel_training_in_double_precision(axes):
    """Ten steps with dropout, tied ends and a split sequence stay within rounding of one rank."""
    n = int(np.prod(list(axes.values())))
    options = {"steps": 10, "dropout": 0.2, "tied": True, "dtype": "float64"}
    ((losses, norms, params),) = run_one(options)
    for got_losses, got_norms, got in everywhere(n, axes, sequence_parallel=True, **options):
        np.testing.assert_allclose(got_losses, losses, rtol=1e-10)
        np.testing.assert_allclose(got_norms, norms, rtol=1e-10)
        for name, value in params.items():
            np.testing.assert_allclose(got[name], value, rtol=0, atol=1e-8, err_msg=name)


def test_torch_tensors_on_the_engine():
    pytest.importorskip("array_api_compat", reason="array-api-compat is not installed")
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    ((losses, *_),) = run_one({"steps": 10})

    def rank(comm):
        torch.set_num_threads(1)
        return train(comm, {"dp": 2}, steps=10, zero=3, wrap=torch.from_numpy)[0]

    for got in run_threads(2, rank, timeout=60):
        np.testing.assert_allclose(got, losses, rtol=1e-5)


def test_the_meter_counts_what_layers_send():
    """The boundaries of a model of two blocks: bytes of docs/layers.md."""

    def rank(comm):
        ledger = Ledger()
        config = TransformerConfig(**SIZE, comm=Metered(comm, ledger))
        model = GPT(config, seed=3)
        engine = DataParallel(model, model.loss(), Mesh(comm, tp=comm.world_size))
        rows = WHOLE[0]
        engine.step([(rows[:, :-1], rows[:, 1:])])
        engine.close()
        return dict(ledger.wire), dict(ledger.calls), ledger.waits["activation"]

    n, activation, column = 2, BATCH * 8 * 16 * 4, BATCH * 8 * 4
    for wire, calls, waited in run_processes(n, rank):
        assert wire == {("activation", "tp"): (10 * activation + 3 * column) * 2 * (n - 1) // n}
        assert calls == {("activation", "tp", "all_reduce"): 13}
        assert waited > 0


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_split_layers_on_a_mesh_without_tensor_parallelism(sequence_parallel):
    """One rank to split over is no split: the same program gives the same bits."""
    ((losses, *_),) = run_one({"steps": 3})

    def rank(comm):
        mesh = Mesh(comm, dp=2, tp=1)
        config = TransformerConfig(**SIZE, comm=mesh.tp, sequence_parallel=sequence_parallel)
        model = GPT(config, seed=3)
        engine = DataParallel(
            model, model.loss(), mesh, optimizer=AdamW(lr=3e-3), clip_norm=0.5, zero=1
        )
        rows = [WHOLE[step].reshape(2, 2, 2, 9)[comm.rank] for step in range(3)]
        with mesh:
            found = [engine.step([(r[:, :-1], r[:, 1:]) for r in halves]) for halves in rows]
            engine.close()
        return [report.loss for report in found]

    assert run_threads(2, rank, timeout=60) == [losses] * 2


@pytest.mark.parametrize("start", ["check", "broadcast", "trust"])
def test_a_model_on_the_wrong_axis_of_the_mesh(start):
    """Layers split over ``dp`` instead of ``tp``, of the same size: replicas are none."""

    def rank(comm):
        mesh = Mesh(comm, dp=2, tp=2)
        model = GPT(TransformerConfig(**SIZE, comm=mesh.dp), seed=3)
        DataParallel(model, model.loss(), mesh, start=start)

    with pytest.raises(
        RankFailed, match=r"MismatchError: parameter \S+\.weight differs .* rank"
    ) as told:
        run_threads(4, rank)
    assert "split over the mesh's tp axis, not over another" in str(told.value)
