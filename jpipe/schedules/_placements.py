"""Where stages can be: on a line, in a V, round the ranks."""

from ._build import check, loop, placed, v_shape
from ._costs import Costs
from ._simulate import ScheduleError, check_costs


def placements(
    name: str, costs: Costs, num_ranks: int, num_microbatches: int
) -> list[tuple[int, ...]]:
    """The placements of as many stages as costs are given for.

    Args:
      name: who asks, for messages.
      costs: what each stage costs; numbers for all: one stage per rank.
      num_ranks: the number of ranks.
      num_microbatches: the number of micro-batches.

    Raises:
      ScheduleError: if a number is less than 1, the stages do not divide, or costs are
        negative or not finite.
    """
    check(name, {"num_ranks": num_ranks, "num_microbatches": num_microbatches})
    check_costs(name, costs, num_microbatches)
    stages = num_ranks if costs.num_stages is None else costs.num_stages
    if stages < 1 or stages % num_ranks:
        raise ScheduleError(
            f"{name}: costs are for {stages} stages, num_ranks={num_ranks}: give costs "
            f"for {num_ranks} stages, or for a multiple of it"
        )
    check_costs(name, costs, num_microbatches, stages)  # where skips end
    chunks = stages // num_ranks
    shapes = [v_shape(num_ranks)] if chunks == 2 else []
    found = [placed(num_ranks, chunks, shape) for shape in [*shapes, loop(num_ranks)]]
    return list(dict.fromkeys(found))
