"""The builders, by name."""

from typing import Any, overload

from ._blocks import one_f_one_b_v, v_half, v_min
from ._flush import (
    eager_one_f_one_b,
    forward_only,
    gpipe,
    gpipe_last_one_f_one_b,
    one_f_one_b,
)
from ._looped import interleaved, interleaved_zb, looped_bfs
from ._schedule import Schedule, ScheduleBuilder
from ._zero_bubble import dualpipe_v, zb_h1, zb_h2, zb_v

BY_NAME: dict[str, ScheduleBuilder] = {
    "gpipe": gpipe,
    "gpipe_last_1f1b": gpipe_last_one_f_one_b,
    "1f1b": one_f_one_b,
    "eager_1f1b": eager_one_f_one_b,
    "interleaved": interleaved,
    "interleaved_zb": interleaved_zb,
    "looped_bfs": looped_bfs,
    "zb_h1": zb_h1,
    "zb_h2": zb_h2,
    "zb_v": zb_v,
    "v_half": v_half,
    "v_min": v_min,
    "1f1b_v": one_f_one_b_v,
    "dualpipe_v": dualpipe_v,
    "forward_only": forward_only,
}


@overload
def named(name: str) -> ScheduleBuilder: ...


@overload
def named(name: str, num_ranks: int, num_microbatches: int) -> Schedule: ...


def named(
    name: str, num_ranks: int | None = None, num_microbatches: int | None = None
) -> Any:
    """The builder of that name, or what it builds.

    Args:
      name: of the catalogue, or of a function of it.
      num_ranks: the number of ranks; left out: the builder itself.
      num_microbatches: likewise, of micro-batches.

    Returns:
      The builder, or its schedule of these numbers.

    Raises:
      ValueError: if there is none; the message lists those that there are.

    Example:
      >>> named("zb_v", 4, 8) == named("zb_v")(4, 8)
      True
    """
    if (key := key_of(name)) is None:
        raise ValueError(
            f"unknown schedule {name!r}: choose {', '.join(map(repr, BY_NAME))}, a "
            f"builder of jpipe.schedules or a Schedule"
        )
    sizes: Any = num_ranks, num_microbatches
    return BY_NAME[key] if sizes == (None, None) else BY_NAME[key](*sizes)


def key_of(schedule: Any) -> str | None:
    """The name by which the catalogue has a schedule; ``None`` if it has not.

    Args:
      schedule: its name, that of its function, or the function.
    """
    if isinstance(schedule, str):
        schedule = BY_NAME.get(schedule.replace("one_f_one_b", "1f1b"), schedule)
    return next((key for key, made in BY_NAME.items() if made is schedule), None)
