"""The problem that a plan solves: the choices, and the costs of a model under each.

shapes     how micro-batches may be split, which says the sizes of shards   (`_space`)
trace      the model on the smallest; a profile must be of this model
profile    seconds and bytes of two sizes, if none was given              (`_profile`)
scale      to a step that ran, to each size of a shard, to what stages store
                                                                  (`_scaled_profiles`)
"""

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import optax

from .._layers._adapter import is_model, is_module
from .._layers._layer_group import check_balance
from .._train._optimizer import opt_state_bytes
from ..schedules import Costs
from ._layer_profile import LinkOptions, MeasuredLink
from ._mode_names import sort_modes
from ._plan_record import Plan
from ._planned_model import PlannedModel
from ._profile import profile_sizes
from ._profile_record import Profile
from ._ran_steps import RanStep, check_same_layers, find_layer_factors, scale_layers
from ._request import Request
from ._scaled_profiles import interpolate, scale_residuals
from ._space import Hardware, PlanChoices, SearchSpace, mesh_shapes
from ._traced_layers import TracedLayers, check_fingerprint, fingerprint

_LOSS_FUNCTION = (
    "is this a loss function, (params, *args) -> loss? A plan is one of layers or a "
    "model: plan the model that it calls, plan = jpipe.plan(model, x, tx, "
    "loss_fn=..., targets=...), and build it with jpipe.value_and_grad(fun, plan=plan)"
)


@dataclass(frozen=True)
class PlanProblem:
    """The choices that a plan has, and all that lowers one of them.

    Attributes:
      space: the choices.
      request: the mini-batch and the loss.
      model: the model.
      profile: its costs, without the optimizer's state.
    """

    space: SearchSpace
    request: Request
    model: PlannedModel
    profile: Profile


def pose_plan_problem(
    layers: Any,
    request: Request,
    tx: optax.GradientTransformation,
    *,
    profile: Profile | None,
    hardware: Hardware,
    link_options: LinkOptions,
    choices: PlanChoices,
    ran: Plan | None = None,
    ran_costs: Costs | None = None,
    measured_link: MeasuredLink | None = None,
) -> PlanProblem:
    """Profiles a model, unless a profile is given, and poses the problem of its plan.

    Args:
      layers: as for `plan`.
      request: the mini-batch and the loss; the request of a profile.
      tx: as for `plan`.
      profile: as for `plan`.
      hardware: the devices, without their link.
      link_options: the options of `plan` on transfers.
      choices: the choices that the user leaves.
      ran: the plan of a step that ran, whose stages took the times that its layers
        should have; ``None``: none did.
      ran_costs: the measured costs of that step.
      measured_link: the link that was measured, if the profile has none.
    """
    with explain_loss_functions(layers):
        num_examples = request.batch().sizes[0]
    fixed_size = None
    if profile is not None and profile.larger is None:
        fixed_size = profile.microbatch_size
    shapes = mesh_shapes(
        choices.data,
        choices.num_microbatches,
        num_devices=hardware.num_devices,
        num_examples=num_examples,
        shard_size=fixed_size,
    )
    shard_counts = sorted({shape.num_microbatch_shards for shape in shapes})

    model = PlannedModel(layers)
    finest = dataclasses.replace(request, num_microbatches=shard_counts[-1])
    traced_request = finest
    if profile is not None:
        traced_request = request.resized(profile.microbatch_size)
    with explain_loss_functions(layers):
        traced = model.traced(traced_request)
    if profile is not None:
        check_fingerprint(profile, fingerprint(traced, train=True))
    balance = None
    if choices.balance is not None:
        balance = check_balance(choices.balance, len(traced.names))
    optimizer_bytes = _optimizer_bytes(tx, traced)

    if profile is None:
        requests = [
            dataclasses.replace(request, num_microbatches=count)
            for count in _profiled_counts(shard_counts)
        ]
        profile = profile_sizes(model, traced, requests)
    if ran is not None and ran_costs is not None:
        check_same_layers(ran, traced.names)
        ran_size = -(-num_examples // (ran.schedule.num_microbatches * ran.data))
        step = RanStep.from_costs(ran, ran_costs)
        factors = find_layer_factors(interpolate(profile, ran_size), [step])
        profile = scale_layers(profile, factors)

    measured_link = profile.link or measured_link
    link = link_options.choose_link(
        profile.origin,
        measured=measured_link if hardware.num_devices > 1 else None,
    )
    hardware = dataclasses.replace(hardware, link=link)

    profiles = {
        count: interpolate(profile, -(-num_examples // count)) for count in shard_counts
    }
    if hardware.memory_limit is not None:
        profiles = scale_residuals(profiles, model, finest, hardware.num_devices)
    space = SearchSpace(
        profiles={
            count: _with_state(shard_profile, optimizer_bytes)
            for count, shard_profile in profiles.items()
        },
        optimizer_bytes=optimizer_bytes,
        hardware=hardware,
        mesh_shapes=shapes,
        choices=dataclasses.replace(
            choices, remat_modes=sort_modes(choices.remat_modes), balance=balance
        ),
    )
    return PlanProblem(space, request, model, profile)


@contextlib.contextmanager
def explain_loss_functions(layers: Any) -> Iterator[None]:
    """Adds to an error what to type for a loss function, if this may be one."""
    try:
        yield
    except (TypeError, ValueError) as error:
        if is_model(layers) and not is_module(layers):
            error.add_note(_LOSS_FUNCTION)
        raise


def _profiled_counts(shard_counts: Sequence[int]) -> set[int]:
    """The most shards, and the fewest: their sizes are measured.

    A whole mini-batch at once may be more than a device holds.

    Args:
      shard_counts: the numbers of shards of all micro-batches, in order.
    """
    split_counts = (count for count in shard_counts[:-1] if count > 1)
    return {next(split_counts, shard_counts[0]), shard_counts[-1]}


def _optimizer_bytes(
    tx: optax.GradientTransformation, traced: TracedLayers
) -> list[int]:
    """The bytes of the optimizer's state of each layer."""
    indices, tree = jax.tree.flatten(traced.params)
    owner_stages = traced.specialization.layout.owner_stages
    return opt_state_bytes(
        tx,
        tree.unflatten(traced.specs(indices)),
        trained=[traced.stages.trained[index] for index in indices],
        layers=[owner_stages[index] for index in indices],
        count=len(traced.names),
    )


def _with_state(profile: Profile, optimizer_bytes: Sequence[int]) -> Profile:
    """A profile whose layers have the optimizer's state as a part of their state."""
    layers = []
    for layer, num_bytes in zip(profile.layers, optimizer_bytes, strict=True):
        state_bytes = layer.state_bytes + num_bytes
        layers.append(dataclasses.replace(layer, state_bytes=state_bytes))
    return dataclasses.replace(profile, layers=tuple(layers))
