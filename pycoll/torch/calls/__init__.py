"""Calls of the engine on tensors: prepared, repeated fast, in the background, under way.

`prepare` is the way in, `fast_path` repeats earlier calls, `work` is what PyTorch waits for.
Uses `tensors`. Read `prepare` first.
"""
