"""Tensor parallelism: layers split over ranks, and the collectives at their edges.

`regions` are the conjugate pairs of collectives at the edges, `layers` the split layers. Uses the
communicator and `nn`. Read `regions` first.
"""
