"""What stages store, by their layers together: less than each of them by itself.

What one layer gives to the next is stored once, or not at all where it follows by cheap
operations from what is stored before it.
"""

import dataclasses
from collections.abc import Mapping

from ..schedules import gpipe
from ._layer_partition import partition
from ._layer_profile import LayerProfile
from ._profile import Profile
from ._request import Request
from ._subject import PlannedModel


def fused_residuals(
    profiles: Mapping[int, Profile],
    subject: PlannedModel,
    request: Request,
    num_stages: int,
) -> dict[int, Profile]:
    """Profiles whose layers store about what they do in stages.

    How much less that is than what they store by themselves is known of one cut and one
    number of micro-batches, and taken to be the same for all.

    Args:
      profiles: of layers by themselves, by the number of micro-batches.
      subject: the layers.
      request: has the number of micro-batches that is looked at.
      num_stages: of the cut, an even one.
    """
    number = request.num_microbatches
    alone = profiles[number]
    balance = partition(alone, min(num_stages, len(alone.layers)))
    schedule = gpipe(len(balance), number)
    plan = subject.planned(request, balance, "min_cut", schedule)
    shares: list[dict[str, float]] = []
    for stage, size in zip(plan.stages, balance, strict=True):
        first = len(shares)
        sums = {m: own[first, first + size] for m, own in alone.residuals_of.items()}
        share = {m: n / sums[m] for m, n in stage.residuals.items() if sums.get(m)}
        # What "full" stores, the input of a stage, is no sum.
        shares += [share | {"full": 1.0}] * size

    def fused(at: int, layer: LayerProfile) -> LayerProfile:
        stored = layer.residual_bytes.items()
        less = {mode: int(size * shares[at].get(mode, 1.0)) for mode, size in stored}
        return dataclasses.replace(layer, residual_bytes=less)

    return {
        number: dataclasses.replace(
            own, layers=tuple(fused(*each) for each in enumerate(own.layers))
        )
        for number, own in profiles.items()
    }
