"""How long a plan for many devices takes: layers are estimated, and nothing is run.

python -m benchmarks.planning.large
python -m benchmarks.planning.large --different
python -m benchmarks.planning.large --devices 8 --microbatches 64 --layers 24
"""

import argparse
import random
import time
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

import jpipe

from ..experiment import mean_square
from ..markdown import table

WIDTH = 256
WIDTHS = (64, 512)  # of different layers
# A slow device: what its stages compute takes longer than to have it run from Python.
RATES: dict[str, Any] = {"peak_flops": 1e9, "action_seconds": 1e-6}


def main() -> None:
    """Plans layers, equal or different, and prints a table of one row."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", type=int, default=64)
    parser.add_argument("--microbatches", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=128)
    parser.add_argument(
        "--different", action="store_true", help="layers of random widths"
    )
    options = parser.parse_args()

    widths = [WIDTH] * options.layers
    if options.different:
        rng = random.Random(0)
        widths[:-1] = [rng.randint(*WIDTHS) for _ in widths[:-1]]
    layers = [nn.Dense(width) for width in widths]
    shape = (32 * options.microbatches, WIDTH)
    x = jax.ShapeDtypeStruct(shape, jnp.float32)
    begin = time.process_time()
    plan = jpipe.plan(
        layers,
        x,
        optax.adam(1e-3),
        loss_fn=mean_square,
        targets=x,
        num_devices=options.devices,
        num_microbatches=options.microbatches,
        data=1,
        bandwidth=1e10,
        measure=False,
        **RATES,
    )
    seconds = time.process_time() - begin
    assert plan.forecast is not None
    bound = plan.schedule.simulate(plan.forecast.costs).lower_bound
    row = [
        f"{options.devices}, {options.microbatches}, {options.layers}",
        "different" if options.different else "equal",
        f"{len(plan.balance)} stages, {plan.schedule.name}",
        f"{plan.forecast.seconds / bound:.3f}",
        f"{seconds:.0f} s",
    ]
    head = ["devices, micro-batches, layers", "layers", "plan"]
    head += ["by its bound", "planned in"]
    print(table(head, [row], left=3))


if __name__ == "__main__":
    main()
