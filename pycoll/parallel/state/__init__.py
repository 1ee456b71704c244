"""Parameters, gradients and optimizer states as placed vectors, and moving between placements.

`placement` is the idea (replicate, partial, shard), `layout` maps a model to flat vectors, `bucket`
holds one with its `gradients`, `hook` reduces them, `values` starts, saves and loads. Uses
`channels`, `precision`, `optim` and `nn.layer`. Read `placement` first.
"""
