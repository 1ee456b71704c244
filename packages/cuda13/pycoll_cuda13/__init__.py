"""The device library of pycoll, libpycoll_cuda.so, which `pycoll.cuda` finds in this folder."""
