"""Tensors that cannot be written to, or that have no memory."""

import pytest

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402

from worlds_torch import run_group  # noqa: E402


def test_tensors_with_several_elements_in_one_place():
    """Refused before a byte moves where they are outputs; as inputs they are like others."""

    def body(rank, n):
        wide, flat = torch.ones(1).expand(4), torch.full((4,), 2.0)
        texts = []
        group = dist.group.WORLD
        calls = [
            lambda x: dist.all_reduce(x),
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
