"""Every call that waits too long says who waits for whom, whatever waits: call, work or future."""

import multiprocessing
import re
from datetime import timedelta

import pytest

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402
import torch.distributed._functional_collectives as functional  # noqa: E402

import worlds_torch  # noqa: E402
from pycoll.torch import BackendTimeout  # noqa: E402
from pycoll.torch.inference import all_gatherv, all_to_allv, dispatch, reduce_scatterv  # noqa: E402
from worlds_torch import run_group  # noqa: E402

N, LATE, LIMIT = 3, 1, timedelta(seconds=0.3)
X = torch.ones(6)


def parts():
    return [torch.ones(2) for _ in range(N)]


def at(rank, root, made):
    return made if rank == root else None


def batch(rank, group):
    ops = [dist.P2POp(f, torch.ones(2), LATE, group) for f in (dist.irecv, dist.isend)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()


def coalesced(rank, group):
    with dist._coalescing_manager(group, async_ops=True) as manager:
        for _ in range(3):
            dist.all_reduce(torch.ones(2), group=group)
    manager.wait()


def moe(rank, group):
    ids = torch.zeros(4, 1, dtype=torch.long)
    dispatch(torch.ones(4, 2), ids, torch.ones(4, 1), N, group=group)


def future(rank, group):
    return dist.all_reduce(X, group=group, async_op=True).get_future()


COLLECTIVES = {
    "all_reduce": lambda rank, g: dist.all_reduce(X, group=g),
    "all_reduce_coalesced": lambda rank, g: dist.all_reduce_coalesced([X, X], group=g),
    "broadcast": lambda rank, g: dist.broadcast(X, LATE, group=g),
    "reduce": lambda rank, g: dist.reduce(X, 0, group=g),
    "all_gather": lambda rank, g: dist.all_gather(parts(), torch.ones(2), group=g),
    "all_gather_into_tensor": lambda rank, g: dist.all_gather_into_tensor(
        X, torch.ones(2), group=g
    ),
    "gather": lambda rank, g: dist.gather(torch.ones(2), at(rank, 0, parts()), group=g),
    "scatter": lambda rank, g: dist.scatter(torch.ones(2), None, LATE, group=g),
    "reduce_scatter": lambda rank, g: dist.reduce_scatter(torch.ones(2), parts(), group=g),
    "reduce_scatter_tensor": lambda rank, g: dist.reduce_scatter_tensor(torch.ones(2), X, group=g),
    "all_to_all": lambda rank, g: dist.all_to_all(parts(), parts(), group=g),
    "all_to_all_single": lambda rank, g: dist.all_to_all_single(torch.ones(6), X, group=g),
    "barrier": lambda rank, g: dist.barrier(g),
    "monitored_barrier": lambda rank, g: dist.monitored_barrier(g, LIMIT),
    "coalescing manager": coalesced,
    "functional": lambda rank, g: functional.all_reduce(X, "sum", g).tolist(),
    "work": lambda rank, g: dist.all_reduce(X, group=g, async_op=True).wait(),
    "work of a barrier": lambda rank, g: dist.barrier(g, async_op=True).wait(),
    "work with a limit": lambda rank, g: dist.all_reduce(X, group=g, async_op=True).wait(LIMIT / 3),
    "future": lambda rank, g: future(rank, g).wait(),
    "chained future": lambda rank, g: future(rank, g).then(lambda f: f.value()[0] / 2).wait(),
    "all_gather_object": lambda rank, g: dist.all_gather_object([None] * N, rank, group=g),
    "gather_object": lambda rank, g: dist.gather_object(rank, at(rank, 0, [None] * N), group=g),
    "broadcast_object_list": lambda rank, g: dist.broadcast_object_list([rank], LATE, group=g),
    "scatter_object_list": lambda rank, g: dist.scatter_object_list([None], None, LATE, group=g),
    "all_gatherv": lambda rank, g: all_gatherv(torch.ones(rank + 1, 2), group=g),
    "reduce_scatterv": lambda rank, g: reduce_scatterv(torch.ones(6, 2), [1, 2, 3], group=g),
    "all_to_allv": lambda rank, g: all_to_allv(torch.ones(6, 2), [1, 2, 3], group=g),
    "dispatch": moe,
}
LARGE = torch.ones(1 << 20)  # too large to be left in a mailbox
MESSAGES = {
    "recv": lambda rank, g: dist.recv(torch.ones(3), LATE, group=g),
    "irecv": lambda rank, g: dist.irecv(torch.ones(3), LATE, group=g).wait(),
    "irecv with a limit": lambda rank, g: dist.irecv(X, LATE, group=g).wait(LIMIT / 3),
    "future of irecv": lambda rank, g: dist.irecv(X, LATE, group=g).get_future().wait(),
    "batch_isend_irecv": batch,
    "recv_object_list": lambda rank, g: dist.recv_object_list([None], LATE, group=g),
}
SENDS = {  # between hosts they end at once: the receiver has memory for them
    "send": lambda rank, g: dist.send(LARGE, LATE, group=g),
    "isend": lambda rank, g: dist.isend(LARGE, LATE, group=g).wait(),
    "isend with a limit": lambda rank, g: dist.isend(LARGE, LATE, group=g).wait(LIMIT / 3),
}


def text_of(call, rank, group):
    """Return what the error of a call says, or "" if it did not wait for the late rank."""
    try:
        call(rank, group)
    except dist.DistBackendError as error:  # a timeout, or another rank's timeout
        return f"{isinstance(error, BackendTimeout)} {error}"
    return ""


def texts(calls, who):
    """Make each call in a group of its own, without one rank; return each rank's texts."""
    over = multiprocessing.get_context("fork").Semaphore(0)

    def body(rank, n):
        found = []
        for call in calls.values():
            group = dist.new_group(range(n))
            dist.barrier(group)
            group.set_timeout(LIMIT)
            if rank == LATE:  # it comes to the next group when the others have given up
                for _ in range(n - 1):
                    assert over.acquire(timeout=20)
            else:
                found.append(text_of(call, rank, group) if rank in who else "")
                over.release()
        return found

    return run_group(N, body, timeout=200.0)


def check(calls, who):
    first, _, last = texts(calls, who)
    wrong = [
        f"{name}: {text}"
        for name, *told in zip(calls, first, last, strict=True)
        for text in told[:1] + [t for t in told[1:] if t]
        if not re.search(rf"\brank {LATE}\b|\bRank {LATE}\b", text)
        or (text is told[0] and not text.startswith("True"))
    ]
    assert not wrong, "\n\n".join(wrong)


@pytest.fixture(params=[(), (0, 1, 1)], ids=["one host", "two hosts"])
def hosts(request, monkeypatch):
    monkeypatch.setattr(worlds_torch, "HOSTS", request.param)


@pytest.mark.usefixtures("hosts")
def test_collectives():
    check(COLLECTIVES, (0, 2))


@pytest.mark.usefixtures("hosts")
def test_messages():
    check(MESSAGES, (0,))


def test_large_messages():
    check(SENDS, (0,))
