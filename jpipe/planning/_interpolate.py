"""Profiles of micro-batches of a size that was not profiled.

    cost(size) = cost(small) + (cost(large) - cost(small)) * fraction
    fraction   = (size - small) / (large - small)

Times and bytes are taken to be linear: a part that does not depend on the size, and a
part for each example. Of several sizes, *small* and *large* are the two around the new
one; beyond the ends they are the last two.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from ._profile import Profile


def interpolate(profile: Profile, size: int) -> Profile:
    """A profile of micro-batches of another size.

    Args:
      profile: the profile, of one or several sizes. Of one size, its costs are taken as
        they are.
      size: the number of examples of the micro-batch.

    Returns:
      The profile of this size alone.
    """
    small = profile
    large = profile.larger
    if large is None:
        return dataclasses.replace(profile, microbatch_size=size)
    while large.larger is not None and large.microbatch_size < size:
        small = large
        large = large.larger
    span = large.microbatch_size - small.microbatch_size
    fraction = (size - small.microbatch_size) / span
    layers = zip(small.layers, large.layers, strict=True)
    skips = zip(small.skips, large.skips, strict=True)
    return dataclasses.replace(
        profile,
        layers=tuple(_between_fields(a, b, fraction) for a, b in layers),
        input_bytes=_between(small.input_bytes, large.input_bytes, fraction),
        skips=tuple(_between_fields(a, b, fraction) for a, b in skips),
        microbatch_size=size,
        larger=None,
    )


def _between_fields(small: Any, large: Any, fraction: float) -> Any:
    """A layer or a skip connection with each of its fields between those of two."""
    values = {
        field.name: _between(
            getattr(small, field.name), getattr(large, field.name), fraction
        )
        for field in dataclasses.fields(small)
    }
    return dataclasses.replace(small, **values)


def _between(small: Any, large: Any, fraction: float) -> Any:
    """A number between two; a text or a flag is the same in both."""
    if isinstance(small, Mapping):  # remat mode -> bytes
        return {mode: _between(small[mode], large[mode], fraction) for mode in small}
    if small is None or large is None:
        return None
    if isinstance(small, bool | str):
        return small
    value = small + fraction * (large - small)
    return max(value, 0.0) if isinstance(small, float) else max(round(value), 0)
