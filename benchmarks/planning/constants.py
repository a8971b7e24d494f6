"""What the constants of the planner are worth: steps with other values of them.

Random chains of layers are planned on devices that are not there, and small models with
estimated layers: nothing is measured or compiled. For each value of a constant a line
has the mean step, by that with the value of the library, the longest of all by it, and
the seconds of planning by those of the library. Steps are those that were predicted.

    python -m benchmarks.planning.constants --chains 20
"""

import argparse
import dataclasses
import functools
import importlib
import math
import random
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from rich.progress import track

import jpipe
from jpipe.planning._interpolate import interpolate
from jpipe.planning._mesh_shapes import MeshShape, mesh_shapes
from jpipe.planning._plan_search import search
from jpipe.planning._profile import LayerProfile, Profile
from jpipe.planning._space import Hardware, SearchSpace
from jpipe.schedules import BY_NAME

from ..markdown import table
from ..models.unet import unet
from .chains import random_chain
from .models import MODELS

# The seconds that any action of a random chain takes, whose layers take about one.
ACTION_SECONDS = 0.002
SCHEDULES = tuple(name for name in BY_NAME if name != "forward_only")
# Plans something; returns the seconds of the best step, infinite if nothing fits.
Problem = Callable[[], float]


class Outcome(NamedTuple):
    """What a problem comes to.

    Attributes:
      step: the seconds of the best step; infinite if nothing fits.
      seconds: of planning itself.
    """

    step: float
    seconds: float


class Constant(NamedTuple):
    """A constant of the planner, and where it may matter.

    Attributes:
      module: its module in `jpipe.planning`.
      name: its name there.
      values: the values to try.
      problems: ``number of chains -> problems``.
    """

    module: str
    name: str
    values: tuple[Any, ...]
    problems: Callable[[int], Iterator[Problem]]


def random_space(seed: int) -> SearchSpace:
    """A chain on two or four devices, in a fixed number of micro-batches."""
    rng = random.Random(seed)
    num_ranks = rng.choice([2, 4])
    num_layers = rng.randint(2 * num_ranks, 4 * num_ranks)
    count = num_ranks * rng.choice([1, 2, 4])
    return SearchSpace(
        profiles={count: random_chain(rng, num_layers, action_seconds=ACTION_SECONDS)},
        optimizer_bytes=[0] * num_layers,
        hardware=Hardware(num_ranks, bandwidth=rng.choice([1e2, 1e3])),
        schedule_names=SCHEDULES,
        remat_modes=("min_cut", "full"),
        fits_schedules=False,
        balance=None,
        mesh_shapes=(MeshShape(count),),
    )


def best_step(space: SearchSpace) -> float:
    """The seconds of the best step of a space."""
    best, *_ = search(space)
    return best.seconds if best.fits(space.hardware) else math.inf


def with_limits(space: SearchSpace) -> Iterator[Problem]:
    """A space without a limit of bytes, and with one that asks for recomputation."""
    yield functools.partial(best_step, space)
    limit = int(0.7 * search(space)[0].max_bytes)
    limited = dataclasses.replace(space.hardware, memory_limit=limit)
    yield functools.partial(best_step, dataclasses.replace(space, hardware=limited))


def chains(num_chains: int) -> Iterator[Problem]:
    """Random chains."""
    for seed in range(num_chains):
        yield from with_limits(random_space(seed))


def chains_of_a_cpu(num_chains: int) -> Iterator[Problem]:
    """Random chains as if they were measured on a CPU."""
    for seed in range(num_chains):
        space = random_space(seed)
        ((count, profile),) = space.profiles.items()
        origin = {"how": "measured", "device": "cpu (2 cores)"}
        measured = dataclasses.replace(profile, origin=origin)
        yield from with_limits(dataclasses.replace(space, profiles={count: measured}))


