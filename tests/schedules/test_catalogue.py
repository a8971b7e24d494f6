"""The schedules of the catalogue: as published, and in closed form.

A private name is imported: what the catalogue says of a schedule that is not built.
"""

import itertools
from collections import Counter
from pathlib import Path

import pytest

import jpipe
from jpipe.schedules import BY_NAME, Schedule
from jpipe.schedules._catalogue import CATALOGUE

from .orders import IN_A_V, ON_A_LINE

PICTURES = {
    "1f1b": """\
r0 |F0 F1 F2 F3 .  .  .  .  .  .  B0 B0 F4 B1 B1 F5 B2 B2 F6 B3 B3 F7 B4 B4 .  B5 B5 .  B6 B6 .  B7 B7 |
r1 |.  F0 F1 F2 .  .  .  .  B0 B0 F3 B1 B1 F4 B2 B2 F5 B3 B3 F6 B4 B4 F7 B5 B5 .  B6 B6 .  B7 B7 .  .  |
r2 |.  .  F0 F1 .  .  B0 B0 F2 B1 B1 F3 B2 B2 F4 B3 B3 F5 B4 B4 F6 B5 B5 F7 B6 B6 .  B7 B7 .  .  .  .  |
r3 |.  .  .  F0 B0 B0 F1 B1 B1 F2 B2 B2 F3 B3 B3 F4 B4 B4 F5 B5 B5 F6 B6 B6 F7 B7 B7 .  .  .  .  .  .  |""",  # noqa: E501
    "interleaved": """\
r0 |F0 F1 F2 F3 f0 f1 f2 f3 F4 F5 F6 .  .  .  b0 b0 F7 b1 b1 .  f4 b2 b2 f5 b3 b3 f6 B0 B0 f7 B1 B1 B2 B2 .  B3 B3 .  b4 b4 .  b5 b5 .  b6 b6 .  b7 b7 B4 B4 B5 B5 B6 B6 B7 B7 |
r1 |.  F0 F1 F2 F3 f0 f1 f2 f3 F4 .  .  b0 b0 F5 b1 b1 F6 b2 b2 F7 b3 b3 f4 B0 B0 f5 B1 B1 f6 B2 B2 f7 B3 B3 .  b4 b4 .  b5 b5 .  b6 b6 .  b7 b7 B4 B4 B5 B5 B6 B6 B7 B7 .  .  |
r2 |.  .  F0 F1 F2 F3 f0 f1 f2 .  b0 b0 f3 b1 b1 F4 b2 b2 F5 b3 b3 F6 B0 B0 F7 B1 B1 f4 B2 B2 f5 B3 B3 f6 b4 b4 f7 b5 b5 .  b6 b6 .  b7 b7 B4 B4 B5 B5 B6 B6 B7 B7 .  .  .  .  |
r3 |.  .  .  F0 F1 F2 F3 f0 b0 b0 f1 b1 b1 f2 b2 b2 f3 b3 b3 F4 B0 B0 F5 B1 B1 F6 B2 B2 F7 B3 B3 f4 b4 b4 f5 b5 b5 f6 b6 b6 f7 b7 b7 B4 B4 B5 B5 B6 B6 B7 B7 .  .  .  .  .  .  |""",  # noqa: E501
    "zb_h1": """\
r0 |F0 F1 F2 F3 .  .  .  I0 W0 F4 I1 W1 F5 I2 W2 F6 I3 W3 F7 I4 W4 I5 W5 I6 W6 I7 W7 |
r1 |.  F0 F1 F2 .  .  I0 F3 I1 W0 F4 I2 W1 F5 I3 W2 F6 I4 W3 F7 I5 W4 I6 W5 I7 W6 W7 |
r2 |.  .  F0 F1 .  I0 F2 I1 F3 I2 W0 F4 I3 W1 F5 I4 W2 F6 I5 W3 F7 I6 W4 I7 W5 W6 W7 |
r3 |.  .  .  F0 I0 F1 I1 F2 I2 F3 I3 W0 F4 I4 W1 F5 I5 W2 F6 I6 W3 F7 I7 W4 W5 W6 W7 |""",  # noqa: E501
    "zb_h2": """\
r0 |F0 F1 F2 F3 F4 F5 F6 I0 W0 F7 I1 W1 I2 W2 I3 W3 I4 W4 I5 W5 I6 W6 I7 W7 .  .  .  |
r1 |.  F0 F1 F2 F3 F4 I0 F5 I1 F6 I2 W0 F7 I3 W1 I4 W2 I5 W3 I6 W4 I7 W5 W6 W7 .  .  |
r2 |.  .  F0 F1 F2 I0 F3 I1 F4 I2 F5 I3 F6 I4 W0 F7 I5 W1 I6 W2 I7 W3 W4 W5 W6 W7 .  |
r3 |.  .  .  F0 I0 F1 I1 F2 I2 F3 I3 F4 I4 F5 I5 F6 I6 W0 F7 I7 W1 W2 W3 W4 W5 W6 W7 |""",  # noqa: E501
    "zb_v": """\
r0 |F0 F1 F2 F3 F4 F5 F6 f0 i0 w0 f1 i1 w1 f2 i2 w2 f3 i3 w3 F7 I0 W0 f4 i4 w4 I1 W1 f5 i5 w5 I2 W2 f6 i6 w6 I3 W3 f7 i7 w7 I4 W4 I5 W5 I6 W6 I7 W7 .  .  .  |
r1 |.  F0 F1 F2 F3 F4 f0 F5 f1 i0 w0 f2 i1 w1 f3 i2 w2 F6 I0 W0 f4 i3 w3 F7 I1 W1 f5 i4 w4 I2 W2 f6 i5 w5 I3 W3 f7 i6 w6 I4 i7 I5 W4 I6 W5 I7 W6 w7 W7 .  .  |
r2 |.  .  F0 F1 F2 f0 F3 f1 F4 f2 i0 w0 f3 i1 w1 F5 I0 W0 f4 i2 w2 F6 I1 W1 f5 i3 w3 F7 I2 W2 f6 i4 w4 I3 W3 f7 i5 w5 I4 i6 I5 i7 I6 W4 I7 W5 w6 w7 W6 W7 .  |
r3 |.  .  .  F0 f0 F1 f1 F2 f2 F3 f3 i0 w0 F4 I0 W0 f4 i1 w1 F5 I1 W1 f5 i2 w2 F6 I2 W2 f6 i3 w3 F7 I3 W3 f7 i4 w4 I4 i5 I5 i6 I6 i7 I7 W4 w5 w6 w7 W5 W6 W7 |""",  # noqa: E501
    "dualpipe_v": """\
r0 |F0 F1 F2 F3 F4 F5 F6 f0 i0 w0 f1 i1 w1 f2 i2 w2 f3 F7 b3 b3 f4 B0 B0 b4 b4 f5 .  B1 B1 b5 b5 f6 .  B2 B2 b6 b6 f7 .  B3 B3 b7 b7 I4 W4 I5 W5 I6 W6 I7 W7 |
r1 |.  F0 F1 F2 F3 F4 f0 F5 f1 i0 w0 f2 i1 w1 f3 F6 b2 b2 f4 B0 B0 F7 b3 b3 f5 B1 B1 b4 b4 f6 .  B2 B2 b5 b5 f7 .  B3 B3 b6 b6 B4 B4 i7 I5 w7 I6 W5 I7 W6 W7 |
r2 |.  .  F0 F1 F2 f0 F3 f1 F4 f2 i0 w0 f3 F5 b1 b1 f4 B0 B0 F6 b2 b2 f5 B1 B1 F7 b3 b3 f6 B2 B2 b4 b4 f7 .  B3 B3 b5 b5 B4 B4 b6 b6 I5 i7 I6 W5 I7 w7 W6 W7 |
r3 |.  .  .  F0 f0 F1 f1 F2 f2 F3 f3 F4 b0 b0 f4 B0 B0 F5 b1 b1 f5 B1 B1 F6 b2 b2 f6 B2 B2 F7 b3 b3 f7 B3 B3 b4 b4 B4 B4 b5 b5 B5 B5 i6 I6 i7 I7 w6 W6 w7 W7 |""",  # noqa: E501
}


