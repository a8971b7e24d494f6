"""Schedules side by side, as a table."""

import pytest

from jpipe.schedules import BY_NAME, Comparison, Costs, compare


def test_a_comparison_prints_as_a_table():
    names = "gpipe", "1f1b", "interleaved", "zb_h1", "zb_v", "dualpipe_v"
    schedules = [BY_NAME[name](4, 8) for name in names]
    comparison = compare(schedules, Costs(latency=0.25, parameter_bytes=1000))
    assert isinstance(comparison, Comparison)
    assert (
        str(comparison)
        == """\
| schedule    | stages | time  | bubble | peak bytes per rank    |
| ----------- | ------ | ----- | ------ | ---------------------- |
| gpipe       | 4      | 34.5  | 30.4 % | 1008, 1008, 1008, 1008 |
| 1f1b        | 4      | 37    | 35.1 % | 1004, 1003, 1002, 1001 |
| interleaved | 8      | 32    | 25.0 % | 1006, 1004, 1004, 1002 |
| zb_h1       | 4      | 30    | 20.0 % | 1004, 1004, 1004, 1004 |
| zb_v        | 8      | 28.75 | 16.5 % | 1004, 1004, 1004, 1004 |
| dualpipe_v  | 8      | 29.5  | 18.6 % | 1004, 1004, 1004, 1004 |"""
    )


def test_costs_of_stages_are_for_schedules_of_as_many():
    costs = Costs(forward=[1.0] * 8)
    both = [BY_NAME["interleaved"](4, 8), BY_NAME["gpipe"](4, 8)]
    assert compare(both[:1], costs).timelines == (both[0].simulate(costs),)
    with pytest.raises(ValueError, match="are for 8 stages, gpipe has 4; give one"):
        compare(both, costs)
    with pytest.raises(TypeError, match=r"'gpipe' are not .* such as \[gpipe\(4, 8\)"):
        compare("gpipe")
