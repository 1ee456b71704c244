"""The operations of the process group: checks of their tensors, then calls of the engine.

`collectives` is for flat tensors, `list_collectives` for lists, `ragged` for rows that differ in
number, `p2p` for messages; `arguments` checks. Uses `calls` and `tensors`. Read `collectives`
first.
"""
