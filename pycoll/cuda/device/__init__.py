"""A CUDA device as Python sees it: the device library, arrays, the heap, fused passes.

`library` binds libpycoll_cuda.so, `arrays` reads device arrays and streams, `probe` says what is
missing. Read `library` first.
"""
