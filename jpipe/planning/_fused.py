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
    if num_stages >= len(profile.layers):
        return dict(profiles)
    balance = partition(profile, num_stages)
    stages = list(itertools.pairwise([0, *itertools.accumulate(balance)]))
    adjusted = dataclasses.replace(request, num_microbatches=number)
    # By mode, for each layer: what its stage stores, and its layers by themselves. What
    # "full" stores, the input of a stage, is no sum.
    shares: dict[str, list[tuple[int, int]]] = {}
    for mode in dict.fromkeys(mode for mode in remats if mode != "full"):
        pairs = zip(stages, adjusted.residual_bytes(balance, mode), strict=True)
        shares[mode] = [
            (stored, int(profile.kept_of[mode][stage]))
            for stage, stored in pairs
            for _ in range(*stage)
        ]
    return {number: _shared(own, shares) for number, own in profiles.items()}


def _shared(
    profile: Profile, shares: Mapping[str, Sequence[tuple[int, int]]]
) -> Profile:
    """A profile whose layers store a share of what they store by themselves."""

    def stored(at: int, layer: LayerProfile) -> dict[str, int]:
        parts = {mode: own[at] for mode, own in shares.items()}
        return dict(layer.kept_bytes) | {
            mode: layer.kept_bytes[mode] * part // whole if whole else 0
            for mode, (part, whole) in parts.items()
        }

    return dataclasses.replace(
        profile,
        layers=tuple(
            dataclasses.replace(layer, kept_bytes=stored(at, layer))
            for at, layer in enumerate(profile.layers)
        ),
    )
