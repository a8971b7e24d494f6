"""The ways to run a model in two stages: plans, and what a plan has to beat.

A process of one core measures the layers once, plans without a limit of bytes and with
two, and writes all ways to a file. Every rival has two remat modes, as a user would try
the second where the first does not fit:

    equal         halves of the list of layers, 1F1B
    torchgpipe    the most even sums of seconds, GPipe and 1F1B
    named         each schedule of the catalogue at its cut of `jpipe.partition`
"""

import argparse
import dataclasses
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import jpipe
from jpipe.schedules import BY_NAME

from ..peers.measure import pin
from .models import MODELS

PyTree = Any
RANKS = 2
MICROBATCHES = 8
# Shares of the bytes that the fullest device holds under the plan without a limit.
LIMITS = (0.7, 0.5)
# The rivals under "full" are slow and many: only as many named ones are run, those that
# are predicted to be the fastest.
FULL_NAMED = 2
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
      rivals: the rivals among which it is; none of a plan that no rival equals.
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

    def __str__(self) -> str:
        """Its balance, schedule and remat modes."""
        words = [f"{self.balance}", json.loads(self.schedule)["name"]]
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
      refusal: the sentence of the planner, if nothing fits.
    """

    limit: int | None
    plan_seconds: float
    way: int | None = None
    refusal: str = ""


def square(y: jax.Array, _: PyTree) -> jax.Array:
    """A loss of any output."""
    return jnp.mean(jnp.square(y))


class Ways:
    """The ways of a model, each once.

    Args:
      profile: of its layers.
      link: between the processes.
    """

    def __init__(self, profile: jpipe.Profile, link: Link) -> None:
        self.ways: list[Way] = []
        self._profile = profile
        self._link = link

    def add(self, way: Way) -> int:
        """The index of a way; of one that does the same, if there is one."""
        for index, present in enumerate(self.ways):
            if present.work == way.work:
                present.rivals += way.rivals
                return index
        self.ways.append(way)
        return len(self.ways) - 1

    def add_rivals(self) -> None:
        """All that the plans are compared with."""
        layers = self._profile.layers
        seconds = [layer.forward + layer.backward for layer in layers]
        half = len(layers) // 2
        for remat in ("min_cut", "full"):
            even = jpipe.partition(seconds, RANKS)
            self.add(self._rival(EQUAL, [len(layers) - half, half], "1f1b", remat))
            self.add(self._rival(GPIPE_CUT, even, "gpipe", remat))
            self.add(self._rival(TORCHGPIPE, even, "1f1b", remat))
            named = sorted(self._named(remat), key=lambda way: way.seconds)
            for way in named[: FULL_NAMED if remat == "full" else None]:
                self.add(way)

    def _named(self, remat: str) -> Iterator[Way]:
        """Each schedule of the catalogue that two ranks can run."""
        for name, build in BY_NAME.items():
            num_stages = build(RANKS, MICROBATCHES).num_stages
            if name == "forward_only" or num_stages > len(self._profile.layers):
                continue
            balance = jpipe.partition(
                self._profile,
                num_stages,
                objective="step",
                num_microbatches=MICROBATCHES,
                schedule=name,
                remat=remat,
                bandwidth=self._link.bandwidth,
                latency=self._link.latency,
            )
            yield self._rival(NAMED, balance, name, remat)

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
    start = time.perf_counter()
    profile = jpipe.profile(layers, x, num_microbatches=MICROBATCHES, loss_fn=square)
    profile_seconds = time.perf_counter() - start
    ways = Ways(profile, link)
    planned: list[Planned] = []

    def plan(limit: int | None) -> jpipe.Plan | None:
        """The plan under a limit, which is added to the ways."""
        start = time.perf_counter()
        try:
            plan = jpipe.plan(
                layers,
                x,
                optax.sgd(1e-3),
                loss_fn=square,
                profile=profile,
                num_devices=RANKS,
                data=1,
                num_microbatches=MICROBATCHES,
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
        planned.append(Planned(limit, seconds, ways.add(plan_way(plan))))
        return plan

    free = plan(None)
    assert free is not None
    most = _most_bytes(free)
    for share in LIMITS:
        plan(int(share * most))
    ways.add_rivals()
    return {
        "profile_seconds": profile_seconds,
        "planned": list(map(dataclasses.asdict, planned)),
        "ways": list(map(dataclasses.asdict, ways.ways)),
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
