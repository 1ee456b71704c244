"""Collectives on device arrays: prepared, launched on a stream, waited for.

`side` is one rank's part in a communicator, `virtual` the ranks of one device, `program` and
`executor` run plans of messages. Uses `device` and `transports`. Read `side` first.
"""
