"""Plans of all ranks, run symbolically before any byte moves.

`verify` calls the rest: `interpret_peer` and `interpret_messages` run plans, `trace`, `values` and
`bounds` judge what they do; `mutate` checks that wrong plans are rejected, with `replay` as a
second opinion. `large` proves large worlds by `symmetry`, or runs some `columns` of the schedule.
Uses `language` and `lowering`. Read `verify` first.
"""
