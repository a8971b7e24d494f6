"""What stages store, by their layers together: less than each of them by itself.

What one layer gives to the next is stored once, or not at all where it follows by cheap
operations from what is stored before it.
"""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence

from ._layer import LayerProfile
from ._partition import partition
from ._profile import Profile
from ._request import Request


def fused_residuals(
    profiles: Mapping[int, Profile],
    request: Request,
    num_stages: int,
    remats: Sequence[str],
) -> dict[int, Profile]:
    """Profiles whose layers store about what they do in stages.

    How much less that is than what they store by themselves is traced for one number of
    micro-batches, and taken to be the same for all.

    Args:
      profiles: of layers by themselves, by the number of micro-batches.
      request: what they answer.
      num_stages: of the cut, an even one, that is traced.
      remats: the modes that stages may have.

    Returns:
      The profiles.
    """
    number = max(profiles)
    profile = profiles[number]
    count = len(profile.layers)
    balance = partition(profile, min(num_stages, count))
    stages = list(itertools.pairwise([0, *itertools.accumulate(balance)]))
    adjusted = dataclasses.replace(request, num_microbatches=number)
    # What "full" stores, the input of a stage, is no sum.
    shares = {mode: [1.0] * count for mode in remats if mode != "full"}
    for mode, share in shares.items():
        stored = adjusted.residual_bytes(balance, mode)
        for (first, stop), size in zip(stages, stored, strict=True):
            alone = profile.kept_of[mode][first, stop]
            share[first:stop] = [size / alone if alone else 1.0] * (stop - first)

    def fused(at: int, layer: LayerProfile) -> LayerProfile:
        less = {m: int(layer.kept_bytes[m] * share[at]) for m, share in shares.items()}
        return dataclasses.replace(layer, kept_bytes={**layer.kept_bytes, **less})

    return {
        number: dataclasses.replace(
            own, layers=tuple(fused(*each) for each in enumerate(own.layers))
        )
        for number, own in profiles.items()
    }
