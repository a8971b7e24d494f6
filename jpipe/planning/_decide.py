"""`jpipe.plan`: how to cut a model, on which mesh, under which schedule, and why."""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import optax

from .._instructions._progress import Progress
from .._instructions._transfer import Device
from .._layers._layer_group import check_balance
from .._placed._mesh_context import outside_of_meshes
from .._train._optimizer import opt_state_bytes
from .._train._transformation import check_optimizer
from ..schedules import BY_NAME, ScheduleBuilder
from ..schedules._catalogue import find_catalogue_key
from ..schedules._choose import format_argument
from ..schedules._formats import format_bytes, format_seconds
from ._estimate import Rates
from ._fingerprint import estimated, fingerprint
from ._fused import fused_residuals
from ._interpolate import interpolated
from ._layer_profile import MODES, count_faults, unknown_mode
from ._link import link
from ._mesh_shapes import shapes
from ._plan import Plan
from ._plan_search import REMATS
from ._profile import Profile, speed_faults
from ._profiler import answer
from ._reasons import chosen
from ._request import Request
from ._space import Hardware, SearchSpace
from ._subject import PlannedModel
from ._traced import TracedLayer
from ._verify import choose

PyTree = Any
_TRAINING = tuple(name for name in BY_NAME if name != "forward_only")
# What `jpipe.profile` takes besides the layers and a sample.
_OPTIONS = {field.name for field in dataclasses.fields(Request)} - {
    *("sample", "num_microbatches"),
}
_NO_LOSS = (
    "loss: none was given (loss=, targets=): what it computes and keeps, such as "
    "log-probabilities, is not counted"
)


@outside_of_meshes
def plan(
    layers: Any,
    sample: PyTree,
    tx: optax.GradientTransformation,
    *,
    num_devices: int | None = None,
    memory_limit: int | None = None,
    bandwidth: float | None = None,
    latency: float | None = None,
    num_microbatches: int | Sequence[int] | None = None,
    data: int | Sequence[int] | None = None,
    schedules: str | ScheduleBuilder | Sequence[str | ScheduleBuilder] | None = None,
    remat: str | Sequence[str] = REMATS,
    balance: Sequence[int] | None = None,
    profile: Profile | None = None,
    **options: Any,
) -> Plan:
    """Decides how to run a model: which mesh, cut, micro-batches and schedule.

    Layers are profiled, each by itself. Then every schedule of the catalogue is tried
    on paper, on up to so many devices, with the cut that suits it; stages of devices
    that need more than they have keep less; the best get a schedule made to measure.
    The fastest that fits is the plan.

    A stage may have several devices, all stages as many, on which the examples of each
    micro-batch are spread: the axis ``"data"`` of a mesh. Each of them has all of the
    stage's parameters, gradients and optimizer state, and the residuals of its own
    examples; they add up their gradients once in a step, in a ring. M micro-batches on
    D devices give the numbers of M * D micro-batches on one.

    Each action takes the ``action_seconds`` of the profile and what it computes, and
    one thread has all programs and transfers of a step run, one after another: tiny
    layers are not spread over many devices.

    The path of each part of the optimizer's state decides what it belongs to, as in a
    train step. What belongs to no parameter, such as counters, is counted with the
    first layer; what tied layers share, with the first of them. What `tx.update` needs
    while it runs is not counted.

    Args:
      layers: as `jpipe.pipeline` takes them; one model is cut where few bytes cross.
      sample: an input of a mini-batch, or its `jax.ShapeDtypeStruct` leaves.
      tx: the optax optimizer, whose state takes memory.
      num_devices: how many devices there are; default: as many as `jax.devices`.
      memory_limit: bytes of each; ``None``: as many as it takes.
      bandwidth: bytes per second between two devices; default: as measured between
        two of them, where layers are measured and there are two; else transfers take
        no time but ``latency``.
      latency: seconds that a transfer takes whatever its size; default: measured
        likewise, else 0.
      num_microbatches: how many, or a choice; default: one, two, four and eight times
        the number of stages that all devices make, as far as there are examples, and
        one. Layers are profiled for the smallest part of a mini-batch that a device
        would compute at once, and the largest below all of it; times and bytes are
        taken to grow evenly with its size.
      data: on how many devices each stage spreads the examples of a micro-batch, or a
        choice; default: any number that divides ``num_devices`` and the examples.
      schedules: one of the catalogue, or several to choose from, by names or builders;
        default: the catalogue and what is made to measure.
      remat: a mode, or several that stages may have.
      balance: a cut, if it is known already: what would it take? Of one model it counts
        the pieces that its profile lists.
      profile: of ``layers`` on one micro-batch of ``sample``, in place of measuring.
      **options: for `jpipe.profile`, such as ``loss`` and ``targets``, or
        ``measure=False``.

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
      >>> made = jpipe.plan(
      ...     layers, jnp.ones((32, 64)), optax.sgd(0.1), num_devices=2, measure=False
      ... )
      >>> sum(made.balance), jpipe.Plan.from_json(made.to_json()) == made
      (5, True)
    """
    check_optimizer(tx)
    if profile is not None:
        options = {**_as_made(profile), **options}
    if unknown := sorted(options.keys() - _OPTIONS):
        raise TypeError(f"plan takes no {', '.join(unknown)}; see help(jpipe.plan)")
    count = len(jax.devices()) if num_devices is None else num_devices
    numbers = None if num_microbatches is None else _listed(num_microbatches)
    spread = None if data is None else _listed(data)
    builders = _listed(_TRAINING if schedules is None else schedules)
    names = tuple(find_catalogue_key(schedule) or schedule for schedule in builders)
    modes = _listed(remat)
    counts = [("num_devices", count), *(("data", own) for own in spread or ())]
    counts += [("num_microbatches", own) for own in numbers or ()]
    if memory_limit is not None:
        counts.append(("memory_limit", memory_limit))
    faults = [*_faults(counts, names, modes), *speed_faults(bandwidth, latency or 0.0)]
    if faults:
        raise ValueError(f"plan: {'; '.join(faults)}")
    hardware = Hardware(count, memory_limit, bandwidth, latency or 0.0)
    request, subject = Request(sample, **options), PlannedModel(layers)
    examples = request.batch().sizes[0]
    known = profile.microbatch_size if profile else None
    choice = shapes(spread, numbers, count, examples, known)
    parts = sorted({shape.parts for shape in choice})
    finest = dataclasses.replace(request, num_microbatches=parts[-1])
    # All that a terminal shows meanwhile counts from here.
    with Progress("plans made"):
        model, required = subject.traced(finest), None
        if balance is not None:
            required = check_balance(balance, len(model.names))
        optimizer = _optimizer_bytes(tx, model)
        if profile is None:
            profiles = _profiles(subject, model, finest, parts)
        else:
            profile.check(fingerprint(model, finest.train, finest.where))
            profiles = {parts[0]: profile}
        if memory_limit is not None:
            profiles = fused_residuals(profiles, subject, finest, count)
        space = SearchSpace(
            {number: _with_state(own, optimizer) for number, own in profiles.items()},
            optimizer,
            hardware if profile else _linked(hardware, latency, finest.where),
            names,
            tuple(sorted(set(modes), key=MODES.index, reverse=True)),
            fits_schedules=schedules is None,
            balance=required,
            shapes=choice,
        )
        candidates = choose(space, request, subject)
    if not candidates:
        raise ValueError(
            f"plan: schedules={list(names)} have no order for {space.num_layers} "
            f"layers on {count} devices in "
            f"{sorted({shape.microbatches for shape in choice})} micro-batches"
        )
    return chosen(candidates, space, () if request.loss else (_NO_LOSS,))


