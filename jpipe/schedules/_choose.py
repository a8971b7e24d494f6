"""Finds the schedule that a user means: a name, a builder or a `Schedule`."""

import reprlib
from typing import Any

from ._catalogue import BY_NAME, named
from ._formats import format_type
from ._replicated import replicated
from ._schedule import Schedule
from ._simulate import ScheduleError


def choose_schedule(schedule: Any, num_stages: int, num_microbatches: int) -> Schedule:
    """Returns a valid schedule for these numbers of stages and micro-batches.

    A builder is called with every number of ranks that divides the number of stages,
    from one stage per rank on, so that builders with several stages per rank fit too.

    Args:
      schedule: a name, a builder or a `Schedule`.
      num_stages: the number of stages.
      num_microbatches: the number of micro-batches.

    Raises:
      ValueError: if the name is unknown or the schedule is for other numbers.
      TypeError: if it is none of these.
    """
    schedule = find_schedule(schedule)
    if isinstance(schedule, Schedule):
        return _check_fit(schedule, num_stages, num_microbatches).validate()
    return _build(schedule, num_stages, num_microbatches).validate()


def find_schedule(schedule: Any) -> Any:
    """Returns a schedule, or a builder of one, whatever it is for.

    Args:
      schedule: a name, a builder or a `Schedule`.

    Raises:
      ValueError: if the name is unknown.
      TypeError: if it is none of these.
    """
    if isinstance(schedule, str):
        return named(schedule)
    if isinstance(schedule, Schedule) or callable(schedule):
        return schedule
    raise TypeError(
        f"schedule={schedule!r} is {format_type(schedule)}; needs a name "
        f"({', '.join(map(repr, BY_NAME))}), a builder of jpipe.schedules or a "
        f"Schedule"
    )


def format_argument(argument: Any) -> str:
    """Formats an argument of the user; a function by its name, without its address."""
    return getattr(argument, "__name__", None) or reprlib.repr(argument)


def _build(builder: Any, num_stages: int, num_microbatches: int) -> Schedule:
    """Calls a builder with every number of ranks until the stages fit."""
    refusals: list[str] = []
    for num_ranks in range(num_stages, 0, -1):
        if num_stages % num_ranks:
            continue
        try:
            schedule = call_builder(builder, num_ranks, num_microbatches)
        except ScheduleError as error:
            # The builder has no order for these numbers.
            refusals.append(f"{num_ranks} ranks: {error}")
            continue
        if schedule.num_stages == num_stages:
            return _check_fit(schedule, num_stages, num_microbatches)
    raise ScheduleError(
        f"schedule={format_argument(builder)} has no order for {num_stages} stages and "
        f"{num_microbatches} micro-batches"
        + "".join(f"\n  * {line}" for line in refusals)
    )


def call_builder(builder: Any, num_ranks: int, num_microbatches: int) -> Schedule:
    """Calls a builder of the user's; raises a TypeError if it makes no schedule."""
    schedule = builder(num_ranks, num_microbatches)
    if not isinstance(schedule, Schedule):
        raise TypeError(
            f"schedule={format_argument(builder)} returned a "
            f"{type(schedule).__name__}; a builder is (num_ranks, num_microbatches) -> "
            f"Schedule"
        )
    return schedule


def choose_replicated(
    replicas: Any, schedule: Any, num_stages: int, num_microbatches: int
) -> Schedule:
    """Returns the schedule of stages at which several ranks take turns.

    Args:
      replicas: the number of ranks of each stage.
      schedule: ``"1f1b"`` or ``"eager_1f1b"``.
      num_stages: the number of stages.
      num_microbatches: the number of micro-batches.

    Raises:
      ValueError: if the schedule is another one, or the replicas are for another number
        of stages.
      ScheduleError: if the replicas are not numbers of ranks.
    """
    # name -> whether transfers are hidden
    is_eager = {"1f1b": False, "eager_1f1b": True}
    if not isinstance(schedule, str) or schedule not in is_eager:
        raise ValueError(
            f"replicas={replicas!r} with schedule={schedule!r}: choose '1f1b' or "
            f"'eager_1f1b', or leave out replicas= and give a Schedule that has them"
        )
    return _check_fit(
        replicated(replicas, num_microbatches, eager=is_eager[schedule]),
        num_stages,
        num_microbatches,
    )


def _check_fit(schedule: Schedule, num_stages: int, num_microbatches: int) -> Schedule:
    """Returns the schedule if it is for these numbers; else raises a ValueError."""
    faults: list[str] = []
    if schedule.num_stages != num_stages:
        faults.append(f"{schedule.num_stages} stages, the pipeline has {num_stages}")
    if schedule.num_microbatches != num_microbatches:
        faults.append(
            f"{schedule.num_microbatches} micro-batches, the pipeline has "
            f"num_microbatches={num_microbatches}"
        )
    if faults:
        raise ValueError(f"schedule {schedule.name!r} is for {' and '.join(faults)}")
    return schedule