def stage_of(name: str, num_ranks: int, rank: int, chunk: bool) -> int:
    """The stage of a chunk of a rank: round the ranks, or down and up again."""
    if name in IN_A_V and chunk:
        return 2 * num_ranks - 1 - rank
    return chunk * num_ranks + rank


def cells(picture: str) -> list[list[str]]:
    """The columns of each rank of a picture."""
    lines = [line for line in picture.splitlines() if "|" in line]
    return [line.split("|")[1].split() for line in lines]


@pytest.mark.parametrize("name", BY_NAME)
def test_a_schedule_of_the_catalogue_is_public_and_on_the_pages(name):
    builder = BY_NAME[name]
    assert getattr(jpipe.schedules, builder.__name__, None) is builder, (
        "import it in jpipe/schedules/__init__.py"
    )
    docs = Path(__file__).parents[2] / "docs"
    rows = (docs / "schedules.md").read_text()
    assert f'`"{name}"`' in rows, "add its row to docs/schedules.md"
    gallery = (docs / "gallery.md").read_text()
    assert f"\n## {name}\n" in gallery, "add its heading to docs/gallery.md"
    assert f"(gallery/{name}.svg)" in gallery, "add its picture to docs/gallery.md"
    assert (docs / "gallery" / f"{name}.svg").exists(), (
        "run the first block of docs/schedules.md, copy its picture from build/gallery"
    )


@pytest.mark.parametrize("name", BY_NAME)
def test_the_catalogue_says_where_stages_are_and_which_backwards_are_halved(name):
    entry = CATALOGUE[name]
    for num_ranks, num_microbatches in itertools.product((2, 3, 4), (8, 12)):
        schedule = BY_NAME[name](num_ranks, num_microbatches)
        assert entry.place(num_ranks) == schedule.placement
        cells = Counter((x.stage, x.op) for row in schedule.rows for x in row)
        shares = {
            cells[stage, "W"] / num_microbatches for stage in range(schedule.num_stages)
        }
        assert entry.split_share == (shares.pop() if len(shares) == 1 else None)


@pytest.mark.parametrize("name", PICTURES)
def test_four_ranks_and_eight_microbatches_run_as_published(name):
    shown = cells(BY_NAME[name](4, 8).simulate().to_text())
    picture = cells(PICTURES[name])
    if name not in ON_A_LINE:  # there each cell names its stage
        for rank, line in enumerate(picture):
            line[:] = [
                cell
                if cell == "."
                else f"{stage_of(name, 4, rank, cell[0].islower())}{cell.upper()}"
                for cell in line
            ]
    assert shown == picture


def test_picture_names_the_stage_where_a_rank_has_several():
    v_shape = Schedule.from_text("0F0 2F0 2B0 0B0\n1F0 1B0", name="v")
    assert v_shape.placement == (0, 1, 0)
    assert str(v_shape) == (
        "v: 2 ranks, 3 stages, 1 micro-batch, bubble 50.0 %\n"
        "rank 0 |0F0 .   2F0 2B0 2B0 .   .   0B0 0B0|\n"
        "rank 1 |.   1F0 .   .   .   1B0 1B0 .   .  |"
    )
