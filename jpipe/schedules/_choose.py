"""Which schedule is meant: by name, by builder, or itself."""

import reprlib
from typing import Any

from ._catalogue import BY_NAME, named
from ._replicated import replicated
from ._schedule import Schedule
from ._simulate import ScheduleError


def choose_schedule(schedule: Any, num_stages: int, num_microbatches: int) -> Schedule:
    """Returns a valid schedule for so many stages and micro-batches.

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
    if isinstance(schedule, str):
        schedule = named(schedule)
    if isinstance(schedule, Schedule):
        return _check_fit(schedule, num_stages, num_microbatches).validate()
    if not callable(schedule):
        raise TypeError(
            f"schedule={schedule!r} is a {type(schedule).__name__}; needs a name "
            f"({', '.join(map(repr, BY_NAME))}), a builder of jpipe.schedules or a "
            f"Schedule"
        )
    return _build(schedule, num_stages, num_microbatches).validate()


def called(given: Any) -> str:
    """What was given as it is typed: the address of a function is no help."""
    return getattr(given, "__name__", None) or reprlib.repr(given)


def _build(builder: Any, num_stages: int, num_microbatches: int) -> Schedule:
    refused = []
    for num_ranks in range(num_stages, 0, -1):
        if num_stages % num_ranks:
            continue
        try:
            built = builder(num_ranks, num_microbatches)
        except ScheduleError as error:  # an order that so many ranks do not have
            refused.append(f"{num_ranks} ranks: {error}")
            continue
        if not isinstance(built, Schedule):
            raise TypeError(
                f"schedule={called(builder)} returned a {type(built).__name__}; a "
                f"builder is (num_ranks, num_microbatches) -> Schedule"
            )
        if built.num_stages == num_stages:
            return _check_fit(built, num_stages, num_microbatches)
    raise ScheduleError(
        f"schedule={called(builder)} has no order for {num_stages} stages and "
        f"{num_microbatches} micro-batches"
        + "".join(f"\n  * {line}" for line in refused)
    )


def turns(
    replicas: Any, schedule: Any, num_stages: int, num_microbatches: int
) -> Schedule:
    """The schedule of stages at which several ranks take turns.

    Args:
      replicas: the number of ranks of each stage.
      schedule: the name of one that has such an order.
      num_stages: the number of stages.
      num_microbatches: the number of micro-batches.

    Raises:
      ValueError: if the schedule has none, or there are other numbers of stages.
      ScheduleError: if they are no numbers of ranks.
    """
    names = {"1f1b": False, "eager_1f1b": True}
    if not isinstance(schedule, str) or schedule not in names:
        raise ValueError(
            f"replicas={replicas!r} with schedule={schedule!r}: choose '1f1b' or "
            f"'eager_1f1b', or leave out replicas= and give a Schedule that has them"
        )
    made = replicated(replicas, num_microbatches, eager=names[schedule])
    return _check_fit(made, num_stages, num_microbatches)


def _check_fit(schedule: Schedule, num_stages: int, num_microbatches: int) -> Schedule:
    faults = []
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
