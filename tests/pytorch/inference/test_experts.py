"""Dispatch and combine of mixtures of experts, against one process that has all experts."""

import pytest

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402

import worlds_torch  # noqa: E402
from pycoll import _C  # noqa: E402
from pycoll.errors import PeerLost  # noqa: E402
from pycoll.torch import BackendArgumentError  # noqa: E402
from pycoll.torch.backend.group import ProcessGroupPycoll  # noqa: E402
from pycoll.torch.inference import combine, dispatch  # noqa: E402
from worlds_torch import run_group  # noqa: E402

HIDDEN, EXPERTS = 6, 12
TOKENS = {2: [5, 3], 3: [4, 0, 9], 4: [1, 8, 2, 7]}


@pytest.fixture(params=["one host", "two hosts"], autouse=True)
def hosts(request, monkeypatch):
    """Rows go through shared memory, or in messages."""
    if request.param == "two hosts":
        monkeypatch.setattr(worlds_torch, "HOSTS", (0, 1, 1, 0))


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
            wide = torch.promote_types(y.dtype, torch.float32)
            part = y.to(wide) * weights[t, j].to(wide)
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
            for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
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


@pytest.mark.parametrize("width", [1, 7, 16, 64, 131])
def test_every_instruction_set_adds_alike(width):
    def body(rank, n):
        made = torch.Generator().manual_seed(rank)
        ids = torch.stack([torch.randperm(EXPERTS, generator=made)[:5] for _ in range(6)])
        weights = torch.rand(6, 5, generator=made)
        before = _C.optim_isa()
        for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
            x = torch.randn(6, width, generator=made).to(dtype)
            want = whole(x, ids, weights)
            for isa in ("base", "avx2", "avx512"):
                if _C.optim_force_isa(isa):
                    sent = dispatch(x, ids, weights, EXPERTS)
                    got = combine(local(sent.rows, sent.counts, rank, n), sent)
                    assert torch.equal(got, want), (isa, dtype)
            _C.optim_force_isa(before)

    run_group(2, body)


def test_experts_may_answer_in_rows_of_another_kind():
    def body(rank, n):
        x, ids, weights = problem(n, 2, torch.bfloat16)[rank]
        sent = dispatch(x, ids, weights, EXPERTS)
        y = sent.rows.float().repeat(1, 2)
        wanted = (x.float().repeat(1, 2).unsqueeze(1) * weights.unsqueeze(2)).sum(1)
        assert torch.equal(combine(y, sent), wanted)
        counted = combine(y.to(torch.int32), sent)  # types that only PyTorch adds up
        assert counted.dtype == torch.int32

    run_group(2, body)


def test_rows_that_differ_between_ranks():
    def body(rank, n):
        x, ids, weights = problem(n, 2, torch.float32)[rank]
        for odd in (x.double(), x[:, :3]):
            group = dist.new_group()  # between hosts it ends
            with pytest.raises(dist.DistBackendError, match="differ") as told:
                dispatch(odd if rank else x, ids, weights, EXPERTS, group=group)
            assert not isinstance(told.value, BackendArgumentError)
        sent = dispatch(x, ids, weights, EXPERTS)
        with pytest.raises(dist.DistBackendError, match="differ"):
            combine(sent.rows.double() if rank else sent.rows, sent)

    run_group(2, body)


def test_no_narrowing_makes_an_expert():
    def body(rank, n):
        x, ids, weights = problem(n, 2, torch.float32)[rank]
        with pytest.raises(dist.DistBackendError, match="topk_ids are no experts"):
            dispatch(x, ids + (1 << 32), weights, EXPERTS)

    run_group(2, body)


def test_a_rank_that_leaves_takes_no_rows_along(monkeypatch):
    """Not before all others have read them: nobody sees memory that was used for something else."""
    monkeypatch.setattr(worlds_torch, "HOSTS", ())

    def body(rank, n):
        x = torch.full((512, 4096), float(rank + 1))
        ids = torch.arange(512).view(-1, 1) % n
        sent = dispatch(x, ids, torch.ones(512, 1), n)
        mine = sent.rows.view(n, -1)
        whole = combine(sent.rows, sent)
        group = dist.group.WORLD
        dist.destroy_process_group()
        del sent, group
        return torch.equal(whole, x) and mine[:, 0].tolist() == [1.0, 2.0, 3.0]

    assert run_group(3, body) == [True] * 3


def test_rows_stay_if_the_ranks_met_for_some_of_them_only(monkeypatch):
    """A rank that heard of a death as the others began to read does not take its rows away."""
    monkeypatch.setattr(worlds_torch, "HOSTS", ())
    meet, take = ProcessGroupPycoll._gather_equal, ProcessGroupPycoll.block
    taken = {0: [], 1: []}

    def meets(group, request, row):
        table = meet(group, request, row)
        if group.rank() == 1:
            raise PeerLost("rank 2 died")
        return table

    def takes(group, nbytes):
        block = take(group, nbytes)
        taken[group.rank()].append((block.ctypes.data, nbytes))
        return block

    monkeypatch.setattr(ProcessGroupPycoll, "_gather_equal", meets)
    monkeypatch.setattr(ProcessGroupPycoll, "block", takes)

    def body(rank, n):
        x, ids, weights = problem(n, 2, torch.float32)[rank]
        if rank == 1:
            with pytest.raises(dist.DistBackendError, match="rank 2 died"):
                dispatch(x, ids, weights, EXPERTS)
            ((shown, nbytes),) = taken[rank]
            backend = dist.group.WORLD._get_backend(torch.device("cpu"))
            others = [take(backend, nbytes) for _ in range(4)]
            assert shown not in [block.ctypes.data for block in others]
        else:
            dispatch(x, ids, weights, EXPERTS)

    run_group(2, body)
