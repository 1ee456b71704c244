"""The tests of trainers that `torch_trainers.py` runs, and what they are run in."""
