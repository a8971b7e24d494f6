"""The profiles from which a plan is predicted, made of the one that was measured.

`interpolate` takes seconds and bytes to be linear in the size of a micro-batch: a part
that does not depend on it, and a part for each example:

    cost(size) = cost(small) + (cost(large) - cost(small)) * fraction
    fraction   = (size - small) / (large - small)

Of several sizes, *small* and *large* are the two around the new one; beyond the ends
they are the last two. There the line may fall below what no device can do, or even
below 0, where it is steeper than it should be or measured with noise:

    cost(size) >= cost(small) * size / small    for a size below all that were profiled
    cost(size) >= cost(large)                   for a size above them

`scale_residuals` knows that a stage stores less than its layers by themselves: the
output of one layer is the input of the next one, and is stored once, or not at all if
it follows by cheap operations from what is stored before it. One cut is lowered, and
for each of its stages and each remat mode

    ratio = bytes that the stage stores / sum of the bytes that its layers store alone

scales the residuals of its layers, in the profiles of all sizes of micro-batches.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from .._partition._remat_mode import MIN_CUT
from ..schedules import gpipe
from ._layer_partition import partition
from ._layer_profile import LayerProfile
from ._mode_names import stores_only_inputs
from ._planned_model import PlannedModel
from ._profile_record import Profile, SkipProfile, costs_of_stages
from ._request import Request
from ._space import Choice


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


def scale_residuals(
    profiles: Mapping[int, Profile],
    model: PlannedModel,
    request: Request,
    num_stages: int,
) -> dict[int, Profile]:
    """Profiles whose layers store about as much as they do in stages.

    The ratios are those of one cut and one number of micro-batches, taken to be the
    same for all.

    Args:
      profiles: number of micro-batches -> profile of layers by themselves.
      model: the model that has these layers.
      request: the request for the number of micro-batches that is looked at.
      num_stages: the number of stages of the cut, which is an even one.
    """
    profile = profiles[request.num_microbatches]
    balance = partition(profile, min(num_stages, len(profile.layers)))
    choice = Choice(
        balance=tuple(balance),
        remat=(MIN_CUT.name,) * len(balance),
        schedule=gpipe(len(balance), request.num_microbatches),
    )
    plan = model.describe_step(request, choice)

    # for each layer: remat mode -> the ratio of its stage
    ratios: list[dict[str, float]] = []
    for stage, size in zip(plan.stages, balance, strict=True):
        begin = len(ratios)
        end = begin + size
        stage_ratios = {}
        for mode, stored_bytes in stage.residuals.items():
            if stores_only_inputs(mode):
                continue  # the inputs of a stage are no sum over layers
            residuals = costs_of_stages(profile).residual_bytes.get(mode)
            if residuals is not None and residuals[begin, end]:
                stage_ratios[mode] = stored_bytes / residuals[begin, end]
        ratios += [stage_ratios] * size

    scaled_profiles = {}
    for num_microbatches, layer_profile in profiles.items():
        pairs = zip(layer_profile.layers, ratios, strict=True)
        layers = tuple(_scale_layer(layer, ratio) for layer, ratio in pairs)
        scaled_profiles[num_microbatches] = dataclasses.replace(
            layer_profile, layers=layers
        )
    return scaled_profiles


def _scale_layer(layer: LayerProfile, ratios: Mapping[str, float]) -> LayerProfile:
    """A layer whose residuals under each mode are scaled."""
    residual_bytes = {
        mode: int(num_bytes * ratios.get(mode, 1.0))
        for mode, num_bytes in layer.residual_bytes.items()
    }
    return dataclasses.replace(layer, residual_bytes=residual_bytes)
