"""PyTorch's tensors as the engine sees them: `layout` on the host, `devices` on CUDA devices.

Uses no other part of `pycoll.torch`. Read `layout` first.
"""
