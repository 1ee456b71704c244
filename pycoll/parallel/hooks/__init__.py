"""Communication hooks that compress: 16-bit numbers, top-k, PowerSGD.

`pycoll.parallel.state.hook` is the contract, `compress` the simplest hook, `error_feedback` the
base of the others. They use `state` and `channels`. Read `compress` first.
"""
