"""Profiles of micro-batches of a size that was not profiled.

    cost(size) = cost(small) + (cost(large) - cost(small)) * fraction
    fraction   = (size - small) / (large - small)

Times and bytes are taken to be linear: a part that does not depend on the size, and a
part for each example. Of several sizes, *small* and *large* are the two around the new
one; beyond the ends they are the last two. There the line may fall below what no device
can do, or even below 0, where it is steeper than it should be or measured with noise:

    cost(size) >= cost(small) * size / small    for a size below all that were profiled
    cost(size) >= cost(large)                   for a size above them
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ._profile import Profile, SkipProfile


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
    interpolation = _Interpolation(size, small.microbatch_size, large.microbatch_size)
    layers = zip(small.layers, large.layers, strict=True)
    skips = [
        interpolation.extend_fields(a, b)
        for a, b in _pair_skips(small.skips, large.skips)
    ]
    return dataclasses.replace(
        profile,
        layers=tuple(interpolation.extend_fields(a, b) for a, b in layers),
        input_bytes=interpolation.extend(small.input_bytes, large.input_bytes),
        skips=tuple(skip for skip in skips if skip.bytes > 0),
        microbatch_size=size,
        larger=None,
    )


def _pair_skips(
    small_skips: Sequence[SkipProfile], large_skips: Sequence[SkipProfile]
) -> Iterator[tuple[SkipProfile, SkipProfile]]:
    """The skip connections of two sizes; one that a size lacks has no bytes there.

    Equations are ordered by the bytes of their results, which depend on the size, and
    the order decides which section computes a value.
    """
    small_by_ends = {(x.name, x.source, x.target): x for x in small_skips}
    large_by_ends = {(x.name, x.source, x.target): x for x in large_skips}
    for ends in small_by_ends | large_by_ends:
        skip = small_by_ends.get(ends) or large_by_ends[ends]
        no_skip = dataclasses.replace(skip, bytes=0, cotangent_bytes=0)
        yield small_by_ends.get(ends, no_skip), large_by_ends.get(ends, no_skip)


class _Interpolation(NamedTuple):
    """Costs of one size, from those of two others.

    Attributes:
      size: the number of examples.
      small: the smaller of the two sizes.
      large: the larger one.
    """

    size: int
    small: int
    large: int

    def extend_fields(self, small: Any, large: Any) -> Any:
        """A layer or a skip connection, with each of its fields from those of two."""
        values = {
            field.name: self.extend(
                getattr(small, field.name), getattr(large, field.name)
            )
            for field in dataclasses.fields(small)
        }
        return dataclasses.replace(small, **values)

    def extend(self, small: Any, large: Any) -> Any:
        """A number from two; a text or a flag is the same in both."""
        if isinstance(small, Mapping):  # remat mode -> bytes
            return {mode: self.extend(small[mode], large[mode]) for mode in small}
        if small is None or large is None:
            return None
        if isinstance(small, bool | str):
            return small
        fraction = (self.size - self.small) / (self.large - self.small)
        value = small + fraction * (large - small)
        if self.size < self.small:
            value = max(value, small * self.size / self.small)
        elif self.size > self.large:
            value = max(value, large)
        return value if isinstance(small, float) else round(value)
