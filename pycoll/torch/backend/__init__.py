"""The process group: how it comes up, what every operation rests on, what PyTorch registers.

`group` is the class PyTorch sees, `core` its common part, `bootstrap` and `hosts` bring it up.
Uses `calls`, `tensors` and `operations`. Read `group` first.
"""
