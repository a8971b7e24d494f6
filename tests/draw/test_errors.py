"""Pictures that cannot be drawn."""

import pytest

from jpipe import draw

from .pictures import predicted


@pytest.mark.parametrize("render", [draw.svg, draw.trace])
def test_no_timelines_and_a_wrong_number_of_titles_are_refused(render):
    with pytest.raises(ValueError, match=r"no timelines: give one or more"):
        render([])
    with pytest.raises(ValueError, match=r"titles=\['a', 'b'\] for 1 timelines"):
        render(predicted("gpipe"), titles=["a", "b"])
    with pytest.raises(ValueError, match="width=100: must be at least 400"):
        draw.svg(predicted("gpipe"), width=100)


def test_objects_without_times_are_not_drawn():
    with pytest.raises(TypeError, match=r"a str is not a timeline: draw a Schedule, "):
        draw.svg(["1f1b"])
