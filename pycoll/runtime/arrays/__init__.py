"""Arrays of the host: how any array becomes an address, and the symmetric heap of a rank.

`host_arrays` reads NumPy, the buffer protocol and DLPack; `symmetric_memory` hands out shared
memory; `layouts` and `chunk_layouts` say where the engine finds data; `shapes` shapes results.
Uses `pycoll._C`, errors and types. Read `host_arrays` first.
"""
