"""Scales the residuals of layers to what stages store: less than layers by themselves.

The output of one layer is the input of the next one: a stage stores it once, or not at
all if it follows by cheap operations from what is stored before it. So the bytes of a
stage are not the sum over its layers. One cut is lowered, and for each of its stages
and each remat mode

    ratio = bytes that the stage stores / sum of the bytes that its layers store alone

scales the residuals of its layers, in the profiles of all sizes of micro-batches.
"""

import dataclasses
from collections.abc import Mapping

from .._partition._remat_mode import MIN_CUT
from ..schedules import gpipe
from ._layer_partition import partition
from ._layer_profile import LayerProfile
from ._mode_names import stores_only_inputs
from ._planned_model import PlannedModel
from ._profile_record import Profile, costs_of_stages
from ._request import Request
from ._space import Choice


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
