"""all_gatherv, reduce_scatterv and all_to_allv of tensors, with and without known sizes."""

import pytest

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402

import worlds_torch  # noqa: E402
from pycoll.torch import BackendArgumentError, Options  # noqa: E402
from pycoll.torch.inference import all_gatherv, all_to_allv, reduce_scatterv  # noqa: E402
from worlds_torch import run_group  # noqa: E402

DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64)
SIZES = {2: ([3, 3], [0, 5], [1, 20_000]), 3: ([2, 0, 7], [4, 4, 4]), 4: ([1, 9, 0, 300],)}
HOSTS = {2: (0, 1), 3: (0, 0, 1), 4: (0, 0, 1, 1)}


def values(rows, seed, dtype, tail=(3,)):
    """Whole numbers, whose sums are exact in every type."""
    made = torch.Generator().manual_seed(seed)
    return torch.randint(0, 4, (rows, *tail), generator=made).to(dtype)


def gathers(rank, n):
    for sizes in SIZES[n]:
        for dtype in DTYPES:
            parts = [values(k, r, dtype) for r, k in enumerate(sizes)]
            for known in (sizes, None, torch.tensor(sizes)):
                got = all_gatherv(parts[rank], known)
                assert torch.equal(got, torch.cat(parts)), (sizes, dtype, known)
        sides = [values(k, r, torch.float32).t() for r, k in enumerate(sizes)]
        assert torch.equal(all_gatherv(sides[rank], sizes, dim=-1), torch.cat(sides, -1))


def sums(rank, n):
    group = dist.new_group(range(n), backend="pycoll", pg_options=Options(order="rank"))
    for sizes in SIZES[n]:
        for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.complex64):
            parts = [values(sum(sizes), 10 + r, dtype) for r in range(n)]
            want = torch.stack(parts).sum(0).split(sizes)[rank]
            assert torch.equal(reduce_scatterv(parts[rank], sizes, group=group), want)
        odd = [
            torch.randn(sum(sizes), 5, generator=torch.Generator().manual_seed(r)) for r in range(n)
        ]
        total = odd[0]
        for part in odd[1:]:
            total = total + part
        got = reduce_scatterv(odd[rank].t(), sizes, dim=1, group=group)
        assert torch.equal(got, total.t().split(sizes, 1)[rank])
    equal = [values(2 * n, r, torch.float32) for r in range(n)]
    assert torch.equal(reduce_scatterv(equal[rank]), sum(equal).split(2)[rank])
    most = torch.stack(equal).amax(0).split(2)[rank]
    assert torch.equal(reduce_scatterv(equal[rank], op=dist.ReduceOp.MAX), most)


def exchanges(rank, n):
    for seed in range(3):
        made = torch.Generator().manual_seed(seed)
        sent = torch.randint(0, 5, (n, n), generator=made)
        for dtype in DTYPES:
            parts = [values(int(sent[r].sum()), r, dtype) for r in range(n)]
            blocks = [part.split(sent[r].tolist())[rank] for r, part in enumerate(parts)]
            for sizes in (sent[rank].tolist(), sent.tolist(), sent.numpy()):
                assert torch.equal(all_to_allv(parts[rank], sizes), torch.cat(blocks))


@pytest.mark.parametrize("n", [2, 3, 4])
def test_rows_of_one_host(n):
    def body(rank, n):
        gathers(rank, n)
        sums(rank, n)
        exchanges(rank, n)

    run_group(n, body)


def test_rows_between_hosts(monkeypatch):
    monkeypatch.setattr(worlds_torch, "HOSTS", HOSTS[3])

    def body(rank, n):
        gathers(rank, n)
        sums(rank, n)
        exchanges(rank, n)

    run_group(3, body, limit_s=30.0)


def refused(call):
    with pytest.raises(dist.DistBackendError) as told:
        call()
    return type(told.value) is BackendArgumentError, str(told.value)


def test_what_does_not_fit_is_refused_on_every_rank():
    def body(rank, n):
        x = torch.ones(3, 2)
        wrong = x[:2] if rank else x
        calls = [
            lambda: all_gatherv(wrong, [3, 3]),
            lambda: all_gatherv(x, [3] if rank else [3, 3]),
            lambda: reduce_scatterv(wrong, [1, 2]),
            lambda: reduce_scatterv(x, [4, -1] if rank else [1, 2]),
            lambda: all_to_allv(wrong, [[1, 2], [2, 1]]),
            lambda: all_to_allv(x, [1, 1] if rank else [1, 2]),
            lambda: all_gatherv(torch.tensor(1.0) if rank else x),
        ]
        found = [refused(call) for call in calls]
        assert torch.equal(all_gatherv(x, [3, 3]), torch.ones(6, 2))  # the group stays usable
        return found

    first, second = run_group(2, body)
    for (_, peer), (own, text) in zip(first, second, strict=True):
        assert own, text
        assert all(word in peer for word in ("rank 1", "refused")), peer


@pytest.mark.parametrize("hosts", [(), (0, 1)])
@pytest.mark.parametrize("what", ["gather", "scatter", "exchange", "type"])
def test_sizes_that_differ_between_ranks(what, hosts, monkeypatch):
    monkeypatch.setattr(worlds_torch, "HOSTS", hosts)

    def body(rank, n):
        x = torch.ones(3, 2)
        call = {
            "gather": lambda: all_gatherv(x, [3, 5] if rank == 0 else [4, 3]),
            "scatter": lambda: reduce_scatterv(x, [1, 2] if rank == 0 else [2, 1]),
            "exchange": lambda: all_to_allv(x, [[1, 2], [0, 3]] if rank else [[1, 2], [1, 2]]),
            "type": lambda: all_gatherv(x if rank else x.int()[:2], [2, 3]),
        }[what]
        return refused(call)[1]

    for text in run_group(2, body):
        assert "MismatchError" in text, text
        assert "test_ragged.py" in text
        assert {"type": "dtype"}.get(what, "") in text


def test_a_group_of_another_backend():
    def body(rank, n):
        with pytest.raises(BackendArgumentError, match="expected one of the backend 'pycoll'"):
            all_gatherv(torch.ones(1))

    run_group(1, body, backend="gloo")
