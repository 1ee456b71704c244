"""Tensors that move in a grid of ranks."""

import pytest

from pycoll.testing import run_processes

torch = pytest.importorskip("torch")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float32])
def test_a_tensor_moves_whatever_its_type(dtype):
    def ranks(comm):
        x = torch.full((5,), 1.0 + comm.rank).to(dtype)
        return comm.grid((2,), periods=True).move(x, 0).float().tolist()

    assert run_processes(2, ranks) == [[2] * 5, [1] * 5]
