"""The data-parallel engine: what runs a training step.

`data_parallel` is the engine, `passes` runs forward and backward, `options` has the settings,
`agreement` what ranks compare before and in a step, `report` what it returns. Uses `state`,
`channels` and `nn.layer`. Read `data_parallel` first.
"""
