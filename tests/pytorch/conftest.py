"""What tests of the adapter for PyTorch share."""

import pytest


@pytest.fixture
def one_thread():
    """Ranks share the cores; and sums depend on the number of threads."""
    torch = pytest.importorskip("torch", reason="the adapter is for PyTorch")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
