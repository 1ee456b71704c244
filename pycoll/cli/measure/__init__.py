"""How ``pycoll bench`` and ``pycoll tune`` measure: data, timing, reports, choices.

Read `bench_time` first.
"""
