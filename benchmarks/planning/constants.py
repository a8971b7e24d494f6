"""What the constants of a plan's search are worth: steps with other values of them.

Random chains of layers are planned on devices that are not there: nothing is measured
or compiled. For each value of a constant a line has the mean step, by that with the
value of the library, the longest of all by it, and the seconds of the search by those
of the library.

    python -m benchmarks.planning.constants --chains 20
"""

import argparse
import dataclasses
import importlib
import math
import random
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

from rich.progress import track

from jpipe.planning._mesh_shapes import MeshShape
from jpipe.planning._plan_search import search
from jpipe.planning._profile import LayerProfile, Profile
from jpipe.planning._space import Hardware, SearchSpace
from jpipe.schedules import BY_NAME

# Module -> constant -> the values to try.
VALUES: dict[str, dict[str, tuple[int, ...]]] = {
    "_plan_search": {"_NUM_IMPROVED": (1, 3, 12), "_NUM_ACTIONS": (0,)},
    "_cut_search": {
        "_MAX_ACTIONS": (1_000, 10_000, 160_000),
        "_MAX_EVALUATED": (1_000, 100_000),
        "_FEW_CUTS": (0, 100),
    },
    "_climb": {"_PATIENCE": (1, 4, 40)},
}
SCHEDULES = tuple(name for name in BY_NAME if name != "forward_only")


class Outcome(NamedTuple):
    """What a search of one chain comes to.

    Attributes:
      step: the seconds of the best step; infinite if nothing fits.
      seconds: of the search itself.
    """

    step: float
    seconds: float


def chain(rng: random.Random, count: int) -> Profile:
    """Layers whose times and sizes differ by several times."""
    layers = []
    for i in range(count):
        forward = rng.lognormvariate(0, 0.7)
        backward = forward * rng.uniform(1.6, 2.2)
        output = rng.randint(1, 40) * 1000
        params = rng.randint(1, 60) * 1000
        layers.append(
            LayerProfile(
                name=f"layer {i}",
                forward=forward,
                backward=backward,
                param_bytes=params,
                state_bytes=2 * params,
                output_bytes=output,
                cotangent_bytes=output,
                residual_bytes={"min_cut": int(output * rng.uniform(1, 6))},
                workspace_bytes=output,
            )
        )
    return Profile(tuple(layers), input_bytes=5000, action_seconds=0.002)


def spaces(num_chains: int) -> Iterator[SearchSpace]:
    """Each chain without a limit of bytes and with one that asks for recomputation."""
    for seed in range(num_chains):
        rng = random.Random(seed)
        num_ranks = rng.choice([2, 4])
        num_layers = rng.randint(2 * num_ranks, 4 * num_ranks)
        count = num_ranks * rng.choice([1, 2, 4])
        space = SearchSpace(
            profiles={count: chain(rng, num_layers)},
            optimizer_bytes=[0] * num_layers,
            hardware=Hardware(num_ranks, bandwidth=rng.choice([1e5, 1e6])),
            schedule_names=SCHEDULES,
            remat_modes=("min_cut", "full"),
            fits_schedules=False,
            balance=None,
            mesh_shapes=(MeshShape(count),),
        )
        yield space
        limit = int(0.7 * search(space)[0].max_bytes)
        limited = dataclasses.replace(space.hardware, memory_limit=limit)
        yield dataclasses.replace(space, hardware=limited)


def plan(space: SearchSpace) -> Outcome:
    """Searches a space."""
    begin = time.process_time()
    best, *_ = search(space)
    seconds = time.process_time() - begin
    step = best.seconds if best.fits(space.hardware) else math.inf
    return Outcome(step, seconds)


def row(title: str, outcomes: list[Outcome], library: list[Outcome]) -> str:
    """A line of the table, of the chains of which some plan fits."""
    pairs = [
        (own, other)
        for own, other in zip(outcomes, library, strict=True)
        if math.isfinite(own.step) and math.isfinite(other.step)
    ]
    ratios = [own.step / other.step for own, other in pairs]
    spent = sum(own.seconds for own, _ in pairs) / sum(x.seconds for _, x in pairs)
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
    return f"| {title} | {mean:.4f} | {max(ratios):.3f} | {spent:.2f} |"


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--chains", type=int, default=20)
    parser.add_argument("--constants", nargs="*", default=[])
    options = parser.parse_args()

    every = list(spaces(options.chains))
    library = list(map(plan, every))
    lines = ["| constant | step | longest | search |", "| --- | --: | --: | --: |"]
    settings: list[tuple[Any, str, int]] = []
    for module_name, constants in VALUES.items():
        module = importlib.import_module(f"jpipe.planning.{module_name}")
        for name, values in constants.items():
            if not options.constants or name in options.constants:
                settings += [(module, name, value) for value in values]
    for module, name, value in track(settings, "planning"):
        original = getattr(module, name)
        setattr(module, name, value)
        outcomes = list(map(plan, every))
        setattr(module, name, original)
        lines.append(row(f"{name} {original} -> {value}", outcomes, library))
    print("\n".join(lines))


if __name__ == "__main__":
    main()
