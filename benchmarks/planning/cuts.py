"""What published cuts would take, beside those of `jpipe.partition` and `jpipe.plan`.

ResNet-101 and AmoebaNet-D, with the cuts, mini-batches and micro-batches of torchgpipe
(Kim et al., 2020, arXiv:2004.09910) for two, four and eight Tesla P40. Layers are
estimated with the rates of that card: nothing is compiled and nothing runs.

    python -m benchmarks.planning.cuts resnet101 --memory 22.5
    python -m benchmarks.planning.cuts amoebanetd --memory 8 --devices 2 4
"""

import argparse
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from rich.progress import track

import jpipe

from ..models.amoebanet import amoebanetd
from ..models.resnet import resnet101

GIB = 2**30
# A Tesla P40 in a PCIe slot: operations and bytes of memory per second, and bytes per
# second between two cards.
P40: dict[str, Any] = {"peak_flops": 1.2e13, "memory_bandwidth": 3.5e11}
BANDWIDTH = 1.2e10


class Run(NamedTuple):
    """How torchgpipe ran a model on a number of devices.

    Attributes:
      balance: layers of each stage.
      examples: of a mini-batch.
      num_microbatches: of a mini-batch.
    """

    balance: list[int]
    examples: int
    num_microbatches: int


# Model -> its layers.
MODELS: dict[str, Callable[[], list[Any]]] = {
    "resnet101": lambda: list(resnet101(1000)),
    "amoebanetd": lambda: list(amoebanetd(1000, 18, 256)),
}
# Model -> number of devices -> the run of torchgpipe 0.0.7.
PUBLISHED = {
    "resnet101": {
        2: Run([135, 235], 25000, 1667),
        4: Run([44, 92, 124, 110], 5632, 256),
        8: Run([26, 22, 33, 44, 44, 66, 66, 69], 5400, 150),
    },
    "amoebanetd": {
        2: Run([9, 15], 1280, 32),
        4: Run([3, 6, 7, 8], 1152, 32),
        8: Run([2, 2, 2, 3, 3, 4, 4, 4], 1280, 32),
    },
}


def plans(
    layers: list[Any], image_size: int, run: Run, memory_limit: int
) -> Iterator[tuple[str, jpipe.Plan | ValueError]]:
    """Plans by the name of their cut; an error where nothing keeps to the limit.

    Args:
      layers: the model.
      image_size: pixels of a side of an image.
      run: how it was published.
      memory_limit: bytes of a device, for the last plan alone.
    """
    num_devices = len(run.balance)
    shape = (run.examples, image_size, image_size, 3)
    images = jax.ShapeDtypeStruct(shape, jnp.float32)
    profile = jpipe.profile(
        layers,
        images,
        num_microbatches=run.num_microbatches,
        measure=False,
        **P40,
    )

    def plan(**options: Any) -> jpipe.Plan:
        return jpipe.plan(
            layers,
            images,
            optax.adamw(1e-3),
            profile=profile,
            num_devices=num_devices,
            num_microbatches=run.num_microbatches,
            data=1,  # what differs is the cut
            bandwidth=BANDWIDTH,
            **options,
        )

    count, remainder = divmod(len(layers), num_devices)
    equal = [count + (stage < remainder) for stage in range(num_devices)]
    partitioned = jpipe.partition(
        profile,
        num_devices,
        objective="step",
        num_microbatches=run.num_microbatches,
        bandwidth=BANDWIDTH,
        schedule="1f1b",
    )
    yield "equal layers", plan(schedules="1f1b", balance=equal)
    yield "torchgpipe's", plan(schedules="1f1b", balance=run.balance)
    yield "jpipe.partition", plan(schedules="1f1b", balance=partitioned)
    try:
        yield "jpipe.plan", plan(memory_limit=memory_limit)
    except ValueError as error:
        yield "jpipe.plan", error


def row(num_devices: int, cut: str, plan: jpipe.Plan | ValueError, limit: int) -> str:
    """A line of the table."""
    if isinstance(plan, ValueError):
        return f"{num_devices:7} | {cut:15} | {plan}"
    assert plan.forecast is not None
    largest = max(memory.total for memory in plan.forecast.memory)
    excess = ", too much" if largest > limit else ""
    return (
        f"{num_devices:7} | {cut:15} | {plan.forecast.seconds:8.4f} s | "
        f"{largest / GIB:5.1f} GiB{excess} | {plan.balance}, {plan.schedule.name}"
    )


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description="Plans published models.")
    parser.add_argument("model", choices=[*MODELS])
    parser.add_argument(
        "--devices", type=int, nargs="+", default=[2, 4, 8], choices=[2, 4, 8]
    )
    parser.add_argument("--memory", type=float, default=22.5, help="GiB of a device")
    options = parser.parse_args()

    limit = int(options.memory * GIB)
    layers = MODELS[options.model]()
    rows = ["devices | cut             | a step     | largest   | balance, schedule"]
    for num_devices in track(options.devices, "planning"):
        run = PUBLISHED[options.model][num_devices]
        rows += [
            row(num_devices, cut, plan, limit)
            for cut, plan in plans(layers, 224, run, limit)
        ]
    print("\n".join(rows))


if __name__ == "__main__":
    main()
