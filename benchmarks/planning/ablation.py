r"""What a part of the planner is worth: steps of random problems, with it and without.

Random chains of layers are planned on devices that are not there, and small models with
estimated layers: nothing is measured or compiled. Steps are those that are forecast.

    python -m benchmarks.planning.ablation --json build/all.json
    python -m benchmarks.planning.ablation --against build/all.json
    python -m benchmarks.planning.ablation --against build/all.json \
        --set _cut_search._PATIENCE=4

The first line is for the commit that has the part, the second for the one without it;
or a constant has another value, as in the third.
"""

import argparse
import ast
import dataclasses
import functools
import importlib
import itertools
import json
import math
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from rich.progress import track

import jpipe
from jpipe.planning._forecast import evaluate
from jpipe.planning._layer_profile import LayerProfile, Link
from jpipe.planning._plan_search import search
from jpipe.planning._scaled_profiles import interpolate
from jpipe.planning._space import (
    Choice,
    Hardware,
    MeshShape,
    PlanChoices,
    SearchSpace,
    mesh_shapes,
)
from jpipe.schedules import BY_NAME, one_f_one_b

from ..markdown import table
from ..models.unet import unet
from .chains import random_chain
from .models import MODELS

# The seconds that any action of a random chain takes, whose layers take about one.
ACTION_SECONDS = 0.002
SCHEDULES = tuple(name for name in BY_NAME if name != "forward_only")
GROUPS = ("chains", "models")
# Steps that differ by a smaller part are equal.
EQUAL = 1e-6
# Shares of the bytes that the fullest device holds with as many layers on each, under
# 1F1B: no part of the planner decides these.
LIMITS = (1.0, 0.8)
# Plans something; returns the seconds of the best step, infinite if nothing fits.
Problem = Callable[[], float]


def best_step(space: SearchSpace) -> float:
    """The seconds of the best step of a space."""
    best, *_ = search(space)
    return best.seconds if best.fits(space.hardware) else math.inf


def bytes_of_even_split(space: SearchSpace) -> int:
    """The bytes of the fullest device with as many layers on each, under 1F1B."""
    num_ranks = space.hardware.num_devices
    (shape,) = space.mesh_shapes
    choice = Choice(
        balance=tuple(split_evenly(space.num_layers, num_ranks)),
        remat=("min_cut",) * num_ranks,
        schedule=one_f_one_b(num_ranks, shape.num_microbatches),
    )
    return evaluate(space, choice).max_bytes


