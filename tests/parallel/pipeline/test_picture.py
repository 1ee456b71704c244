"""Pictures of pipeline schedules: the boxes are those of the simulation."""

import pytest

from pycoll.errors import ArgumentError
from pycoll.parallel.pipeline import simulate
from pycoll.parallel.pipeline.picture import live_activations, picture
from pycoll.parallel.pipeline.registry import find

matplotlib = pytest.importorskip("matplotlib")


@pytest.mark.parametrize("name", ["1f1b", "zb_v"])
def test_every_operation_is_a_box(name):
    timing = simulate(find(name).program(3, 5))
    figure = picture(timing)
    boxes = [(round(bar.get_x(), 9), bar.get_y() + 0.43) for bar in figure.axes[0].patches]
    wanted = [(start, stage) for stage, own in enumerate(timing.spans) for start, _ in own.values()]
    assert sorted((x, round(y)) for x, y in boxes) == sorted(wanted)
    assert f"{timing.bubble_fraction:.1%}" in figure.get_suptitle()


def test_the_memory_below_is_what_the_schedule_states():
    timing = simulate(find("1f1b").program(4, 8))
    assert [max(live_activations(timing, own)[1]) for own in timing.spans] == [4, 3, 2, 1]


def test_too_much_for_a_picture():
    with pytest.raises(ArgumentError, match="at most 4000"):
        picture(simulate(find("gpipe").program(16, 100)))
