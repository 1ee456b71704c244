"""Tensors that cannot be written to, that have no memory, or more than it."""

import warnings

import pytest

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402

import pycoll.torch  # noqa: E402
import worlds_torch  # noqa: E402
from pycoll.errors import ArgumentError  # noqa: E402
from pycoll.testing import run_threads  # noqa: E402
from pycoll.torch.tensors.layout import store, target  # noqa: E402
from worlds_torch import run_group  # noqa: E402


def test_tensors_with_several_elements_in_one_place():
    """Refused before a byte moves where they are outputs; as inputs they are like others."""

    def body(rank, n):
        wide, flat = torch.ones(1).expand(4), torch.full((4,), 2.0)
        texts = []
        group = dist.group.WORLD
        calls = [
            lambda x: dist.all_reduce(x),
            lambda x: dist.all_reduce(x if x is not wide else torch.ones(3).unfold(0, 2, 1)),
            lambda x: dist.broadcast(x, 1),
            lambda x: dist.reduce(x, 0),
            lambda x: dist.all_gather([x, flat.clone()], flat),
            lambda x: group._allgather_base(x, flat[:2]).wait(),
        ]
        for call in calls:
            with pytest.raises(dist.DistBackendError) as told:
                call(wide if rank == 0 else flat.clone())
            texts.append(str(told.value))
        if rank == 0:
            with pytest.raises(dist.DistBackendError, match=r"several elements in one place"):
                dist.irecv(wide, 1)
        y = wide if rank == 1 else torch.zeros(4)
        dist.broadcast(y, 1)
        return texts, y.tolist()

    for rank, (texts, y) in enumerate(run_group(2, body)):
        assert y == [1.0] * 4
        told = "several elements in one place" if rank == 0 else "PeerRejected"
        assert all(told in text for text in texts), texts


def shared(x):
    """Return views of 12 elements, of which some are one in memory."""
    return [
        x[:1].expand(4),
        x[:3].expand(4, 3),
        x[:10:5].expand(2, 2),
        x.unfold(0, 4, 2),
        x.unfold(0, 3, 1).t(),
        x.as_strided((2, 2, 2), (5, 2, 2)),
        x.as_strided((2, 3), (4, 2)),  # the range has more places than there are elements
    ]


def apart(x):
    """Return views of 12 elements that are not contiguous, each in a place of its own."""
    return [
        x[::2],
        x.view(3, 4).t(),
        x.view(3, 4)[:, :2],
        x.unfold(0, 3, 3)[:, ::2],
        x[:1].expand(1, 1),
        x[:0].expand(3, 0),
        x.as_strided((3, 2), (2, 3)),  # rows interlock
    ]


def test_which_outputs_are_refused():
    for view in shared(torch.zeros(12)):
        with pytest.raises(ArgumentError, match="the output has several elements in one place"):
            target(view)
    for view in apart(torch.zeros(12)):
        store(torch.arange(view.numel()).view(view.shape).float(), view)
        assert view.flatten().tolist() == list(range(view.numel()))  # no one on another
        assert target(view).shape == view.shape
    with pytest.raises(ArgumentError, match="in one place"):
        target(torch.zeros(1).expand(1 << 40))  # nothing is counted out


def test_a_tensor_that_is_none():
    """One of FakeTensorMode, which has no memory."""

    def body(rank, n):
        from torch._subclasses.fake_tensor import FakeTensorMode

        with FakeTensorMode(), pytest.raises(dist.DistBackendError, match=r"FakeTensor without"):
            dist.all_reduce(torch.ones(3))
        x = torch.ones(3)
        dist.all_reduce(x)
        return x.tolist()

    assert run_group(2, body) == [[2.0] * 3] * 2


def test_tensors_that_are_more_than_their_memory():
    """The scale of a quantized tensor and the sizes in a nested one are not in its memory."""

    def body(rank, n):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # both kinds are on their way out, or in
            quantized = torch.quantize_per_tensor(torch.ones(4), 0.1 + rank, 0, torch.qint8)
            nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
        for call in (
            lambda x: dist.broadcast(x, 0),
            lambda x: dist.all_gather([x.clone() for _ in range(n)], x),
        ):
            with pytest.raises(pycoll.torch.BackendArgumentError, match=r"quantized.*int_repr"):
                call(quantized)
            with pytest.raises(pycoll.torch.BackendArgumentError, match="nested"):
                call(nested)

    run_group(2, body)


@pytest.mark.parametrize("hosts", [(), (0, 1)])
def test_one_element_with_another_stride(hosts, monkeypatch):
    """It is contiguous whatever its stride is."""
    monkeypatch.setattr(worlds_torch, "HOSTS", hosts)

    def body(rank, n):
        mine = torch.full((4,), 5.0)[::2][:1] if rank == 0 else torch.arange(2.0)
        assert mine.is_contiguous()
        assert mine.stride() == (2 - rank,)
        outs = [torch.full((4,), -1.0)[::2][:1], torch.full((2,), -1.0)]
        dist.all_gather(outs, mine)
        splits = [1, 0] if rank == 0 else [0, 2]
        out = torch.full((2 * (rank + 1),), -1.0)[:: 2 - rank][: rank + 1]
        dist.all_to_all_single(out, mine, splits, splits)
        return [t.tolist() for t in outs], out.tolist()

    lists = [[5.0], [0.0, 1.0]]
    assert run_group(2, body) == [(lists, [5.0]), (lists, [0.0, 1.0])]


def test_one_element_with_another_stride_is_too_small_for_symmetric_memory():
    def body(rank, n):
        x = torch.full((4,), rank + 1.0)[::2][:1]
        with pytest.raises(dist.DistBackendError, match="no whole page"):
            dist.group.WORLD.register_tensor(x)

    run_group(2, body)


@pytest.mark.parametrize("name", ["complex32", "float8_e4m3fnuz"])
@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_a_communicator_refuses_elements_of_a_type_that_numpy_has_not(name):
    def rank(comm):
        x = torch.zeros(4, dtype=getattr(torch, name))
        with pytest.raises(ArgumentError, match=r"x has elements of a type that NumPy has not"):
            comm.all_gather(x)
        return comm.all_gather(x.view(torch.uint8)).shape[0] * comm.world_size

    width = getattr(torch, name).itemsize
    assert run_threads(2, rank) == [4 * width * 4] * 2
