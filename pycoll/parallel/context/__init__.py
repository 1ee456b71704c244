"""Context parallelism: the positions of a sequence divided over ranks, in all layers.

`split` says which positions a rank has, `ring` and `ulysses` are the attention between them; all
other layers work on each position by itself. Uses `pycoll.parallel.nn`. Read `split` first.
"""