def long_chains(num_chains: int) -> Iterator[Problem]:
    """Chains of more layers in schedules with two stages on each of eight ranks."""
    for seed in range(num_chains // 4):
        profile = random_chain(random.Random(seed), 96, action_seconds=ACTION_SECONDS)
        space = SearchSpace(
            profiles={16: profile},
            optimizer_bytes=[0] * len(profile.layers),
            hardware=Hardware(8, bandwidth=1e3),
            schedule_names=("interleaved", "zb_v"),
            remat_modes=("min_cut",),
            fits_schedules=False,
            balance=None,
            mesh_shapes=(MeshShape(16),),
        )
        yield functools.partial(best_step, space)


def chains_of_any_size(num_chains: int) -> Iterator[Problem]:
    """Random chains whose micro-batches may have any of the sizes that are tried."""

    def plan(small: Profile, num_devices: int) -> float:
        num_examples = 64
        shapes = mesh_shapes(
            [1],  # with many devices for each stage there is one stage
            None,
            num_devices=num_devices,
            num_examples=num_examples,
            shard_size=None,
        )
        counts = {shape.num_microbatch_shards for shape in shapes}
        space = SearchSpace(
            profiles={
                count: interpolate(small, -(-num_examples // count)) for count in counts
            },
            optimizer_bytes=[0] * len(small.layers),
            hardware=Hardware(num_devices, bandwidth=1e3),
            schedule_names=("1f1b", "interleaved", "zb_h1"),
            remat_modes=("min_cut",),
            fits_schedules=False,
            balance=None,
            mesh_shapes=shapes,
        )
        return best_step(space)

    for seed in range(num_chains):
        rng = random.Random(seed)
        num_devices = rng.choice([2, 4])
        chain = random_chain(rng, 4 * num_devices)
        # An action takes as long as this part of a layer on one example.
        seconds = rng.choice([0.03, 0.3, 1.0])
        larger = dataclasses.replace(
            chain,
            layers=tuple(four_times(layer) for layer in chain.layers),
            microbatch_size=4,
            action_seconds=seconds,
        )
        smaller = dataclasses.replace(chain, larger=larger, action_seconds=seconds)
        yield functools.partial(plan, smaller, num_devices)


def four_times(layer: LayerProfile) -> LayerProfile:
    """A layer on four times as many examples."""
    modes = layer.residual_bytes.items()
    return dataclasses.replace(
        layer,
        forward=4 * layer.forward,
        backward=4 * layer.backward,
        input_grad=4 * layer.halves[0],
        weight_grad=4 * layer.halves[1],
        output_bytes=4 * layer.output_bytes,
        cotangent_bytes=4 * layer.cotangent_bytes,
        residual_bytes={mode: 4 * num_bytes for mode, num_bytes in modes},
    )


def plan_estimated(model: Any, x: Any, **options: Any) -> jpipe.Plan:
    """The plan of a model whose layers are estimated."""
    return jpipe.plan(
        model,
        x,
        optax.adam(1e-3),
        measure=False,
        num_microbatches=8,
        data=1,
        bandwidth=1e9,
        **options,
    )


def step_of_plan(model: Any, x: Any, **options: Any) -> float:
    """The seconds of a step of a plan; infinite if nothing fits."""
    try:
        plan = plan_estimated(model, x, **options)
    except ValueError:
        return math.inf
    assert plan.forecast is not None
    return plan.forecast.seconds


def limited_models(num_chains: int) -> Iterator[Problem]:
    """Small models whose bytes are forecast wrongly by some parts in a hundred."""
    del num_chains
    images = jax.ShapeDtypeStruct((32, 32, 32, 3), jnp.float32)
    layers, tokens = MODELS["large vocabulary"]()
    for model, x, num_devices in (
        (unet(1, 8, depth=2), images, 2),
        (layers, tokens, 4),
    ):
        forecast = plan_estimated(model, x, num_devices=num_devices).forecast
        assert forecast is not None
        peak = max(memory.total for memory in forecast.memory)
        for share in (0.8, 0.7, 0.6):
            yield functools.partial(
                step_of_plan,
                model,
                x,
                num_devices=num_devices,
                memory_limit=int(share * peak),
            )


class Widths(nn.Module):
    """Products of different sizes."""

    widths: tuple[int, ...]

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Float ``[batch, width]`` to the last of the widths."""
        for width in self.widths:
            x = jnp.tanh(nn.Dense(width)(x))
        return x


def models(num_chains: int) -> Iterator[Problem]:
    """Models that are not lists: plans count their sections."""
    x = jax.ShapeDtypeStruct((64, 128), jnp.float32)
    for seed in range(num_chains // 4):
        rng = random.Random(seed)
        widths = [rng.choice([64, 128, 256, 512]) for _ in range(32)]
        for num_devices in (2, 4):
            yield functools.partial(
                step_of_plan, Widths(tuple(widths)), x, num_devices=num_devices
            )


CONSTANTS = (
    Constant("_plan_search", "_NUM_IMPROVED", (1, 3, 12), chains),
    Constant("_plan_search", "_NUM_ACTIONS", (0,), chains),
    Constant("_cut_search", "_MAX_ACTIONS", (1_000, 10_000, 160_000), chains),
    Constant("_cut_search", "_MAX_EVALUATED", (1_000, 100_000), long_chains),
    Constant("_climb", "_PATIENCE", (1, 4, 40), chains),
    Constant("_climb", "_PAIRED_STEPS", ((),), long_chains),
    Constant("_forecast", "_HALVES_HANDICAP", (1.0, 1.1), chains_of_a_cpu),
    Constant(
        "_mesh_shapes",
        "_SHARDS_PER_DEVICE",
        ((1,), (1, 2, 4), (1, 2, 4, 8, 16)),
        chains_of_any_size,
    ),
    Constant("_verify", "_NUM_LOWERED", (1, 2, 8), limited_models),
    Constant("_planned_model", "_NUM_SECTIONS", (8, 32), models),
)


def solve(problem: Problem) -> Outcome:
    """Solves a problem."""
    begin = time.process_time()
    step = problem()
    return Outcome(step, time.process_time() - begin)


def make_row(title: str, outcomes: list[Outcome], library: list[Outcome]) -> list[str]:
    """A line of the table, of the problems of which some plan fits."""
    ratios = []
    num_lost = 0
    for outcome, reference in zip(outcomes, library, strict=True):
        if math.isinf(reference.step):
            continue
        if math.isinf(outcome.step):
            num_lost += 1
        else:
            ratios.append(outcome.step / reference.step)
    seconds = sum(outcome.seconds for outcome in outcomes)
    library_seconds = sum(outcome.seconds for outcome in library)
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
    return [
        title,
        f"{mean:.4f}",
        f"{max(ratios):.3f}",
        str(num_lost),
        f"{seconds / library_seconds:.2f}",
    ]


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--chains", type=int, default=20)
    parser.add_argument("--constants", nargs="*", default=[])
    options = parser.parse_args()

    # function that makes problems -> the problems, and their outcomes
    solved: dict[Any, tuple[list[Problem], list[Outcome]]] = {}
    rows = []
    for module_name, name, values, make_problems in track(CONSTANTS, "planning"):
        if options.constants and name not in options.constants:
            continue
        if make_problems not in solved:
            problems = list(make_problems(options.chains))
            solved[make_problems] = problems, list(map(solve, problems))
        problems, library = solved[make_problems]
        module: Any = importlib.import_module(f"jpipe.planning.{module_name}")
        original = getattr(module, name)
        for value in values:
            setattr(module, name, value)
            outcomes = list(map(solve, problems))
            rows.append(make_row(f"{name} {original} -> {value}", outcomes, library))
        setattr(module, name, original)
    header = ["constant", "step", "longest", "nothing fits", "planning"]
    print(table(header, rows))


if __name__ == "__main__":
    main()
