"""Profiles of micro-batches of a size that was not looked at."""

import dataclasses
from typing import Any

import jax

from ..schedules._json import decode
from ._profile import Profile


def interpolated(small: Profile, large: Profile, size: int) -> Profile:
    """A profile of micro-batches of another size, from those of two sizes.

    Times and bytes are taken to grow evenly: a part that does not depend on the size,
    and a part for each example.

    Args:
      small: of the smaller micro-batch.
      large: of the larger one; may be the same.
      size: examples of the micro-batch that is sought.

    Returns:
      The profile.
    """
    span = large.microbatch_size - small.microbatch_size
    part = (size - small.microbatch_size) / span if span else 0.0

    def between(a: Any, b: Any) -> Any:
        if a is None or b is None or isinstance(a, bool | str):
            return a if b is not None else b
        value = a + part * (b - a)
        return max(value, 0.0) if isinstance(a, float) else max(round(value), 0)

    fields = jax.tree.map(
        between,
        dataclasses.asdict(small),
        dataclasses.asdict(large),
        is_leaf=lambda leaf: leaf is None,
    )
    fields |= {"microbatch_size": size, "action_seconds": small.action_seconds}
    return decode(Profile, fields)
