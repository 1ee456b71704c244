"""Calls of the engine on tensors: prepared, repeated, asynchronous, and the works PyTorch gets.

`caller` makes the calls of a group, `prepare` binds them, `background` runs asynchronous ones.
Uses `tensors`. Read `caller` first.
"""
