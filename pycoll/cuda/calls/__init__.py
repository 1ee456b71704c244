"""Collectives on device arrays: prepared, launched on a stream, waited for.

`side` is one rank's part in a communicator, `virtual` the ranks of one device; `prepare` turns
arguments into calls, `in_order` keeps launches in order. Uses `device` and `transports`. Read
`side` first.
"""
