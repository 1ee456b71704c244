"""What CI takes of many like cases; ``FULL_TESTS=1`` takes all of them."""

import os

FULL = os.environ.get("FULL_TESTS") == "1"


def sample(every, some):
    """Return some of the cases, or all of them in a full run."""
    return every if FULL else some
