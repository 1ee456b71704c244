"""Algorithms that keep messages near: on rings, on grids, and where ranks lie in groups."""
