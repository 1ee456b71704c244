"""Parallel training on top of the communicator; see docs/parallel.md."""
