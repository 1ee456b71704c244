"""A CUDA device as Python sees it: the device library, arrays, the heap, fused optimizer kernels.

`library` binds libpycoll_cuda.so, `arrays` reads device arrays and streams, `heap` is memory that
peers reach. Uses `pycoll.runtime.arrays`. Read `library` first.
"""
