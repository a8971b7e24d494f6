"""U-Net: speed, memory, and what skip connections cost (torchgpipe)."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from ..experiment import Experiment, Work, mean_binary_cross_entropy
from ..models.unet import unet
from .benchmark import Benchmark, read_rows

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


SPEED = Benchmark(
    "unet-speed",
    "U-Net (5, 64), images of 192 x 192, SGD: throughput and speed-up",
    "speed",
    read_rows(
        "row | balance | batch | M | remat | samples/s",
        """
        baseline    241                       40   1  none         28.500
        pipeline-1  241                       80   2  except_last  24.456
        pipeline-2  104,137                  512  32  except_last  35.502
        pipeline-4  30,66,84,61              512  16  except_last  67.042
        pipeline-8  16,27,31,44,22,57,27,17  640  40  except_last  88.497
        """,
        model=(5, 64),
    ),
    work,
    "Batch sizes differ from row to row.",
    tiny=("baseline", "pipeline-2"),
)


def _timeline(text: str, **common: Any) -> tuple[Experiment, ...]:
    return read_rows(
        "row | samples/s | utilization, % | memory, GiB",
        text,
        balance=(34, 76, 70, 61),
        batch=128,
        microbatches=8,
        model=(5, 64),
        **common,
    )


_CARRIED = {"carried": True}

TIMELINE = Benchmark(
    "unet-timeline",
    "U-Net (5, 64) on four devices, 8 micro-batches: what skips past stages are worth",
    "timeline",
    (
        *_timeline("baseline 30.662 44 52.2", options=_CARRIED, ours=False),
        *_timeline("dep-x-x 41.306 59 19.1", options=_CARRIED, ours=False),
        *_timeline("dep-str-x 55.191 71 30.0", options=_CARRIED),
        *_timeline("dep-str-ptl 58.477 75 23.5"),
    ),
    work,
    "torchgpipe's rows `baseline` and `dep-x-x` take away the order of its backwards "
    "and its copy streams. Here a schedule is the order and every move is "
    "asynchronous, so there is nothing to take away. What remains are skips carried "
    "through every stage (`dep-str-x`) and skips that go straight to where they are "
    "popped (`dep-str-ptl`).",
    tiny=("dep-str-ptl",),
)


MEMORY = Benchmark(
    "unet-memory",
    "U-Net (B, C), batch 32 in 32 micro-batches, SGD: bytes of all devices",
    "memory",
    # With 128 chunks for 32 examples, torchgpipe's pipeline-8 checkpoints the last too.
    read_rows(
        "row | M | remat | model | balance | parameters | memory, GiB",
        """
        baseline     1  none         6,72    285                         362.2e6   20.3
        pipeline-1  32  except_last  11,128  505                         2.21e9    20.5
        pipeline-2  32  except_last  24,128  526,551                     4.99e9    43.4
        pipeline-4  32  except_last  24,160  472,54,36,515               7.80e9    79.1
        pipeline-8  32  full         48,160  800,140,62,36,36,36,36,987  15.82e9  154.1
        """,
        batch=32,
    ),
    work,
    "Published is all that the allocators had reserved, model included: parameters and "
    "gradients, 8 bytes a parameter.",
    same_batch=True,
    tiny=("pipeline-2",),
)
