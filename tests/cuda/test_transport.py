"""Calls that were made on the device, and are kept."""

from pycoll.cuda import transport


def test_no_limit_becomes_the_default():
    """Which is what the device library takes 0 for."""
    assert [transport.nanoseconds(s) for s in (1e-12, 0.5, 1e9)] == [1, 500_000_000, 10**18]
