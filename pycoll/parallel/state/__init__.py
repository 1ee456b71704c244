"""Parameters, gradients and optimizer states as placed vectors, and moving between placements.

`placement` is the idea (replicate, partial, shard), `layout` maps a model to flat vectors, `bucket`
holds one of them, `values` and `restore` save and load. Read `placement` first.
"""
