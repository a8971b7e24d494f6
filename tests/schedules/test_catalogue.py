"""The schedules of the catalogue: as published, and in closed form."""

import pytest

from jpipe.schedules import BY_NAME, Schedule

from .orders import IN_A_V, ON_A_LINE

PICTURES = {
    "gpipe": """\
r0 |F0 F1 F2 F3 F4 F5 F6 F7 .  .  .  .  .  .  .  .  .  B0 B0 B1 B1 B2 B2 B3 B3 B4 B4 B5 B5 B6 B6 B7 B7 |
r1 |.  F0 F1 F2 F3 F4 F5 F6 F7 .  .  .  .  .  .  B0 B0 B1 B1 B2 B2 B3 B3 B4 B4 B5 B5 B6 B6 B7 B7 .  .  |
r2 |.  .  F0 F1 F2 F3 F4 F5 F6 F7 .  .  .  B0 B0 B1 B1 B2 B2 B3 B3 B4 B4 B5 B5 B6 B6 B7 B7 .  .  .  .  |
r3 |.  .  .  F0 F1 F2 F3 F4 F5 F6 F7 B0 B0 B1 B1 B2 B2 B3 B3 B4 B4 B5 B5 B6 B6 B7 B7 .  .  .  .  .  .  |""",  # noqa: E501
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
    # The literature's backwards descend here; ours ascend everywhere, which takes as
    # long and sums the same bits as every other schedule.
    "looped_bfs": """\
r0 |F0 F1 F2 F3 F4 F5 F6 F7 f0 f1 f2 f3 f4 f5 f6 f7 .  .  .  .  .  .  .  .  .  b0 b0 b1 b1 b2 b2 b3 b3 b4 b4 b5 b5 b6 b6 b7 b7 B0 B0 B1 B1 B2 B2 B3 B3 B4 B4 B5 B5 B6 B6 B7 B7 |
r1 |.  F0 F1 F2 F3 F4 F5 F6 F7 f0 f1 f2 f3 f4 f5 f6 f7 .  .  .  .  .  .  b0 b0 b1 b1 b2 b2 b3 b3 b4 b4 b5 b5 b6 b6 b7 b7 B0 B0 B1 B1 B2 B2 B3 B3 B4 B4 B5 B5 B6 B6 B7 B7 .  .  |
r2 |.  .  F0 F1 F2 F3 F4 F5 F6 F7 f0 f1 f2 f3 f4 f5 f6 f7 .  .  .  b0 b0 b1 b1 b2 b2 b3 b3 b4 b4 b5 b5 b6 b6 b7 b7 B0 B0 B1 B1 B2 B2 B3 B3 B4 B4 B5 B5 B6 B6 B7 B7 .  .  .  .  |
r3 |.  .  .  F0 F1 F2 F3 F4 F5 F6 F7 f0 f1 f2 f3 f4 f5 f6 f7 b0 b0 b1 b1 b2 b2 b3 b3 b4 b4 b5 b5 b6 b6 b7 b7 B0 B0 B1 B1 B2 B2 B3 B3 B4 B4 B5 B5 B6 B6 B7 B7 .  .  .  .  .  .  |""",  # noqa: E501
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


# Where the literature draws none: what each rank starts with tells them apart.
ORDERS = {
    "eager_1f1b": """\
0F0 0F1 0F2 0F3 0F4 0F5 0F6 0B0 0F7 0B1 0B2 0B3 0B4 0B5 0B6 0B7
1F0 1F1 1F2 1F3 1F4 1B0 1F5 1B1 1F6 1B2 1F7 1B3 1B4 1B5 1B6 1B7
2F0 2F1 2F2 2B0 2F3 2B1 2F4 2B2 2F5 2B3 2F6 2B4 2F7 2B5 2B6 2B7
3F0 3B0 3F1 3B1 3F2 3B2 3F3 3B3 3F4 3B4 3F5 3B5 3F6 3B6 3F7 3B7""",
    "gpipe_last_1f1b": """\
0F0 0F1 0F2 0F3 0F4 0F5 0F6 0F7 0B0 0B1 0B2 0B3 0B4 0B5 0B6 0B7
1F0 1F1 1F2 1F3 1F4 1F5 1F6 1F7 1B0 1B1 1B2 1B3 1B4 1B5 1B6 1B7
2F0 2F1 2F2 2F3 2F4 2F5 2F6 2F7 2B0 2B1 2B2 2B3 2B4 2B5 2B6 2B7
3F0 3B0 3F1 3B1 3F2 3B2 3F3 3B3 3F4 3B4 3F5 3B5 3F6 3B6 3F7 3B7""",
    "interleaved_zb": """\
0F0 0F1 0F2 0F3 4F0 4F1 4F2 4F3 4I0 4W0 0F4 4I1 4W1 0F5 4I2 4W2 0F6 4I3 4W3 0F7 0I0 0W0 4F4 0I1 0W1 4F5 0I2 0W2 4F6 0I3 0W3 4F7 4I4 4W4 4I5 4W5 4I6 4W6 4I7 4W7 0I4 0W4 0I5 0W5 0I6 0W6 0I7 0W7
1F0 1F1 1F2 1F3 5F0 5F1 5F2 5I0 5F3 5I1 5W0 1F4 5I2 5W1 1F5 5I3 5W2 1F6 1I0 5W3 1F7 1I1 1W0 5F4 1I2 1W1 5F5 1I3 1W2 5F6 5I4 1W3 5F7 5I5 5W4 5I6 5W5 5I7 5W6 1I4 5W7 1I5 1W4 1I6 1W5 1I7 1W6 1W7
2F0 2F1 2F2 2F3 6F0 6F1 6I0 6F2 6I1 6F3 6I2 6W0 2F4 6I3 6W1 2F5 2I0 6W2 2F6 2I1 6W3 2F7 2I2 2W0 6F4 2I3 2W1 6F5 6I4 2W2 6F6 6I5 2W3 6F7 6I6 6W4 6I7 6W5 2I4 6W6 2I5 6W7 2I6 2W4 2I7 2W5 2W6 2W7
3F0 3F1 3F2 3F3 7F0 7I0 7F1 7I1 7F2 7I2 7F3 7I3 7W0 3F4 3I0 7W1 3F5 3I1 7W2 3F6 3I2 7W3 3F7 3I3 3W0 7F4 7I4 3W1 7F5 7I5 3W2 7F6 7I6 3W3 7F7 7I7 7W4 3I4 7W5 3I5 7W6 3I6 7W7 3I7 3W4 3W5 3W6 3W7""",  # noqa: E501
    "v_half": """\
0F0 0F1 0F2 0F3 0F4 7F0 7I0 7W0 7F1 7I1 7W1 0I0 0W0 7F2 7I2 7W2 7F3 0I1 7I3 7W3 0F5 0W1 0F6 7F4 0I2 7I4 7W4 0W2 0F7 7F5 0I3 7I5 7W5 7F6 0W3 7I6 0I4 7W6 0W4 0I5 7F7 7I7 7W7 0W5 0I6 0W6 0I7 0W7
1F0 1F1 1F2 1F3 1F4 6F0 6I0 6W0 6F1 6I1 1I0 6W1 6F2 1W0 6F3 6I2 1I1 6W2 1W1 6I3 6W3 1F5 6F4 1I2 1W2 1F6 6I4 6W4 6F5 1I3 1W3 1F7 6F6 6I5 6W5 1I4 1W4 6I6 6W6 1I5 6F7 1W5 6I7 1I6 6W7 1W6 1I7 1W7
2F0 2F1 2F2 5F0 2F3 5F1 5I0 5W0 5F2 2I0 5I1 5W1 5F3 2W0 2I1 2W1 5I2 2F4 5W2 5F4 2I2 5I3 5W3 2F5 2W2 2F6 5F5 2I3 5I4 5W4 5F6 2W3 2I4 5I5 5W5 2F7 2W4 2I5 5F7 5I6 5W6 2W5 2I6 5I7 5W7 2W6 2I7 2W7
3F0 4F0 3F1 4F1 3F2 4F2 4I0 4W0 3I0 3W0 3F3 4F3 4I1 3I1 4W1 3W1 4I2 3F4 4F4 3I2 4W2 3W2 4I3 4W3 3F5 4F5 3I3 3W3 3F6 4F6 4I4 3I4 4W4 3W4 4I5 3I5 3F7 4F7 4W5 3W5 4I6 3I6 4W6 3W6 4I7 3I7 4W7 3W7""",  # noqa: E501
    "v_min": """\
0F0 0F1 7F0 7I0 7W0 0F2 7F1 7I1 0I0 7W1 0W0 0F3 7F2 7I2 0I1 7W2 0W1 0F4 7F3 7I3 0I2 7W3 0W2 0F5 7F4 7I4 0I3 7W4 0W3 0F6 7F5 7I5 0I4 7W5 0W4 0F7 7F6 7I6 0I5 7W6 0W5 7F7 7I7 0I6 7W7 0W6 0I7 0W7
1F0 6F0 1F1 6I0 6W0 6F1 1F2 1I0 6I1 6W1 1W0 6F2 1F3 1I1 6I2 6W2 1W1 6F3 1F4 1I2 6I3 6W3 1W2 6F4 1F5 1I3 6I4 6W4 1W3 6F5 1F6 1I4 6I5 6W5 1W4 6F6 1F7 1I5 6I6 6W6 1W5 6F7 1I6 6I7 6W7 1W6 1I7 1W7
2F0 5F0 2F1 5I0 5F1 5W0 2I0 2F2 2W0 5I1 5F2 5W1 2I1 2F3 2W1 5I2 5F3 5W2 2I2 2F4 2W2 5I3 5F4 5W3 2I3 2F5 2W3 5I4 5F5 5W4 2I4 2F6 2W4 5I5 5F6 5W5 2I5 2F7 2W5 5I6 5F7 5W6 2I6 2W6 5I7 5W7 2I7 2W7
3F0 4F0 3F1 4F1 4I0 3I0 4W0 3W0 3F2 4F2 4I1 3I1 4W1 3W1 3F3 4F3 4I2 3I2 4W2 3W2 3F4 4F4 4I3 3I3 4W3 3W3 3F5 4F5 4I4 3I4 4W4 3W4 3F6 4F6 4I5 3I5 4W5 3W5 3F7 4F7 4I6 3I6 4W6 3W6 4I7 3I7 4W7 3W7""",  # noqa: E501
    "1f1b_v": """\
0F0 0F1 7F0 7B0 0F2 7F1 7B1 0F3 7F2 7B2 0F4 7F3 7B3 0B0 0F5 7F4 7B4 0B1 0F6 7F5 7B5 0B2 0F7 7F6 7B6 0B3 7F7 7B7 0B4 0B5 0B6 0B7
1F0 6F0 1F1 6B0 6F1 1F2 6B1 6F2 1F3 6B2 6F3 1F4 1B0 6B3 6F4 1F5 1B1 6B4 6F5 1F6 1B2 6B5 6F6 1F7 1B3 6B6 6F7 1B4 6B7 1B5 1B6 1B7
2F0 5F0 2F1 5F1 5B0 2F2 5F2 5B1 2F3 2B0 5F3 5B2 2F4 2B1 5F4 5B3 2F5 2B2 5F5 5B4 2F6 2B3 5F6 5B5 2F7 2B4 5F7 5B6 2B5 5B7 2B6 2B7
3F0 4F0 3F1 4F1 3F2 4F2 4B0 3B0 3F3 4F3 4B1 3B1 3F4 4F4 4B2 3B2 3F5 4F5 4B3 3B3 3F6 4F6 4B4 3B4 3F7 4F7 4B5 3B5 4B6 3B6 4B7 3B7""",  # noqa: E501
    "forward_only": """\
0F0 0F1 0F2 0F3 0F4 0F5 0F6 0F7
1F0 1F1 1F2 1F3 1F4 1F5 1F6 1F7
2F0 2F1 2F2 2F3 2F4 2F5 2F6 2F7
3F0 3F1 3F2 3F3 3F4 3F5 3F6 3F7""",
}


def stage_of(name: str, num_ranks: int, rank: int, chunk: bool) -> int:
    """Which stage a chunk of a rank is: round the ranks, or down and up again."""
    if name in IN_A_V and chunk:
        return 2 * num_ranks - 1 - rank
    return chunk * num_ranks + rank


def cells(picture: str) -> list[list[str]]:
    """The columns of each rank of a picture."""
    lines = [line for line in picture.splitlines() if "|" in line]
    return [line.split("|")[1].split() for line in lines]


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


@pytest.mark.parametrize("name", ORDERS)
def test_four_ranks_and_eight_microbatches_are_in_this_order(name):
    assert BY_NAME[name](4, 8).to_text() == ORDERS[name]


def test_picture_names_the_stage_where_a_rank_has_several():
    v_shape = Schedule.from_text("0F0 2F0 2B0 0B0\n1F0 1B0", name="v")
    assert v_shape.placement == (0, 1, 0)
    assert str(v_shape) == (
        "v: 2 ranks, 3 stages, 1 micro-batch, bubble 50.0 %\n"
        "rank 0 |0F0 .   2F0 2B0 2B0 .   .   0B0 0B0|\n"
        "rank 1 |.   1F0 .   .   .   1B0 1B0 .   .  |"
    )
