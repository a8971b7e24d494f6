"""What no order of the same actions can beat."""

from collections.abc import Sequence

from ._build import check, placements
from ._costs import Costs
from ._homes import Homes
from ._one_machine import one_machine_bound
from ._simulate import ScheduleError, check_costs


def lower_bound(
    costs: Costs,
    num_ranks: int,
    num_microbatches: int,
    placement: Sequence[int] | None = None,
    *,
    forward_only: bool = False,
) -> float:
    """A time that no schedule of these stages beats, whatever it may hold.

    Each rank is looked at alone: everything it has to do, nothing before the stages
    before it can have been run, and after each action the stages that follow, and the
    exchange of gradients. It may even interrupt its work; the best order is then known.
    Backwards are whole or split, whichever is less. The longest chain of one
    micro-batch and the work of the busiest rank with its warm-up and drain are among
    what is counted.

    Args:
      costs: what each action costs; one entry per stage, or numbers for all.
      num_ranks: the number of ranks.
      num_microbatches: the number of micro-batches.
      placement: the rank of each stage; default: of those that `fit` tries for this
        number of stages, the one with the least bound.
      forward_only: whether there is nothing but forwards.

    Returns:
      The bound, in the unit of the costs; exact but for the rounding of sums.

    Raises:
      ScheduleError: if a number is less than 1, stages do not divide among ranks, or
        costs are negative or not finite.

    Example:
      >>> from jpipe.schedules import zb_h2
      >>> lower_bound(Costs(), 4, 8), zb_h2(4, 8).simulate().makespan
      (27.0, 27.0)

    References:
      Carlier, The one-machine sequencing problem (1982).
    """
    name = "lower_bound"
    if placement is None:
        some = placements(name, costs, num_ranks, num_microbatches)
    else:
        check(name, {"num_ranks": num_ranks, "num_microbatches": num_microbatches})
        check_costs(name, costs, num_microbatches, len(placement))
        some = [placement]
        if not placement or not all(0 <= rank < num_ranks for rank in placement):
            raise ScheduleError(
                f"{name}: placement={tuple(placement)} is not a rank below "
                f"{num_ranks} for each stage"
            )
    return min(
        one_machine_bound(costs, Homes(where), num_microbatches, forward_only)
        for where in some
    )
