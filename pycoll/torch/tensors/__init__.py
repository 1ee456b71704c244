"""What the engine has to know of a tensor: memory, type, device, and lists of tensors.

`layout` describes one tensor, `blocks` a list, `devices` CUDA, `symmetric_tensors` shared memory.
Read `layout` first.
"""
