"""The ways to run a model in two stages: plans, and what a plan has to beat.

A process of one core measures the layers once, plans without a limit of bytes and with
two, and writes all ways to a file. Every rival has two remat modes, as a user would try
the second where the first does not fit:

    equal         halves of the list of layers, 1F1B
    torchgpipe    the most even sums of seconds, GPipe and 1F1B
    named         schedules of the catalogue at their cuts of `jpipe.partition`

A named schedule is cut for each limit. Of those with as many stages on a rank, and with
backwards whole or in halves, only the ones with the shortest predicted steps are run.
"""

import argparse
import dataclasses
import json
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import jpipe
from jpipe.planning._interpolate import interpolate
from jpipe.schedules import BY_NAME

from ..peers.measure import pin
from .models import MODELS

PyTree = Any
RANKS = 2
REMATS = ("min_cut", "full")
MICROBATCHES = 8  # of the rivals; plans choose their own number
# Shares of the bytes that the fullest device holds under the plan without a limit.
LIMITS = (0.7, 0.5)
# The named schedules of a family that are run, without a limit and under one.
FREE_NAMED = 2
LIMITED_NAMED = 1
EQUAL = "equal"
GPIPE_CUT = "torchgpipe"
TORCHGPIPE = "torchgpipe 1F1B"
NAMED = "named"
RIVALS = (EQUAL, GPIPE_CUT, TORCHGPIPE, NAMED)


class Link(NamedTuple):
    """How arrays pass between the processes.

    Attributes:
      latency: seconds that any transfer takes.
      bandwidth: bytes per second.
    """

    latency: float
    bandwidth: float


@dataclass
class Way:
    """One way to run a model.

    Attributes:
      balance: the number of layers of each stage.
      remat: the remat mode of each stage.
      schedule: the schedule, as `jpipe.schedules.Schedule.to_json` writes it.
      seconds: of a step, predicted.
      rivals: the groups of rivals among which it is; none of a plan that no rival
        equals.
      plan: as `jpipe.Plan.to_json` writes it, where it is one.
    """

    balance: list[int]
    remat: list[str]
    schedule: str
    seconds: float
    rivals: list[str] = dataclasses.field(default_factory=list)
    plan: str | None = None

    @property
    def work(self) -> tuple[Any, ...]:
        """What it does, whatever the name of its schedule."""
        fields = json.loads(self.schedule)
        rows = json.dumps([fields["placement"], fields["rows"]])
        return tuple(self.balance), tuple(self.remat), rows

    def build(self, layers: Sequence[Any]) -> jpipe.Pipeline:
        """The pipeline of these layers."""
        if self.plan is not None:
            return jpipe.pipeline(layers, plan=jpipe.Plan.from_json(self.plan))
        return jpipe.pipeline(
            layers,
            MICROBATCHES,
            balance=self.balance,
            schedule=jpipe.schedules.Schedule.from_json(self.schedule),
            remat=self.remat,
        )

    @property
    def num_microbatches(self) -> int:
        """The number of micro-batches."""
        return jpipe.schedules.Schedule.from_json(self.schedule).num_microbatches

    def __str__(self) -> str:
        """Its balance, schedule, number of micro-batches and remat modes."""
        name = json.loads(self.schedule)["name"]
        words = [f"{self.balance}", f"{name}, {self.num_microbatches}"]
        modes = [self.remat[0]] if len(set(self.remat)) == 1 else self.remat
        if modes != ["min_cut"]:
            words += modes
        return " ".join(words)


@dataclass
class Planned:
    """What the planner said under a limit.

    Attributes:
      limit: the bytes of a device; ``None`` without a limit.
      plan_seconds: that planning took.
      way: the index of the plan among the ways; ``None`` if nothing fits.
      predicted: the predicted seconds of a step of the plan.
      refusal: the sentence of the planner, if nothing fits.
    """

    limit: int | None
    plan_seconds: float
    way: int | None = None
    predicted: float | None = None
    refusal: str = ""


@dataclass
class Tuned:
    """What `jpipe.tune` returned under a limit.

    Attributes:
      limit: the bytes of a device; ``None`` without a limit.
      seconds: that tuning took; ``None`` where it was not tried.
      way: the index of the plan among the ways; ``None`` if nothing fits.
      predicted: the predicted seconds of a step of the plan.
      trials: the predicted seconds of a step, and those that `tune` measured, of each
        plan that it ran.
      refusal: the sentence of the error, if nothing fits.
    """

    limit: int | None
    seconds: float | None
    way: int | None = None
    predicted: float | None = None
    trials: Sequence[tuple[float, float]] = ()
    refusal: str = ""


def square(y: jax.Array, _: PyTree) -> jax.Array:
    """A loss of any output."""
    return jnp.mean(jnp.square(y))


def add_way(ways: list[Way], way: Way) -> int:
    """The index of a way in a list; of one that does the same, if there is one."""
    for index, present in enumerate(ways):
        if present.work == way.work:
            present.rivals = sorted({*present.rivals, *way.rivals})
            return index
    ways.append(way)
    return len(ways) - 1


