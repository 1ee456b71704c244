"""The process group: its class, how ranks join it, what pycoll changes in PyTorch.

`group` is the class PyTorch sees, `bootstrap` brings it up, `patches` change PyTorch.
Uses `calls`, `tensors` and `operations`. Read `group` first.
"""
