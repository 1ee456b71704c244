"""Tensor parallelism: layers split over ranks, and what happens at their edges.

`regions` are the conjugate pairs of collectives at the edges, `linear` and `vocabulary` the split
layers. Uses the communicator and `nn`. Read `regions` first.
"""
