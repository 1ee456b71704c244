"""Dispatch and combine of mixtures of experts, against one process that has all experts."""

import pytest

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402

from pycoll.torch import BackendArgumentError  # noqa: E402
from pycoll.torch.inference import combine, dispatch  # noqa: E402
from worlds_torch import run_group  # noqa: E402

HIDDEN, EXPERTS = 6, 12
TOKENS = {2: [5, 3], 3: [4, 0, 9], 4: [1, 8, 2, 7]}


def problem(n, k, dtype):
    """Return the tokens, experts and weights of each rank."""
    made = torch.Generator().manual_seed(10 * n + k)
    found = []
    for tokens in TOKENS[n]:
        x = torch.randn(tokens, HIDDEN, generator=made).to(dtype)
        ids = torch.stack(
            [torch.randperm(EXPERTS, generator=made)[:k] for _ in range(tokens)] or [torch.empty(k)]
        )
        weights = torch.rand(tokens, k, generator=made)
        found.append((x, ids[:tokens].long(), weights))
    return found


def scale(expert):
    """Every expert multiplies by a number of its own, exactly."""
    return float(2 ** (expert % 5)) * (-1 if expert % 2 else 1)


def whole(x, ids, weights):
    """Return what the tokens of one rank get, added up in the stated order in float32."""
    out = []
    for t in range(len(x)):
        total = None
        for j in range(ids.shape[1]):
            y = x[t] * scale(int(ids[t, j]))
            part = y.float() * weights[t, j]
            total = part if total is None else total + part
        out.append(total.to(x.dtype))
    return torch.stack(out) if out else torch.empty_like(x)


def local(rows, counts, rank, n):
    first = rank * EXPERTS // n
    factors = [scale(first + e) for e, c in enumerate(counts.tolist()) for _ in range(c)]
    return rows * torch.tensor(factors, dtype=rows.dtype).view(-1, 1)


@pytest.mark.parametrize("n", [2, 3, 4])
def test_against_one_process(n):
    def body(rank, n):
        for k in (1, 2, 5):
            for dtype in (torch.float32, torch.bfloat16, torch.float16):
                ranks = problem(n, k, dtype)
                x, ids, weights = ranks[rank]
                sent = dispatch(x, ids, weights, EXPERTS)
                assert sent.counts.sum() == len(sent.rows)
                want = []
                for expert in range(rank * EXPERTS // n, (rank + 1) * EXPERTS // n):
                    for tokens, chosen, _ in ranks:
                        want += [tokens[t] for t in range(len(tokens)) if expert in chosen[t]]
                assert [r.tolist() for r in sent.rows] == [w.tolist() for w in want]
                got = combine(local(sent.rows, sent.counts, rank, n), sent)
                assert got.dtype == dtype
                assert torch.equal(got, whole(x, ids, weights)), (k, dtype)

    run_group(n, body)


def test_a_token_gets_the_same_bits_in_any_batch():
    def body(rank, n):
        x, ids, weights = problem(n, 5, torch.float32)[rank]
        sent = dispatch(x, ids, weights, EXPERTS)
        together = combine(local(sent.rows, sent.counts, rank, n), sent)
        for t in range(max(TOKENS[n])):
            one = slice(t, t + 1)
            sent = dispatch(x[one], ids[one].int(), weights[one], EXPERTS)
            alone = combine(local(sent.rows, sent.counts, rank, n), sent)
            assert torch.equal(alone, together[one])

    run_group(3, body)


@pytest.mark.parametrize("n", [2, 3])
def test_gradients(n):
    """Against autograd through one process that has all experts, in float64."""

    def body(rank, n):
        x, ids, weights = (
            t.double() if t.is_floating_point() else t for t in problem(n, 2, torch.float32)[rank]
        )
        x.requires_grad_(), weights.requires_grad_()
        first = rank * EXPERTS // n
        made = torch.Generator().manual_seed(1)
        experts = torch.randn(EXPERTS, HIDDEN, HIDDEN, generator=made, dtype=torch.float64)
        experts.requires_grad_()
        sent = dispatch(x, ids, weights, EXPERTS)
        parts = sent.rows.split(sent.counts.tolist())
        y = torch.cat([part @ experts[first + e] for e, part in enumerate(parts)])
        out = combine(y.tanh(), sent)
        slope = torch.randn(
            TOKENS[n][rank], HIDDEN, generator=torch.Generator().manual_seed(rank)
        ).double()
        out.backward(slope)

        gx, gw, mine = x.grad.clone(), weights.grad.clone(), experts.grad.clone()
        x.grad = weights.grad = experts.grad = None
        y = torch.einsum("th,tkhg->tkg", x, experts[ids]).tanh()
        want = (weights[:, :, None] * y).sum(1)
        want.backward(slope)
        total = experts.grad.clone()
        dist.all_reduce(total)  # of the tokens of all ranks
        own = slice(first, first + EXPERTS // n)
        assert torch.allclose(out, want)
        assert torch.allclose(gx, x.grad)
        assert torch.allclose(gw, weights.grad)
        assert torch.allclose(mine[own], total[own])
        assert (
            not mine.abs()
            .sum((1, 2))[[e for e in range(EXPERTS) if e // (EXPERTS // n) != rank]]
            .any()
        )

    run_group(n, body)


def test_what_does_not_fit_is_refused_on_every_rank():
    def body(rank, n):
        x, ids, weights = problem(n, 2, torch.float32)[rank]
        off = ids.clone()
        off[0, 0] = EXPERTS if rank else 0
        calls = [
            lambda: dispatch(x, off, weights, EXPERTS),
            lambda: dispatch(x, ids[:1] if rank else ids, weights, EXPERTS),
            lambda: dispatch(x, ids.float() if rank else ids, weights, EXPERTS),
            lambda: dispatch(x, ids, weights, EXPERTS + rank),
        ]
        found = []
        for call in calls:
            with pytest.raises(dist.DistBackendError) as told:
                call()
            found.append(str(told.value))
        sent = dispatch(x, ids, weights, EXPERTS)
        with pytest.raises(dist.DistBackendError) as told:
            combine(sent.rows[:-1] if rank else sent.rows, sent)
        found.append(str(told.value))
        combine(sent.rows, sent)  # the group stays usable
        return found, isinstance(told.value, BackendArgumentError)

    (peer, first), (own, second) = run_group(2, body)
    assert (first, second) == (False, True)
    for text in peer:
        assert "rank 1" in text
        assert "refused" in text
    for text, word in zip(
        own, ["topk_ids are no", "x is", "integers", "multiple", "y has"], strict=True
    ):
        assert word in text
