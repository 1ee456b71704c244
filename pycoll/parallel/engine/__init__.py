"""The data-parallel engine: the passes of a step, its gradients, its settings and their checks.

`data_parallel` is the engine, `passes` runs forward and backward, `gradients` reduces them early,
`checks` compares settings over ranks. Uses `state`, `hooks` and `nn.layer`. Read `data_parallel`
first.
"""
