"""What `DataParallel` and `ZeroOptimizer` are made of: parameters, buckets, groups, loss scale.

Uses `pycoll.parallel` and PyTorch. Read `module_parameters` first.
"""