def split_evenly(num_layers: int, num_stages: int) -> list[int]:
    """The numbers of layers of stages that differ by one at most."""
    ends = [num_layers * stage // num_stages for stage in range(num_stages + 1)]
    return [end - begin for begin, end in itertools.pairwise(ends)]


def chain_problems(num_chains: int) -> Iterator[tuple[str, Problem]]:
    """Chains on two or four devices, without a limit of bytes and under one."""
    for seed in range(num_chains):
        rng = random.Random(seed)
        num_ranks = rng.choice([2, 4])
        num_layers = rng.randint(2 * num_ranks, 4 * num_ranks)
        count = num_ranks * rng.choice([1, 2, 4])
        chain = random_chain(rng, num_layers, action_seconds=ACTION_SECONDS)
        space = SearchSpace(
            profiles={count: chain},
            optimizer_bytes=[0] * num_layers,
            hardware=Hardware(num_ranks, link=Link(bandwidth=rng.choice([1e2, 1e3]))),
            choices=PlanChoices(
                schedule_names=SCHEDULES,
                remat_modes=("min_cut", "full"),
                fits_schedules=seed % 2 == 0,
            ),
            mesh_shapes=(MeshShape(count),),
        )
        yield f"chain {seed}", functools.partial(best_step, space)
        limit = int(0.95 * bytes_of_even_split(space))
        limited = dataclasses.replace(space.hardware, memory_limit=limit)
        limited_space = dataclasses.replace(space, hardware=limited)
        yield f"chain {seed}, limited", functools.partial(best_step, limited_space)


def skip_problems(num_chains: int) -> Iterator[tuple[str, Problem]]:
    """Chains with skip connections, under limits."""
    for seed in range(num_chains):
        rng = random.Random(seed)
        num_ranks = rng.choice([2, 3])
        num_layers = rng.randint(2 * num_ranks, 3 * num_ranks)
        count = num_ranks * rng.choice([1, 2])
        chain = random_chain(
            rng, num_layers, action_seconds=ACTION_SECONDS, num_skips=4
        )
        space = SearchSpace(
            profiles={count: chain},
            optimizer_bytes=[0] * num_layers,
            hardware=Hardware(num_ranks, link=Link(bandwidth=1e3)),
            choices=PlanChoices(
                schedule_names=("gpipe", "1f1b", "zb_h1", "interleaved", "zb_v"),
                remat_modes=("min_cut", "full"),
                fits_schedules=seed % 2 == 0,
            ),
            mesh_shapes=(MeshShape(count),),
        )
        peak = bytes_of_even_split(space)
        for share in (1.1, 1.0, 0.9):
            limited = dataclasses.replace(
                space.hardware, memory_limit=int(share * peak)
            )
            limited_space = dataclasses.replace(space, hardware=limited)
            step = functools.partial(best_step, limited_space)
            yield f"skips of chain {seed}, limit {share}", step


def long_chain_problems(num_chains: int) -> Iterator[tuple[str, Problem]]:
    """Chains of more layers in schedules with two stages on each of eight ranks."""
    for seed in range(num_chains):
        chain = random_chain(random.Random(seed), 96, action_seconds=ACTION_SECONDS)
        space = SearchSpace(
            profiles={16: chain},
            optimizer_bytes=[0] * len(chain.layers),
            hardware=Hardware(8, link=Link(bandwidth=1e3)),
            choices=PlanChoices(
                schedule_names=("1f1b", "interleaved", "zb_v"),
                remat_modes=("min_cut",),
            ),
            mesh_shapes=(MeshShape(16),),
        )
        yield f"long chain {seed}", functools.partial(best_step, space)


def size_problems(num_chains: int) -> Iterator[tuple[str, Problem]]:
    """Chains whose micro-batches may have any of the sizes that are tried."""
    num_examples = 64
    for seed in range(num_chains):
        rng = random.Random(seed)
        num_devices = rng.choice([2, 4])
        # An action takes as long as this part of a layer on one example.
        seconds = rng.choice([0.03, 0.3, 1.0])
        chain = random_chain(rng, 4 * num_devices, action_seconds=seconds)
        larger = dataclasses.replace(
            chain,
            layers=tuple(four_times(layer) for layer in chain.layers),
            microbatch_size=4,
        )
        profile = dataclasses.replace(chain, larger=larger)
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
                count: interpolate(profile, -(-num_examples // count))
                for count in counts
            },
            optimizer_bytes=[0] * len(chain.layers),
            hardware=Hardware(num_devices, link=Link(bandwidth=1e3)),
            choices=PlanChoices(
                schedule_names=("1f1b", "interleaved", "zb_h1"),
                remat_modes=("min_cut",),
            ),
            mesh_shapes=shapes,
        )
        yield f"sizes of chain {seed}", functools.partial(best_step, space)


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


def make_plan(model: Any, x: Any, **options: Any) -> jpipe.Plan:
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
        plan = make_plan(model, x, **options)
    except ValueError:
        return math.inf
    assert plan.forecast is not None
    return plan.forecast.seconds


class Widths(nn.Module):
    """Products of different sizes."""

    widths: tuple[int, ...]

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Float ``[batch, width]`` to the last of the widths."""
        for width in self.widths:
            x = jnp.tanh(nn.Dense(width)(x))
        return x


def model_problems() -> Iterator[tuple[str, Problem]]:
    """Lists of layers and a model, without a limit of bytes and under some.

    Their bytes are counted by instructions, from which forecasts differ.
    """
    images = jax.ShapeDtypeStruct((32, 32, 32, 3), jnp.float32)
    models: dict[str, tuple[Any, Any]] = {
        name: MODELS[name]() for name in ("equal blocks", "large vocabulary")
    }
    models["U-Net"] = unet(1, 8, depth=2), images
    rng = random.Random(0)
    widths = tuple(rng.choice([64, 128, 256, 512]) for _ in range(32))
    models["widths"] = Widths(widths), jax.ShapeDtypeStruct((64, 128), jnp.float32)
    for name, (model, x) in models.items():
        num_layers = len(jpipe.profile(model, x, measure=False).layers)
        for num_devices in (2, 4):
            text = f"{name} on {num_devices}"
            plan = functools.partial(step_of_plan, model, x, num_devices=num_devices)
            yield text, plan
            even = make_plan(
                model,
                x,
                num_devices=num_devices,
                schedules="1f1b",
                remat="min_cut",
                balance=split_evenly(num_layers, num_devices),
            )
            assert even.forecast is not None
            peak = max(memory.total for memory in even.forecast.memory)
            for share in LIMITS:
                limited = functools.partial(plan, memory_limit=int(share * peak))
                yield f"{text}, limit {share}", limited


def solve(groups: Sequence[str], share: float) -> dict[str, tuple[float, float]]:
    """Problem -> the seconds of its best step, and of solving it.

    Args:
      groups: the problems to solve.
      share: the part of the random chains to solve, the first ones.
    """
    problems: dict[str, Problem] = {}
    if "chains" in groups:
        problems |= chain_problems(int(40 * share))
        problems |= skip_problems(int(30 * share))
        problems |= long_chain_problems(int(4 * share))
        problems |= size_problems(int(12 * share))
    if "models" in groups:
        problems |= model_problems()
    solved: dict[str, tuple[float, float]] = {}
    for name, problem in track(problems.items(), "planning"):
        begin = time.process_time()
        step = problem()
        solved[name] = step, time.process_time() - begin
    return solved


def compare(
    solved: Mapping[str, tuple[float, float]], base: Mapping[str, tuple[float, float]]
) -> str:
    """A table of solved problems whose steps differ, and a line on all of them."""
    rows = []
    logs = []
    for name, (step, _) in solved.items():
        base_step, _ = base[name]
        if math.isinf(step) or math.isinf(base_step):
            if step != base_step:
                rows.append([name, "lost" if math.isinf(step) else "won"])
            continue
        logs.append(math.log(step / base_step))
        if abs(logs[-1]) > EQUAL:
            rows.append([name, f"{step / base_step:.4f}"])
    seconds = sum(seconds for _, seconds in solved.values())
    base_seconds = sum(base[name][1] for name in solved)
    summary = (
        f"{len(solved)} problems, {len(rows)} differ: mean "
        f"{math.exp(sum(logs) / len(logs)):.4f}, longest {math.exp(max(logs)):.3f}, "
        f"shortest {math.exp(min(logs)):.3f}; planning takes "
        f"{seconds / base_seconds:.2f} of {base_seconds:.0f} CPU s"
    )
    return f"{table(['problem', 'step'], rows)}\n\n{summary}"


def set_constant(assignment: str) -> None:
    """Sets a constant of the planner, such as ``_cut_search._PATIENCE=4``."""
    path, _, value = assignment.partition("=")
    module_name, _, name = path.rpartition(".")
    module = importlib.import_module(f"jpipe.planning.{module_name}")
    getattr(module, name)  # fails where there is none
    setattr(module, name, ast.literal_eval(value))


def main() -> None:
    """Solves all problems; writes the steps, or compares them with others."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="where to write the steps")
    parser.add_argument("--against", type=Path, help="steps to compare with")
    parser.add_argument("--set", nargs="*", default=[], help="module.constant=value")
    parser.add_argument("--only", choices=GROUPS, help="some of the problems")
    parser.add_argument("--share", type=float, default=1, help="of the random chains")
    options = parser.parse_args()
    for assignment in options.set:
        set_constant(assignment)
    groups = GROUPS if options.only is None else (options.only,)
    solved = solve(groups, options.share)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(solved, indent=1) + "\n")
    if options.against:
        print(compare(solved, json.loads(options.against.read_text())))


if __name__ == "__main__":
    main()
