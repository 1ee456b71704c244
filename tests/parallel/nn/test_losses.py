"""Cross-entropy: against its definition and finite differences, on one rank and on several."""

import numpy as np
import pytest

from layer_checks import Recorder, distance, numeric_gradient, part
from pycoll.errors import ArgumentError
from pycoll.parallel.nn.layer import Loss
from pycoll.parallel.nn.losses import CrossEntropy
from pycoll.parallel.tensor.layers import VocabParallelCrossEntropy
from pycoll.testing import run_threads

RNG = np.random.default_rng(0)
LOGITS = RNG.standard_normal((3, 5, 8)) * 4
TARGETS = RNG.integers(0, 8, (3, 5))
SOME = np.where(RNG.random((3, 5)) < 0.4, -100, TARGETS)
NONE = np.full((3, 5), -100)
BATCHES = {"all": TARGETS, "some ignored": SOME, "all ignored": NONE}


def definition(logits, targets):
    odds = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    return sum(-np.log(odds[i][t]) for i, t in np.ndenumerate(targets) if t != -100)


@pytest.mark.parametrize("batch", BATCHES)
def test_value_and_gradient(batch):
    targets, loss = BATCHES[batch], CrossEntropy()
    assert isinstance(loss, Loss)
    total, count, saved = loss.forward(LOGITS, targets)
    assert count == (targets != -100).sum()
    assert total == pytest.approx(definition(LOGITS, targets), rel=1e-13)
    x = LOGITS.copy()
    numeric = numeric_gradient(lambda: definition(x, targets) * 0.3, x)
    assert distance(loss.backward(saved, 0.3) + 1, numeric + 1) < 1e-9
    assert distance(loss.backward(saved, 0.3) + 1, numeric + 1) < 1e-9  # may be asked again


def test_large_logits_do_not_overflow():
    logits = np.array([[1e4, 0, -1e4]], np.float32)
    total, _, saved = CrossEntropy().forward(logits, [1])
    assert total == 1e4
    np.testing.assert_array_equal(CrossEntropy().backward(saved, 1.0), [[1, -1, 0]])


@pytest.mark.parametrize("offset", [1e4, 1e8, -1e30])
def test_losses_do_not_depend_on_what_all_logits_have_in_common(run, offset):
    logits = np.array([[0, 0, 0, 0], [1, 0, 0, -1]], np.float32) * 64
    high, wanted = logits + np.float32(offset), [0, 3]
    differences = (high - high.max(axis=-1, keepdims=True)).astype(np.float64)
    expected = definition(differences, wanted)
    assert CrossEntropy().forward(high, wanted)[0] == pytest.approx(expected, rel=1e-6)

    def rank(comm):
        return VocabParallelCrossEntropy(comm).forward(part(high, -1, comm), wanted)[0]

    assert run(2, rank) == [pytest.approx(expected, rel=1e-6)] * 2


def test_half_precision_is_computed_in_single():
    logits = LOGITS.astype(np.float16)
    total, _, saved = CrossEntropy().forward(logits, TARGETS)
    assert total == pytest.approx(definition(logits.astype(np.float64), TARGETS), rel=1e-6)
    assert CrossEntropy().backward(saved, 1.0).dtype == np.float16


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("batch", BATCHES)
def test_split_over_ranks(run, n, batch):
    targets = BATCHES[batch]

    def rank(comm, dtype):
        comm = Recorder(comm)
        loss, logits = VocabParallelCrossEntropy(comm), part(LOGITS.astype(dtype), -1, comm)
        total, count, saved = loss.forward(logits, targets)
        nbytes = logits.itemsize * targets.size
        assert comm.calls == [("all_reduce", nbytes)] * 3
        gradient = loss.backward(saved, 0.3)
        assert len(comm.calls) == 3
        return total, count, gradient

    for dtype, tolerance in ((np.float32, 1e-6), (np.float64, 1e-13)):
        want, want_count, saved = CrossEntropy().forward(LOGITS.astype(dtype), targets)
        found = run(n, rank, dtype)
        whole = np.concatenate([gradient for _, _, gradient in found], axis=-1)
        wanted = CrossEntropy().backward(saved, 0.3)
        assert whole.dtype == dtype
        assert distance(whole, wanted) < tolerance or (not wanted.any() and not whole.any())
        for total, count, _ in found:
            assert (total, count) == (pytest.approx(want, rel=tolerance), want_count)
        assert len({total for total, _, _ in found}) == 1


def test_a_token_may_be_the_one_that_does_not_count():
    want, count, saved = CrossEntropy(ignore_index=1).forward(LOGITS, TARGETS)
    gradient = CrossEntropy().backward(saved, 1.0)
    kept = TARGETS != 1
    assert count == kept.sum() < TARGETS.size
    assert want == pytest.approx(definition(LOGITS[kept], TARGETS[kept]), rel=1e-13)
    assert not gradient[~kept].any()

    def rank(comm):
        loss = VocabParallelCrossEntropy(comm, ignore_index=1)
        total, number, saved = loss.forward(part(LOGITS, -1, comm), TARGETS)
        assert (total, number) == (pytest.approx(want, rel=1e-13), count)
        assert distance(loss.backward(saved, 1.0), part(gradient, -1, comm)) < 1e-13

    run_threads(2, rank)


@pytest.mark.parametrize(
    ("targets", "text"),
    [
        (np.zeros((3, 4), int), r"targets have shape \(3, 4\), but logits"),
        (np.full((3, 5), 8), r"targets holds 8, expected integers of \[0, 8\)"),
        (np.full((3, 5), -1), r"targets holds -1"),
    ],
)
def test_refusals(targets, text):
    with pytest.raises(ArgumentError, match=text):
        CrossEntropy().forward(LOGITS, targets)
