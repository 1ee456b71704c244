"""Messages that are tensors, which go without Python code from the second on."""

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

import pycoll  # noqa: E402
from pycoll.errors import ArgumentError, MismatchError  # noqa: E402
from pycoll.runtime.sessions.p2p import TaggedMessages  # noqa: E402
from pycoll.testing import run_processes  # noqa: E402

DTYPES = [
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn),
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool),
    *(torch.complex64, torch.float8_e5m2),
]


def tensor_of(dtype, size, first):
    return ((torch.arange(size) + first) % 2).to(dtype)


def exchange(comm):
    torch.set_num_threads(1)
    wrong, peer = [], 1 - comm.rank
    for dtype in DTYPES:
        for size in (1, 7, 1000, 70_000, 0, 600_000)[: 6 if dtype == torch.float32 else 5]:
            for turn in range(2):
                sent, want = (tensor_of(dtype, size, r + turn) for r in (comm.rank, peer))
                got, both, later = (torch.empty_like(sent) for _ in range(3))
                if comm.rank == 0:
                    comm.send(sent, 1, 3)
                    comm.recv(got, 1, 3)
                else:
                    comm.recv(got, 0, 3)
                    comm.send(sent, 0, 3)
                comm.sendrecv(sent, peer, both, peer)
                pycoll.wait_all([comm.irecv(later, peer), comm.isend(sent, peer)])
                results = got, both, later
                same = [torch.equal(t.view(torch.uint8), want.view(torch.uint8)) for t in results]
                wrong += [] if all(same) else [(dtype, size, turn, same)]
    return wrong


def test_tensors_of_every_type():
    assert run_processes(2, exchange) == [[], []]


def test_they_take_no_python_code(monkeypatch):
    def ranks(comm):
        x, y = torch.ones(9), torch.empty(9)
        comm.sendrecv(x, comm.rank, y, comm.rank)
        with monkeypatch.context() as changed:
            changed.setattr(TaggedMessages, "_to_send", None)
            changed.setattr(TaggedMessages, "_to_receive", None)
            comm.send(2 * x, comm.rank)
            comm.recv(y, comm.rank)
            comm.isend(y + x, comm.rank).wait()
            comm.irecv(y, comm.rank).wait()
        return y.tolist()

    assert run_processes(2, ranks) == [[3.0] * 9] * 2


def test_tensors_that_let_go_of_their_memory():
    def ranks(comm):
        torch.set_num_threads(1)  # the parent's other threads are not here
        size, peer = 1 << 21, 1 - comm.rank
        x, y = torch.full((size,), 1.0 + comm.rank), torch.empty(size)
        comm.sendrecv(x[:1], comm.rank, y[:1], comm.rank)
        whole = y.view(-1)  # another tensor of that memory
        coming, going = comm.irecv(y, peer), comm.isend(x, peer)
        for tensor in (x, y):
            tensor.set_(torch.empty(0))
        del x, y
        others = [torch.zeros(size) for _ in range(8)]  # memory that is free is used again
        pycoll.wait_all([coming, going])
        return torch.equal(whole, torch.full((size,), 1.0 + peer)), [float(x.sum()) for x in others]

    assert run_processes(2, ranks) == [(True, [0.0] * 8)] * 2


def test_many_that_run_ahead_are_as_they_were():
    def ranks(comm):
        x = torch.zeros(300)
        if comm.rank == 0:
            for i in range(400):
                x.fill_(i)
                comm.send(x, 1)
        comm.barrier()
        found = []
        for _ in range(400 * comm.rank):
            comm.recv(x, 0)
            found.append(bool((x == x[0]).all()) and int(x[0]))
        return found

    assert run_processes(2, ranks) == [[], list(range(400))]


def test_what_is_not_plain():
    def ranks(comm):
        me, x = comm.rank, torch.ones(6)
        comm.sendrecv(x, me, torch.empty(6), me)
        rows, array = torch.arange(12.0).reshape(3, 4), np.empty(3, np.float32)
        comm.send(rows[:, 1], me)  # of every other row, to an array
        comm.recv(array, me)
        comm.send(array, me)
        with pytest.raises(ArgumentError, match="not C-contiguous"):
            comm.recv(rows[:, 2], me)
        comm.recv(x[:3], me)
        with pytest.raises(ArgumentError, match="require gradient"):
            comm.send(torch.ones(3, requires_grad=True), me)
        comm.send(torch.ones(6, dtype=torch.int32), me)
        with pytest.raises(MismatchError, match="int32"):
            comm.recv(x, me)
        return array.tolist(), x.tolist()

    assert run_processes(2, ranks) == [([1.0, 5.0, 9.0], [1.0, 5.0, 9.0, 1.0, 1.0, 1.0])] * 2


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("left", [0, 12])
def test_memory_that_was_freed(warm, left):
    def ranks(comm):
        me, x = comm.rank, torch.ones(8)
        if warm:
            comm.sendrecv(x, me, torch.empty(8), me)
        bad = torch.ones(16)[8:]
        bad.untyped_storage().resize_(4 * left)
        exchanges = (lambda: comm.send(bad, me), lambda: comm.sendrecv(bad, me, x, me))
        comm.send(x, me)
        for call in (*exchanges, lambda: comm.recv(bad, me), lambda: comm.isend(bad, me)):
            with pytest.raises(ArgumentError, match="x is a Tensor whose memory has been freed"):
                call()
        return comm.recv(x, me)

    assert run_processes(2, ranks) == [0, 1]
