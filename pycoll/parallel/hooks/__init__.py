"""What happens between a whole bucket and its sum over ranks: compression, top-k, PowerSGD.

`hook` is the contract and the fp16 and bf16 hooks. Uses `state` and `analysis.ledger`. Read `hook`
first.
"""
