"""Stages of several devices, simulated with the links between them."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

from ..schedules import Action, Costs, Schedule, Timeline, replicated
from ..schedules._action import BACKWARD, FORWARD
from ..schedules._replicated import with_links
from ..schedules._simulate import exchanges


def simulate(schedule: Schedule, replicas: Sequence[int], costs: Costs) -> Timeline:
    """When everything runs, if a link carries one thing at a time.

    Links are simulated as stages of their own, on as many ranks as the side with fewer
    has. Then they are left out: what is drawn are devices.

    Args:
      schedule: of these replicas, from `replicated`; with ``eager`` if transfers take
        time.
      replicas: the number of ranks of each stage.
      costs: of each stage.
    """
    # What stages keep is not known, so nothing is said of what devices hold.
    if not any(map(costs.transfer, _transfers(schedule))):
        return dataclasses.replace(schedule.simulate(costs), memory=())
    speed = costs.bandwidth
    back = [costs.cotangent(stage, 0) for stage in range(schedule.num_stages)]
    times = Costs(
        forward=_between(costs.forward, [x / speed for x in costs.boundary_bytes]),
        backward=_between(costs.backward, [x / speed for x in back]),
    )
    chain = replicated(with_links(replicas), schedule.num_microbatches)
    whole = chain.simulate(times)

    def of_devices(when: Mapping[Action, float]) -> dict[Action, float]:
        return {
            action._replace(stage=action.stage // 2): time
            for action, time in when.items()
            if action.stage % 2 == 0
        }

    timeline = Timeline(
        schedule.name,
        schedule.placement,
        schedule.rows,
        of_devices(whole.start),
        of_devices(whole.end),
        costs=costs,
        replicas=schedule.replicas,
    )
    return dataclasses.replace(timeline, exchanges=tuple(exchanges(timeline, costs)))


def _transfers(schedule: Schedule) -> Iterator[Action]:
    """The actions of one micro-batch whose results go to other stages."""
    for stage in range(1, schedule.num_stages):
        yield Action(FORWARD, stage - 1, 0)
        yield Action(BACKWARD, stage, 0)


def _between(own: Sequence[float], moved: Sequence[float]) -> list[float]:
    """The times of stages, with those of the transfers to them from the one before."""
    found = [own[0]]
    for seconds, stage in zip(moved[1:], own[1:], strict=True):
        found += [seconds, stage]
    return found
