"""Collectives over several hosts: stages inside a host and between hosts.

`stages` says which stages a collective has, `plans` makes a plan of each, `product` proves the
whole, `hierarchical` is the same idea as one ordinary schedule. Read `stages` first.
"""
