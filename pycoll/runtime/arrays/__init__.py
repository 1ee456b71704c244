"""Arrays of the host: how any array becomes an address, and the symmetric heap of a rank.

`host_arrays` reads NumPy, the buffer protocol and DLPack; `symmetric_memory` hands out shared
memory; `layouts` has shapes of results, where chunks lie, and arrays that lie elsewhere.
Uses `pycoll._C`, errors and types. Read `host_arrays` first.
"""
