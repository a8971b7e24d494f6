"""`jpipe.replicate`: a plan of stages with several devices each, which take turns."""

import math
from collections.abc import Iterator

from ..schedules import replicated
from ..schedules._formats import format_bytes, format_count, format_seconds
from ._layer_profile import find_count_faults, find_number_faults
from ._plan import Forecast, Plan, StagePlan
from ._profile import (
    Profile,
    check_profile,
    costs_of_stages,
    find_profile_faults,
    find_speed_faults,
)
from ._replica_problem import ReplicaProblem, SimulatedStages, StageReplicas
from ._replica_search import find_best_stages


def replicate(
    profile: Profile,
    num_devices: int,
    num_microbatches: int,
    *,
    bandwidth: float | None = None,
    latency: float = 0.0,
    max_bytes: float | None = None,
    remat: str = "min_cut",
) -> Plan:
    """Cuts layers into stages and gives each a number of devices.

    A stage that takes three times as long as others gets three devices, which run its
    micro-batches in turns. Gradients are added up once in a step: the first device of a
    stage sends its parameters to the others, and gets their sums of gradients.

    Args:
      profile: a list of layers on one micro-batch; from `jpipe.profile`.
      num_devices: the number of devices, of which some may be left idle.
      num_microbatches: the number of micro-batches of a step.
      bandwidth: bytes per second between two devices; ``None``: transfers take no time
        but ``latency``, and neither does the exchange of gradients. Devices are taken
        to compute while they send and receive.
      latency: seconds that a transfer takes whatever its size.
      max_bytes: the bytes that a device has; ``None``: no limit. The optimizer's state
        is not counted: a profile does not know it.
      remat: the remat mode of all stages.

    Returns:
      The plan: it prints with the reasons, `jpipe.draw.svg` draws it, and
      ``jpipe.pipeline(layers, plan=plan)`` builds it.

    Raises:
      ValueError: with every fault of the arguments; or if nothing fits.
      TypeError: if the profile is none.

    Example:
      >>> from jpipe.planning._profile import LayerProfile
      >>> small = LayerProfile("small", forward=1.0, backward=3.0)
      >>> large = LayerProfile("large", forward=1.0, backward=1.0, param_bytes=2**31)
      >>> profile = Profile((small, large))
      >>> plan = replicate(profile, 3, 8, bandwidth=1e9, remat="full")
      >>> plan.balance, [len(ranks) for ranks in plan.schedule.ranks_of]
      ([1, 1], [2, 1])

    References:
      Narayanan et al., `PipeDream <https://doi.org/10.1145/3341301.3359646>`_ (2019).
    """
    check_profile("replicate", profile)
    faults = [*find_profile_faults(profile), *find_speed_faults(bandwidth, latency)]
    faults += find_count_faults("num_devices", num_devices)
    faults += find_count_faults("num_microbatches", num_microbatches)
    if max_bytes is not None:
        faults += find_number_faults("max_bytes", max_bytes)
    if not faults:
        faults += costs_of_stages(profile).find_remat_faults([remat])
    if faults:
        raise ValueError(f"replicate cannot plan this: {'; '.join(faults)}")
    problem = ReplicaProblem(
        profile=profile,
        num_microbatches=num_microbatches,
        bandwidth=bandwidth,
        latency=latency,
        max_bytes=math.inf if max_bytes is None else max_bytes,
        remat=remat,
    )
    best = find_best_stages(problem, num_devices, max_replicas=num_devices)
    if best.max_bytes > problem.max_bytes:
        raise ValueError(
            f"replicate: max_bytes={max_bytes:,} on {num_devices} devices: nothing was "
            f"found that fits. The nearest has stages of "
            f"{[stage.end - stage.begin for stage in best.stages]} layers on "
            f"{[stage.replicas for stage in best.stages]} devices, and needs "
            f"{best.max_bytes:,} bytes; take more devices, smaller micro-batches or a "
            f"remat mode that stores less"
        )
    return _make_plan(problem, best, num_devices)


def _make_plan(
    problem: ReplicaProblem, best: SimulatedStages, num_devices: int
) -> Plan:
    """The plan of a step, with the reasons."""
    schedule = replicated(
        [stage.replicas for stage in best.stages], problem.num_microbatches
    )
    param_bytes = problem.stage_costs.param_bytes
    stages = []
    for index, (begin, end, _) in enumerate(best.stages):
        layers = problem.profile.layers[begin:end]
        ranks = schedule.ranks_of[index]
        stages.append(
            StagePlan(
                index=index,
                rank=ranks[0],
                device=", ".join(f"rank {rank}" for rank in ranks),
                layers=tuple(layer.name for layer in layers),
                remat=problem.remat,
                num_params=sum(layer.num_params for layer in layers),
                param_bytes=int(param_bytes[begin, end]),
            )
        )
    crossing = sum(problem.crossing_bytes(stage.begin) for stage in best.stages[1:])
    exchanged = sum(
        2 * (stage.replicas - 1) * param_bytes[stage.begin, stage.end]
        for stage in best.stages
    )
    forecast = Forecast(
        seconds=best.seconds,
        memory=best.memory,
        costs=best.costs,
        memory_limit=None if math.isinf(problem.max_bytes) else int(problem.max_bytes),
        sent_bytes=int(crossing * problem.num_microbatches + exchanged),
        reasons=tuple(_reasons(problem, best, num_devices)),
        last_forward=_last_forward(problem, best),
    )
    return Plan(stages=tuple(stages), schedule=schedule, forecast=forecast)


def _last_forward(problem: ReplicaProblem, best: SimulatedStages) -> float:
    """The seconds of a forward of the last stage by itself."""
    begin, end, _ = best.stages[-1]
    layers = problem.profile.layers[begin:end]
    return sum(layer.forward for layer in layers) + problem.profile.action_seconds


def _reasons(
    problem: ReplicaProblem, best: SimulatedStages, num_devices: int
) -> Iterator[str]:
    """Sentences that say what the devices bring."""
    whole = problem.simulate((StageReplicas(0, len(problem.profile.layers), 1),))
    yield (
        f"one device: {format_seconds(whole.seconds)} a step"
        f"{_times_as_long(whole, best)}"
    )
    if max(stage.replicas for stage in best.stages) > 1:
        alone = find_best_stages(problem, num_devices, max_replicas=1)
        if alone.max_bytes <= problem.max_bytes:
            yield (
                f"one device per stage: {format_seconds(alone.seconds)} a step on "
                f"{format_count(len(alone.stages), 'device')}"
                f"{_times_as_long(alone, best)}"
            )
        exchange = max(best.costs.exchange)
        yield (
            f"exchange: the devices of a stage share parameters and gradients once "
            f"in a step, at most {format_seconds(exchange)} of it"
        )
    if problem.bandwidth is None:
        yield (
            "transfers: their bytes were taken to cost no time; bandwidth= says "
            "what they do"
        )
    yield (
        f"memory: {format_bytes(best.max_bytes)} in the device that needs most, "
        f"without the optimizer's state"
    )
    num_idle = num_devices - sum(stage.replicas for stage in best.stages)
    if num_idle:
        yield (
            f"{num_idle} of {num_devices} devices are left idle: no better plan "
            f"that uses them was found"
        )


def _times_as_long(other: SimulatedStages, best: SimulatedStages) -> str:
    """The ratio of another step to the best one, in words."""
    if not best.seconds:
        return ""
    return f", {other.seconds / best.seconds:.2f} times as long"
