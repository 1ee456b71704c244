"""How ranks reach each other's devices: CUDA IPC (`peers`) or NCCL (`nccl`).

`links` is what both offer, `transport` binds plans to numbers, `program` runs plans of messages.
Uses `device`. Read `links` first.
"""
