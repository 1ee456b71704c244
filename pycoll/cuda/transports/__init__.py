"""How ranks reach each other's devices: CUDA IPC (`peers`) or NCCL (`nccl`).

`base` is what both offer, `bound_calls` binds plans to sizes, `program` runs plans of messages.
Uses `device`. Read `base` first.
"""