def _as_made(profile: Any) -> dict[str, Any]:
    """The options by which a profile was made, as it stores them.

    Raises:
      TypeError: if it is no profile.
    """
    if not isinstance(profile, Profile):
        raise TypeError(
            f"profile={profile!r} is a {type(profile).__name__}; needs what "
            f"jpipe.profile returned, or jpipe.Profile.from_json(text)"
        )
    if (rates := estimated(profile.fingerprint)) is None:
        return {}
    return {"measure": False, **rates}


def _profiles(
    subject: PlannedModel, model: TracedLayer, finest: Request, numbers: Sequence[int]
) -> Mapping[int, Profile]:
    """By the number of parts: of the most, of the fewest, and in between."""
    # A whole mini-batch at once may be more than a device holds.
    few = next((number for number in numbers[:-1] if number > 1), numbers[0])
    small = large = answer(model, finest)
    if few != finest.num_microbatches:
        coarse = dataclasses.replace(finest, num_microbatches=few)
        large = answer(subject.traced(coarse), coarse)
    examples = sum(finest.batch().sizes)
    return {
        number: interpolated(small, large, -(-examples // number)) for number in numbers
    }


def _linked(
    hardware: Hardware, latency: float | None, where: Device | Rates
) -> Hardware:
    """With what transfers take, where it is not given and can be measured."""
    if isinstance(where, Rates) or hardware.num_devices == 1:
        return hardware
    others = [d for d in jax.local_devices(backend=where.platform) if d != where]
    if not others or not (hardware.bandwidth is None or latency is None):
        return hardware
    found = link(where, others[0])
    latency = found.latency if latency is None else latency
    bandwidth = hardware.bandwidth or found.bandwidth
    return dataclasses.replace(
        hardware,
        latency=latency,
        bandwidth=bandwidth,
        measured=f"{format_seconds(latency)} for each and "
        f"{format_bytes(int(bandwidth))} per second, "
        f"where not given as measured from {where} to {others[0]}",
    )


def _optimizer_bytes(tx: optax.GradientTransformation, model: TracedLayer) -> list[int]:
    """The optimizer's state of each layer."""
    numbers, tree = jax.tree.flatten(model.params)
    trained = [model.stages.trained[i] for i in numbers]
    owners = [model.divided.layout.owner_stages[i] for i in numbers]
    params = tree.unflatten(model.specs(numbers))
    return opt_state_bytes(tx, params, trained, owners, len(model.names))


def _with_state(profile: Profile, optimizer_bytes: Sequence[int]) -> Profile:
    """The optimizer's state as a part of that of the layers."""
    pairs = zip(profile.layers, optimizer_bytes, strict=True)
    layers = (
        dataclasses.replace(layer, state_bytes=layer.state_bytes + more)
        for layer, more in pairs
    )
    return dataclasses.replace(profile, layers=tuple(layers))


def _listed(given: Any) -> tuple[Any, ...]:
    """One name or several, as several."""
    several = isinstance(given, Iterable) and not isinstance(given, str)
    return tuple(given) if several else (given,)


def _faults(
    counts: Iterable[tuple[str, Any]], names: Sequence[Any], remat: Sequence[Any]
) -> Iterator[str]:
    """Which numbers are none, and which schedules and remat modes there are not."""
    for name, number in counts:
        yield from count_faults(name, number)
    for what, choices in (("schedules", names), ("remat", remat)):
        if not choices:
            yield f"{what}={choices!r}: name one or more, or leave it out"
    for name in names:
        if find_catalogue_key(name) not in _TRAINING:
            listed = ", ".join(map(repr, _TRAINING))
            yield f"schedules: {format_argument(name)} is unknown: choose from {listed}"
    yield from (unknown_mode(mode) for mode in remat if mode not in MODES)
