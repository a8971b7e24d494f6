"""Colours: told apart, and read, by everybody."""

import pytest

from jpipe.draw import _palette as palette


def seen_by(fill: str, vision: str) -> tuple[float, ...]:
    """A colour as people see it who lack a kind of cones (Machado et al., 2009)."""
    matrix = {
        "all cones": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
        "protanopia": (
            (0.152286, 1.052583, -0.204868),
            (0.114503, 0.786281, 0.099216),
            (-0.003882, -0.048116, 1.051998),
        ),
        "deuteranopia": (
            (0.367322, 0.860646, -0.227968),
            (0.280085, 0.672501, 0.047413),
            (-0.011820, 0.042940, 0.968881),
        ),
    }[vision]
    linear = [(value / 255) ** 2.2 for value in bytes.fromhex(fill[1:])]
    mixed = [sum(m * v for m, v in zip(row, linear, strict=True)) for row in matrix]
    return tuple(min(max(value, 0.0), 1.0) ** (1 / 2.2) for value in mixed)


@pytest.mark.parametrize("vision", ["all cones", "protanopia", "deuteranopia"])
def test_ops_and_shades_differ_for_every_colour_vision(vision):
    shades = [palette.shade(op, chunk, 2) for op in palette.OPS for chunk in (0, 1)]
    assert len(set(shades)) == 8
    seen = [seen_by(fill, vision) for fill in shades]
    for i, one in enumerate(seen):
        for other in seen[i + 1 :]:
            assert max(abs(a - b) for a, b in zip(one, other, strict=True)) > 0.08


def test_numbers_can_be_read_on_every_shade():
    for op in palette.OPS:
        for chunk in range(4):
            fill = palette.shade(op, chunk, 4)
            light, dark = sorted(
                (palette._luminance(fill), palette._luminance(palette.ink_on(fill))),
                reverse=True,
            )
            assert (light + 0.05) / (dark + 0.05) >= 4, fill
