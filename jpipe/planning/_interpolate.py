"""Profiles of micro-batches of a size that was not looked at."""

import dataclasses
from typing import Any

from ._layer import LayerProfile
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
        if a is None or b is None:
            return None
        value = a + part * (b - a)
        return max(value, 0.0) if isinstance(a, float) else max(round(value), 0)

    def layer(a: LayerProfile, b: LayerProfile) -> LayerProfile:
        fields = {
            f.name: between(getattr(a, f.name), getattr(b, f.name))
            for f in dataclasses.fields(a)
            if f.name not in ("name", "kept_bytes")
        }
        kept = {
            mode: between(a.kept_bytes[mode], b.kept_bytes[mode])
            for mode in a.kept_bytes
        }
        return LayerProfile(a.name, kept_bytes=kept, **fields)

    return dataclasses.replace(
        small,
        layers=tuple(map(layer, small.layers, large.layers)),
        input_bytes=between(small.input_bytes, large.input_bytes),
        skips=tuple(
            dataclasses.replace(
                a,
                bytes=between(a.bytes, b.bytes),
                cotangent_bytes=between(a.cotangent_bytes, b.cotangent_bytes),
            )
            for a, b in zip(small.skips, large.skips, strict=True)
        ),
        microbatch_size=size,
    )
