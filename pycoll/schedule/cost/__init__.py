"""What a schedule costs: rounds, bytes and a predicted time, counted without running it.

`cost` counts and predicts in shared memory, `network` between hosts, `simulate` walks the rounds of
tens of thousands of ranks over a `fabric`. Uses `language` and `lowering`. Read `cost` first.
"""
