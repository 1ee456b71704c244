"""What trainers do with a process group, as functions ``case(rank, n) -> numbers``.

Each returns numbers that must not depend on the backend: losses, checksums. The tests compare them
between gloo and pycoll, and benchmarks/torch_clients.py writes the table in docs/torch.md.
"""
