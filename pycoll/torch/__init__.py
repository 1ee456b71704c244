"""pycoll for PyTorch; needs the package torch."""

from pycoll.torch.data_parallel import DataParallel

__all__ = ["DataParallel"]
