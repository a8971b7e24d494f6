"""Predictions of random schedules and costs."""

import hypothesis.strategies as st

from jpipe.schedules import BY_NAME, Costs

from .orders import fewest

# Multiples of 1/4: their sums are exact. Some actions take no time at all.
any_time = st.integers(0, 8).map(lambda quarters: quarters / 4)


@st.composite
def predictions(draw):
    """A schedule of the catalogue, and times for each op of each of its stages."""
    name = draw(st.sampled_from(sorted(BY_NAME)))
    p = draw(st.integers(1, 4))
    schedule = BY_NAME[name](p, fewest(name, p) + draw(st.integers(0, 4)))
    stages = schedule.num_stages
    per_stage = st.lists(any_time, min_size=stages, max_size=stages)
    forward, backward, input_grad, weight_grad = (draw(per_stage) for _ in range(4))
    latency = draw(any_time)
    costs = Costs(
        forward,
        backward,
        input_grad,
        weight_grad,
        latency=latency,
        overlap=draw(st.booleans()),
    )
    return schedule, costs
