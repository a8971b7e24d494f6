"""AmoebaNet-D: speed and memory (torchgpipe)."""

import jax
import jax.numpy as jnp
import optax

from ..experiment import Experiment, Work, mean_cross_entropy
from ..models.amoebanet import amoebanetd
from .benchmark import Benchmark, read_rows

_PIXELS = {"full": 224, "small": 64, "tiny": 32}
_CLASSES = {"full": 1000, "small": 100, "tiny": 10}


def work(
    experiment: Experiment, scale: str, tx: optax.GradientTransformation | None = None
) -> Work:
    """Images to classify."""
    layers, filters = experiment.model
    if scale != "full":
        filters = filters // 128 * 8 or 8  # it has to be a multiple of eight
    if scale == "tiny":
        layers = 3
    pixels, classes = _PIXELS[scale], _CLASSES[scale]
    return Work(
        layers=amoebanetd(classes, layers, filters, **experiment.options),
        x=jax.ShapeDtypeStruct((pixels, pixels, 3), jnp.float32),
        targets=jax.ShapeDtypeStruct((), jnp.int32),
        loss=mean_cross_entropy,
        tx=tx or optax.sgd(0.1),
        classes=classes,
        by_layer=scale != "tiny",
    )


# Not published: the plain step. With the 256 images of n2m4 it needs some 88 GiB; half
# of them fit on a card of 80.
_BASELINE = Experiment(
    "baseline",
    (24,),
    128,
    1,
    remat="none",
    model=(18, 256),
    group="plain",
    only_measured=True,
)

SPEED = Benchmark(
    "amoebanetd-speed",
    "AmoebaNet-D (18, 256), images of 224 x 224, SGD: n stages, m micro-batches",
    "speed",
    (
        _BASELINE,
        *read_rows(
            "row | balance | batch | M | remat | samples/s | speed-up of GPipe",
            """
            n2m1   7,17               96   1  full          26.733  1.0
            n2m4   9,15              256   4  except_last   41.133  1.07
            n2m32  9,15             1280  32  except_last   47.386  1.21
            n4m1   3,4,5,12          160   1  full          26.827  1.13
            n4m4   3,6,7,8           360   4  except_last   44.543  1.26
            n4m32  3,6,7,8          1152  32  except_last   72.412  1.84
            n8m1   2,2,2,2,2,3,4,7   196   1  full          24.918  1.38
            n8m4   2,2,2,3,3,4,4,4   480   4  except_last   70.065  1.72
            n8m32  2,2,2,3,3,4,4,4  1280  32  except_last  132.413  3.48
            """,
            model=(18, 256),
        ),
    ),
    work,
    "Speed-ups are by n2m1. torchgpipe's max_pool_3x3 is an average pool; here it is a "
    "max pool.",
    tiny=("n2m1",),
)


def _memory_work(experiment: Experiment, scale: str) -> Work:
    return work(experiment, scale, optax.rmsprop(0.1))


_MEMORY = (
    "row | model | balance | parameters | model, GiB | activations, GiB"
    "| GPipe's parameters | GPipe's model, GB | GPipe's activations, GB"
)

MEMORY = Benchmark(
    "amoebanetd-memory",
    "AmoebaNet-D (L, D), batch 128 in 128 micro-batches, RMSprop: bytes of all devices",
    "memory",
    read_rows(
        _MEMORY,
        "baseline  18,208  24  81.5e6  0.91  -  82e6  1.05  6.26",
        batch=128,
        microbatches=1,
        remat="none",
    )
    + read_rows(
        _MEMORY,
        """
        pipeline-1 18,416 24                 319.0e6  3.57  0.91  318e6  3.8   3.46
        pipeline-2 18,544 16,8               542.7e6  6.07  3.39  542e6  6.45  8.11
        pipeline-4 36,544 16,12,7,7           1.06e9 11.80  6.91 1.05e9 12.53 15.21
        pipeline-8 72,512 23,16,11,6,6,5,5,6  1.84e9 20.62 10.83  1.8e9 24.62 26.24
        """,
        batch=128,
        microbatches=128,
    ),
    _memory_work,
    "Model: parameters, gradients and one slot of RMSprop, 12 bytes a parameter. The "
    "baseline did not fit a P40 (24 GB) without micro-batches; GPipe's row of that "
    "size is its Naive-1.",
    same_batch=True,
    tiny=("pipeline-1",),
)
