"""Waiting for what a look at a job shall show."""

import time


def until(look, seconds=30.0):
    """Call `look` until it returns something true, and return that."""
    give_up = time.monotonic() + seconds
    while True:
        found = look()
        if found:
            return found
        assert time.monotonic() < give_up, "waited too long"
        time.sleep(0.02)
