"""The operations of the process group: checks of their tensors, then calls of the engine.

`reductions` combine, `moves` and `list_moves` copy, `p2p` sends and receives; `arguments` checks.
Uses `calls` and `tensors`. Read `reductions` first.
"""
