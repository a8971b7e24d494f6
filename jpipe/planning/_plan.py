"""`jpipe.plan`: decides the mesh, balance, schedule and remat modes of a pipeline.

profile    seconds and bytes of each layer, for two sizes of micro-batch  (`_profile`)
pose       those for each number of micro-batches, and what may be chosen
                                                                     (`_plan_problem`)
search     choices that are simulated: candidates                     (`_plan_search`)
finalists  the best of them lowered, their bytes counted                (`_finalists`)
reasons    the fastest that fits, as a `Plan`, and why it is              (`_reasons`)

`jpipe.tune` poses the same problem of estimated layers, and runs the finalists.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import optax

from .._arguments._wrong_call import explain_call
from .._instructions._progress import Progress
from .._layers import _rng
from .._placed._mesh_context import outside_of_meshes
from .._train._transformation import check_optimizer
from ..schedules import Costs, Schedule, ScheduleBuilder
from ._finalists import rank_candidates
from ._layer_profile import LinkOptions, find_count_faults
from ._mode_names import TRIED_MODES
from ._plan_problem import explain_loss_functions, pose_plan_problem
from ._plan_record import Plan
from ._profile_record import Profile
from ._reasons import check_fits, describe_profile, make_plan
from ._request import Request
from ._space import Hardware, PlanChoices

PyTree = Any
_ON_PAPER = (
    "on paper: no step was run; jpipe.tune(layers, x, targets, loss_fn, tx) runs the "
    "best plans on the devices that are here"
)
_RAN = (
    "costs: the layers of each stage that ran take the seconds that were measured "
    "(ran=, costs=); their shares of these are those of the profile"
)
_LOSS_OF_BATCH = (
    "loss: it runs once per step, on the outputs of the whole mini-batch, which are "
    "counted; its time and its workspace are not"
)
_NO_LOSS = (
    "loss: none was given (loss_fn=, targets=): what it computes and keeps, such as "
    "log-probabilities, is not counted"
)
# former argument -> what to type
_FORMER_ARGUMENTS = {
    "rounds": "profile=jpipe.profile(layers, x, rounds=...) measures so many times",
    "device": "profile=jpipe.profile(layers, x, device=...) measures on that device",
    "train": "a plan is one of training",
}


@outside_of_meshes
@explain_call("jpipe.plan(layers, x, tx)", _FORMER_ARGUMENTS)
def plan(
    layers: Any,
    x: PyTree,
    tx: optax.GradientTransformation,
    *,
    # the machine
    num_devices: int | None = None,
    memory_limit: int | None = None,
    bandwidth: float | None = None,
    latency: float | None = None,
    overlap: bool | None = None,
    # the model
    loss_fn: Callable[[PyTree, PyTree], Any] | None = None,
    targets: PyTree = (),
    has_aux: bool = False,
    reduction: str = "mean",
    trainable: Any = None,
    in_axes: Any = 0,
    target_axes: Any = 0,
    rngs: _rng.Rngs = None,
    profile: Profile | None = None,
    ran: Plan | None = None,
    costs: Costs | None = None,
    # what may be chosen
    num_microbatches: int | Sequence[int] | None = None,
    data: int | Sequence[int] | None = None,
    schedules: str | Schedule | ScheduleBuilder | Sequence[Any] | None = None,
    remat: str | Sequence[str] = TRIED_MODES,
    balance: Sequence[int] | None = None,
    # estimates
    measure: bool = True,
    peak_flops: float | None = None,
    memory_bandwidth: float | None = None,
    action_seconds: float | None = None,
) -> Plan:
    """Decides how to run a model: its mesh, cut, micro-batches and schedule.

    Layers are profiled, each by itself. Then every schedule of the catalogue is
    simulated, on any number of the devices, with the cut that suits it; stages of
    devices that need more memory than they have keep less; the best get a schedule made
    to measure. The fastest that fits is the plan.

    A stage may have several devices, all stages as many, on which the examples of each
    micro-batch are spread: the axis ``"data"`` of a mesh. Each of them has all of the
    stage's parameters, gradients and optimizer state, and the residuals of its own
    examples; they add up their gradients once in a step, in a ring. The results of M
    micro-batches on D devices equal those of M * D micro-batches on one device.

    Each action takes the time of its computation and the ``action_seconds`` of the
    profile. One host thread dispatches all programs and transfers, one after another,
    so very small layers are not worth several devices.

    The optimizer's state is counted with the parameters that its paths name, as in a
    train step. State of no parameter, such as counters, is counted with the first
    layer; state of parameters that layers share, with the first of these. The memory
    that `tx.update` needs while it runs is not counted.

    The options say what you know of the machine (``num_devices`` to ``overlap``) and of
    the model (``loss_fn`` to ``costs``); what the plan may choose (``num_microbatches``
    to ``balance``); and how times are estimated (``measure`` to ``action_seconds``).

    Args:
      layers: as `jpipe.pipeline` takes them; one model is cut where few bytes cross.
      x: an input of a mini-batch, or its `jax.ShapeDtypeStruct` leaves.
      tx: the optax optimizer, whose state takes memory.
      num_devices: the number of devices; default: that of `jax.devices`.
      memory_limit: the bytes that a device has, for all that is on it at once;
        ``None``: no limit.
      bandwidth: bytes per second between two devices; default: as the profile has it,
        which was measured where there were two; else transfers take no time but
        ``latency``.
      latency: seconds that a transfer takes whatever its size; default: as the profile
        has it, else 0.
      overlap: True if a device computes while it sends and receives, as is taken of
        GPUs; False if a transfer keeps both devices from computing, each for half of
        its time, as it does those of a CPU. Default: False if the profile was measured
        on a CPU, else True, also for an estimate.
      loss_fn: ``(outputs, targets) -> scalar``, a part of the last layer; left out,
        what it takes is not counted.
      targets: the targets of the mini-batch, in arrays or specs.
      has_aux: as for `Pipeline.value_and_grad`.
      reduction: likewise.
      trainable: likewise.
      in_axes: as for `jpipe.pipeline`.
      target_axes: likewise.
      rngs: as for `Pipeline.apply`; left out in training, a key, as in a training step.
      profile: a profile of ``layers``, made anywhere, in place of measuring: no device
        is needed. Of one size of micro-batches it fixes the product of ``data`` and
        ``num_microbatches``; by default it has two.
      ran: the plan of a step that ran, ``step.plan``, with its measured ``costs``: each
        layer takes its share of the time of its stage. Layers are then estimated, if
        there is no ``profile``. Of one model, the plan of which it was built.
      costs: the costs of that step, ``step.profile(state, x, targets).costs``.
      num_microbatches: the number of micro-batches, or several to choose from; default:
        one, two, four and eight times the number of stages that all devices make, as
        far as there are examples, and one. Layers are profiled for the smallest shard
        of a micro-batch that a device would compute, and the largest below the whole
        mini-batch; times and bytes are taken to grow evenly with its size.
      data: the number of devices on which each stage spreads the examples of a
        micro-batch, or several to choose from; default: any number that divides
        ``num_devices`` and the examples. A stage is in one process: with several
        processes type at most the devices of one, which is the default where
        ``num_devices`` is left out.
      schedules: a schedule, or several to choose from: names of the catalogue,
        builders ``(num_ranks, num_microbatches) -> Schedule``, or a `Schedule`, whose
        numbers have to be among those of ``num_microbatches`` and the ranks; default:
        the catalogue and schedules made to measure.
      remat: a mode, or several that stages may have.
      balance: the balance, if it is decided already. Of one model it counts the
        sections that its profile lists.
      measure: True to measure layers, on the first device; else their times are
        estimated.
      peak_flops: operations per second for an estimate; see `jpipe.profile`.
      memory_bandwidth: bytes of memory per second for an estimate; likewise.
      action_seconds: seconds of any action for an estimate; likewise.

    Returns:
      The plan: it prints with the reasons, `jpipe.draw.svg` draws it, and
      ``jpipe.pipeline(layers, plan=plan)`` builds it.

    Raises:
      ValueError: with all faults of the arguments; or if nothing fits the memory: with
        what is short, where and by how much, and what would fit.
      TypeError: if an argument is of a wrong type.

    Example:
      >>> import jax.numpy as jnp, jpipe, optax
      >>> from flax import linen as nn
      >>> layers = [nn.Dense(64), nn.relu, nn.Dense(64), nn.relu, nn.Dense(64)]
      >>> plan = jpipe.plan(
      ...     layers, jnp.ones((32, 64)), optax.sgd(0.1), num_devices=2, measure=False
      ... )
      >>> sum(plan.balance), jpipe.Plan.from_json(plan.to_json()) == plan
      (5, True)
    """
    with explain_loss_functions(layers):
        check_optimizer(tx)
    if not isinstance(profile, Profile | None):
        raise TypeError(
            f"plan needs a jpipe.Profile, such as jpipe.profile(layers, x) returns; "
            f"this is a {type(profile).__name__}"
        )
    _check_ran_step(ran, costs)
    choices = PlanChoices.from_options(
        data=data,
        num_microbatches=num_microbatches,
        schedules=schedules,
        remat=remat,
        balance=balance,
        is_here=num_devices is None,
        needs_forwards_first=reduction == "batch",
    )
    hardware = Hardware(
        num_devices=len(jax.devices()) if num_devices is None else num_devices,
        memory_limit=memory_limit,
    )
    link_options = LinkOptions(bandwidth, latency, overlap)
    faults = [
        *find_count_faults("num_devices", hardware.num_devices),
        *choices.find_faults(memory_limit),
        *link_options.find_faults(),
    ]
    if profile is not None:
        made_by = {
            "peak_flops": peak_flops,
            "memory_bandwidth": memory_bandwidth,
            "action_seconds": action_seconds,
        }
        faults += [
            f"{name}= is for making a profile: leave it out, or leave out profile="
            for name, option in made_by.items()
            if option is not None
        ]
    if faults:
        raise ValueError(f"plan: {'; '.join(faults)}")

    request = Request(
        x,
        loss_fn=loss_fn,
        targets=targets,
        has_aux=has_aux,
        reduction=reduction,
        trainable=trainable,
        in_axes=in_axes,
        target_axes=target_axes,
        rngs=rngs,
        measure=measure and profile is None and ran is None,
        peak_flops=peak_flops,
        memory_bandwidth=memory_bandwidth,
        action_seconds=action_seconds,
    )
    with Progress("plans made"):  # a terminal shows all progress as a part of this
        problem = pose_plan_problem(
            layers,
            request,
            tx,
            profile=profile,
            hardware=hardware,
            link_options=link_options,
            choices=choices,
            ran=ran,
            ran_costs=costs,
        )
        candidates = rank_candidates(problem)

    best = candidates[0]
    check_fits(best, hardware)
    shard = problem.space.profile(best.choice.schedule, best.choice.num_shards)
    is_size_fixed = (
        profile is not None and profile.larger is None and num_microbatches is None
    )
    notes = [
        _ON_PAPER,
        describe_profile(
            problem.profile, shard.microbatch_size, is_size_fixed=is_size_fixed
        ),
    ]
    if ran is not None:
        notes.append(_RAN)
    if loss_fn is None:
        notes.append(_NO_LOSS)
    elif reduction == "batch":
        notes.append(_LOSS_OF_BATCH)
    return make_plan(candidates, problem.space, notes)


def _check_ran_step(plan: Any, costs: Any) -> None:
    """Checks the arguments ``ran`` and ``costs`` of `jpipe.plan`.

    Raises:
      ValueError: if one is missing, or they are of different stages.
      TypeError: if one is nothing such.
    """
    if plan is None and costs is None:
        return
    usage = "type ran=step.plan, costs=step.profile(state, x, targets).costs"
    if plan is None or costs is None:
        raise ValueError(f"plan: ran= and costs= belong together: {usage}")
    if not isinstance(plan, Plan) or not isinstance(costs, Costs):
        raise TypeError(
            f"plan: ran= is a {type(plan).__name__} and costs= a "
            f"{type(costs).__name__}: {usage}"
        )
    if costs.num_stages != len(plan.stages) or not costs.in_seconds:
        raise ValueError(
            f"plan: costs= are of {costs.num_stages} stages, ran= of "
            f"{len(plan.stages)}; they are measured seconds of its stages: {usage}"
        )
