"""What `DataParallel` and `ZeroOptimizer` are made of: parameters, and the buckets of the latter.

Uses `pycoll.parallel` and PyTorch. Read `module_parameters` first.
"""
