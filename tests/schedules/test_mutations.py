"""Any single change of a good schedule is refused."""

import dataclasses
import re

import hypothesis.strategies as st
from hypothesis import assume, given

from jpipe.schedules import BY_NAME

from .orders import fewest, refusal_of


@st.composite
def mutations(draw):
    """A schedule of the catalogue, and it with one cell too few, too many or other."""
    name = draw(st.sampled_from(sorted(BY_NAME)))
    p = draw(st.integers(1, 4))
    schedule = BY_NAME[name](p, fewest(name, p) + draw(st.integers(0, 4)))
    rows = [list(row) for row in schedule.rows]
    row = draw(st.sampled_from(rows))
    position = draw(st.integers(0, len(row) - 1))
    old = row[position]
    mutation = draw(st.sampled_from(["drop", "repeat", "stage", "microbatch", "op"]))
    if mutation == "drop":
        del row[position]
    elif mutation == "repeat":
        draw(st.sampled_from(rows)).append(old)
    elif mutation == "op":
        row[position] = old._replace(
            op=draw(st.sampled_from("FBIWR".replace(old.op, "")))
        )
    else:
        count = {"stage": schedule.num_stages, "microbatch": schedule.num_microbatches}
        new = draw(st.integers(-1, count[mutation]))
        assume(new != getattr(old, mutation))
        row[position] = old._replace(**{mutation: new})
    rows = tuple(map(tuple, rows))
    return mutation, dataclasses.replace(schedule, rows=rows)


# The rules of which one has to be named.
RULES = {
    "drop": {"E5"},
    "repeat": {"E4", "E5"},
    "stage": {"E2", "E4", "E5"},
    "microbatch": {"E3", "E5"},
    "op": {"E1", "E5"},
}


@given(mutations())
def test_every_single_mutation_is_refused(mutation):
    name, schedule = mutation
    assert RULES[name] & set(re.findall(r"E\d+", refusal_of(schedule)))