class Rivals:
    """All that the plans are compared with.

    Args:
      profile: of the layers, in micro-batches of the rivals' size.
      link: between the processes.
    """

    def __init__(self, profile: jpipe.Profile, link: Link) -> None:
        self._profile = profile
        self._link = link

    def list_fixed(self) -> Iterator[Way]:
        """The even split and torchgpipe's cut."""
        layers = self._profile.layers
        even = jpipe.partition([x.forward + x.backward for x in layers], RANKS)
        half = len(layers) // 2
        for remat in REMATS:
            yield self._rival(EQUAL, [len(layers) - half, half], "1f1b", remat)
            yield self._rival(GPIPE_CUT, even, "gpipe", remat)
            yield self._rival(TORCHGPIPE, even, "1f1b", remat)

    def list_named(self, limit: int | None) -> Iterator[Way]:
        """The named schedules of each family that should be the fastest, as cut."""
        num_ways = FREE_NAMED if limit is None else LIMITED_NAMED
        counts = Counter[Any]()
        ways = sorted(self._cut_named(limit), key=lambda way: way.seconds)
        for way in ways:
            rows = jpipe.schedules.Schedule.from_json(way.schedule).rows
            has_halves = any(action.op == "W" for row in rows for action in row)
            family = len(way.balance), has_halves
            if counts[family] < num_ways:
                counts[family] += 1
                yield way

    def _cut_named(self, limit: int | None) -> Iterator[Way]:
        """Each schedule of the catalogue that two ranks can run, cut for a limit.

        Less is stored only where more does not fit.
        """
        for name, build in BY_NAME.items():
            num_stages = build(RANKS, MICROBATCHES).num_stages
            if name == "forward_only" or num_stages > len(self._profile.layers):
                continue
            for remat in REMATS:
                try:
                    balance = jpipe.partition(
                        self._profile,
                        num_stages,
                        objective="step",
                        num_microbatches=MICROBATCHES,
                        max_bytes=limit,
                        schedule=name,
                        remat=remat,
                        bandwidth=self._link.bandwidth,
                        latency=self._link.latency,
                    )
                except ValueError:  # needs more bytes
                    continue
                yield self._rival(NAMED, balance, name, remat)
                if limit is None:
                    break

    def _rival(self, rival: str, balance: list[int], name: str, remat: str) -> Way:
        schedule = BY_NAME[name](RANKS, MICROBATCHES)
        costs = self._profile.costs(
            balance,
            remat=remat,
            bandwidth=self._link.bandwidth,
            latency=self._link.latency,
        )
        return Way(
            balance=balance,
            remat=[remat] * len(balance),
            schedule=schedule.to_json(),
            seconds=schedule.simulate(costs).makespan,
            rivals=[rival],
        )


def plan_way(plan: jpipe.Plan) -> Way:
    """A plan as a way."""
    assert plan.forecast is not None
    return Way(
        balance=plan.balance,
        remat=plan.remat,
        schedule=plan.schedule.to_json(),
        seconds=plan.forecast.seconds,
        plan=plan.to_json(),
    )


def _most_bytes(plan: jpipe.Plan) -> int:
    """The bytes of the fullest device, as the planner counts them."""
    assert plan.forecast is not None
    return max(memory.total for memory in plan.forecast.memory)


def find_ways(name: str, link: Link) -> dict[str, Any]:
    """The ways to run a model, and what the planner said.

    Args:
      name: of the model.
      link: between the processes.

    Returns:
      ``"profile_seconds"``, ``"planned"``: the fields of each `Planned`, and
      ``"ways"``: those of each `Way`.
    """
    layers, x = MODELS[name]()
    tx = optax.sgd(1e-3)
    start = time.perf_counter()
    profile = jpipe.profile(layers, x, loss_fn=square)
    profile_seconds = time.perf_counter() - start
    print(f"{name}: layers measured, {profile_seconds:.0f} s", flush=True)
    ways: list[Way] = []
    planned: list[Planned] = []

    def plan(limit: int | None) -> jpipe.Plan | None:
        """The plan under a limit, which is added to the ways."""
        start = time.perf_counter()
        try:
            plan = jpipe.plan(
                layers,
                x,
                tx,
                loss_fn=square,
                profile=profile,
                num_devices=RANKS,
                data=1,  # a stage is in one process
                memory_limit=limit,
                bandwidth=link.bandwidth,
                latency=link.latency,
            )
        except ValueError as error:
            seconds = time.perf_counter() - start
            planned.append(Planned(limit, seconds, refusal=str(error)))
            return None
        seconds = time.perf_counter() - start
        if limit is not None and _most_bytes(plan) > limit:
            raise AssertionError(f"{name}: a plan for {limit} bytes:\n{plan}")
        way = plan_way(plan)
        index = add_way(ways, way)
        planned.append(Planned(limit, seconds, index, predicted=way.seconds))
        return plan

    free = plan(None)
    assert free is not None
    most = _most_bytes(free)
    for share in LIMITS:
        plan(int(share * most))

    microbatch_size = -(-len(x) // MICROBATCHES)
    rivals = Rivals(interpolate(profile, microbatch_size), link)
    for way in rivals.list_fixed():
        add_way(ways, way)
    for entry in planned:
        for way in rivals.list_named(entry.limit):
            add_way(ways, way)
    seconds = time.perf_counter() - start
    print(f"{name}: {len(ways)} ways, {seconds:.0f} s", flush=True)
    return {
        "profile_seconds": profile_seconds,
        "planned": list(map(dataclasses.asdict, planned)),
        "ways": list(map(dataclasses.asdict, ways)),
    }


def main() -> None:
    """Finds the ways of one model on one core, and writes them to a file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--latency", type=float, required=True)
    parser.add_argument("--bandwidth", type=float, required=True)
    parser.add_argument("--core", type=int)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    pin([] if options.core is None else [options.core])
    link = Link(options.latency, options.bandwidth)
    options.out.write_text(json.dumps(find_ways(options.model, link)))


if __name__ == "__main__":
    main()
