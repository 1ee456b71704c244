"""Times in words are three digits and a unit, at every size."""

import pytest

from pycoll.observe.page import duration


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 us"),
        (2.5e-7, "0.25 us"),
        (2.687e-5, "26.9 us"),
        (9.994e-4, "999 us"),
        (9.996e-4, "1 ms"),
        (0.0060684, "6.07 ms"),
        (0.9994, "999 ms"),
        (0.9996, "1 s"),
        (99.94, "99.9 s"),
        (99.96, "100 s"),
        (12345.6, "12,346 s"),
    ],
)
def test_a_time_in_words(seconds, text):
    assert duration(seconds) == text
