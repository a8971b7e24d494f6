"""U-Net: speed, memory, and what skip connections cost (torchgpipe)."""

import jax
import jax.numpy as jnp
import optax

from ..experiment import Experiment, Work, mean_binary_cross_entropy
from ..models.unet import unet
from .benchmark import Benchmark

_PIXELS = {"full": 192, "small": 64, "tiny": 16}


def work(experiment: Experiment, scale: str) -> Work:
    """Images to segment."""
    convs, channels = experiment.model
    if scale == "small":
        channels = channels // 16 + channels // 16 % 2
    depth = 5
    if scale == "tiny":
        convs, channels, depth = 1, 4, 2
    pixels = _PIXELS[scale]
    return Work(
        layers=unet(convs, channels, depth=depth, **experiment.options),
        x=jax.ShapeDtypeStruct((pixels, pixels, 3), jnp.float32),
        targets=jax.ShapeDtypeStruct((pixels, pixels, 1), jnp.float32),
        loss=mean_binary_cross_entropy,
        tx=optax.sgd(0.1),
    )


def _row(
    name: str, balance: list[int], batch: int, chunks: int, throughput: float
) -> Experiment:
    return Experiment(
        name,
        tuple(balance),
        batch,
        chunks,
        remat="none" if name == "baseline" else "except_last",
        model=(5, 64),
        published={"samples/s": throughput},
    )


SPEED = Benchmark(
    "unet-speed",
    "U-Net (5, 64), images of 192 x 192, SGD: throughput and speed-up",
    "speed",
    (
        _row("baseline", [241], 40, 1, 28.500),
        _row("pipeline-1", [241], 80, 2, 24.456),
        _row("pipeline-2", [104, 137], 512, 32, 35.502),
        _row("pipeline-4", [30, 66, 84, 61], 512, 16, 67.042),
        _row("pipeline-8", [16, 27, 31, 44, 22, 57, 27, 17], 640, 40, 88.497),
    ),
    work,
    "Batch sizes differ from row to row.",
    tiny=("baseline", "pipeline-2"),
)


def _timeline(
    name: str,
    throughput: float,
    utilization: float,
    gib: float,
    carried: bool,
    ours: bool = True,
) -> Experiment:
    return Experiment(
        name,
        (34, 76, 70, 61),
        128,
        8,
        model=(5, 64),
        options={"carried": True} if carried else {},
        published={
            "samples/s": throughput,
            "utilization, %": utilization,
            "memory, GiB": gib,
        },
        ours=ours,
    )


TIMELINE = Benchmark(
    "unet-timeline",
    "U-Net (5, 64) on four devices, 8 micro-batches: what skips past stages are worth",
    "timeline",
    (
        _timeline("baseline", 30.662, 44, 52.2, carried=True, ours=False),
        _timeline("dep-x-x", 41.306, 59, 19.1, carried=True, ours=False),
        _timeline("dep-str-x", 55.191, 71, 30.0, carried=True),
        _timeline("dep-str-ptl", 58.477, 75, 23.5, carried=False),
    ),
    work,
    "torchgpipe's rows `baseline` and `dep-x-x` take away the order of its backwards "
    "and its copy streams. Here a schedule is the order and every move is "
    "asynchronous, so there is nothing to take away. What remains are skips carried "
    "through every stage (`dep-str-x`) and skips that go straight to where they are "
    "popped (`dep-str-ptl`).",
    tiny=("dep-str-ptl",),
)


def _memory(
    name: str,
    model: tuple[int, int],
    balance: list[int],
    parameters: float,
    gib: float,
) -> Experiment:
    baseline = name == "baseline"
    return Experiment(
        name,
        tuple(balance),
        32,
        1 if baseline else 32,
        # With 128 chunks for 32 examples, torchgpipe checkpoints the last one too.
        remat={"baseline": "none", "pipeline-8": "full"}.get(name, "except_last"),
        model=model,
        published={"parameters": parameters, "memory, GiB": gib},
    )


MEMORY = Benchmark(
    "unet-memory",
    "U-Net (B, C), batch 32 in 32 micro-batches, SGD: bytes of all devices",
    "memory",
    (
        _memory("baseline", (6, 72), [285], 362.2e6, 20.3),
        _memory("pipeline-1", (11, 128), [505], 2.21e9, 20.5),
        _memory("pipeline-2", (24, 128), [526, 551], 4.99e9, 43.4),
        _memory("pipeline-4", (24, 160), [472, 54, 36, 515], 7.80e9, 79.1),
        _memory(
            "pipeline-8",
            (48, 160),
            [800, 140, 62, 36, 36, 36, 36, 987],
            15.82e9,
            154.1,
        ),
    ),
    work,
    "Published is all that the allocators had reserved, model included: parameters and "
    "gradients, 8 bytes a parameter.",
    same_batch=True,
    tiny=("pipeline-2",),
)
