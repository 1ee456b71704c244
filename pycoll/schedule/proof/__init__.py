"""Plans of all ranks, run symbolically before any byte moves.

`verify` is the way in; `interpret_peer` and `interpret_messages` run plans, `trace`, `values` and
`bounds` judge what they do, `mutate` checks that wrong plans are rejected.
Uses `language` and `lowering`. Read `verify` first.
"""
