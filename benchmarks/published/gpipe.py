"""The tables of GPipe: the largest models, throughput, slow interconnects."""

import dataclasses

import jax
import jax.numpy as jnp
import optax

from ..experiment import Experiment, Work, mean_cross_entropy
from ..models.transformer import transformer_l
from . import amoebanetd
from .benchmark import Benchmark, read_rows

_TOKENS = {"full": 1024, "small": 64, "tiny": 16}
# Width, hidden width, heads, words.
_SIZES = {
    "full": (2048, 8192, 16, 32000),
    "small": (128, 512, 4, 1000),
    "tiny": (32, 64, 2, 64),
}


def transformer_work(
    experiment: Experiment, scale: str, tx: optax.GradientTransformation | None = None
) -> Work:
    """Sequences whose next tokens are predicted."""
    (layers,) = experiment.model
    width, hidden, heads, words = _SIZES[scale]
    tokens = jax.ShapeDtypeStruct((_TOKENS[scale],), jnp.int32)
    return Work(
        layers=transformer_l(
            layers,
            width=width,
            hidden=hidden,
            heads=heads,
            vocabulary=words,
            **experiment.options,
        ),
        x=tokens,
        targets=tokens,
        loss=mean_cross_entropy,
        tx=tx or optax.sgd(0.1),
        classes=words,
        by_layer=True,
    )


def _work(experiment: Experiment, scale: str) -> Work:
    if experiment.group == "amoebanet":
        return amoebanetd.work(experiment, scale)
    if scale == "tiny":
        experiment = dataclasses.replace(experiment, model=(_TINY_BLOCKS,))
    return transformer_work(experiment, scale)


# Balances of AmoebaNet-D (18, 256) that torchgpipe published for as many stages, and
# those of 48 blocks between an embedding and a projection to words, whose projection
# costs about as much as one block.
_TINY_BLOCKS = 6
_AMOEBANET = {"remat": "full", "model": (18, 256), "group": "amoebanet"}
_TRANSFORMER = {"remat": "full", "model": (48,), "group": "transformer"}
_TITLES = "row | balance | batch | M | speed-up of GPipe"

THROUGHPUT = Benchmark(
    "table2-throughput",
    "GPipe's Table 2: K stages, M micro-batches, speed-up by K = 2, M = 1 (TPUs)",
    "speed",
    # Batches were adjusted to what fits; here micro-batches of all rows are alike.
    read_rows(
        _TITLES,
        """
        amoebanet-k2-m1   9,15               32   1  1.0
        amoebanet-k4-m1   3,6,7,8            32   1  1.13
        amoebanet-k8-m1   2,2,2,3,3,4,4,4    32   1  1.38
        amoebanet-k2-m4   9,15              128   4  1.07
        amoebanet-k4-m4   3,6,7,8           128   4  1.26
        amoebanet-k8-m4   2,2,2,3,3,4,4,4   128   4  1.72
        amoebanet-k2-m32  9,15             1024  32  1.21
        amoebanet-k4-m32  3,6,7,8          1024  32  1.84
        amoebanet-k8-m32  2,2,2,3,3,4,4,4  1024  32  3.48
        """,
        **_AMOEBANET,
    )
    + read_rows(
        _TITLES,
        """
        transformer-k2-m1   25,25              8   1  1.0
        transformer-k4-m1   13,12,13,12        8   1  1.07
        transformer-k8-m1   7,6,6,6,7,6,6,6    8   1  1.3
        transformer-k2-m4   25,25             32   4  1.7
        transformer-k4-m4   13,12,13,12       32   4  3.2
        transformer-k8-m4   7,6,6,6,7,6,6,6   32   4  4.8
        transformer-k2-m32  25,25            256  32  1.8
        transformer-k4-m32  13,12,13,12      256  32  3.4
        transformer-k8-m32  7,6,6,6,7,6,6,6  256  32  6.3
        """,
        **_TRANSFORMER,
    ),
    _work,
    "AmoebaNet-D (18, 256) and Transformer-48. GPipe adjusted batches to fit memory "
    "and gives no sizes; here all micro-batches of a model are of one size.",
    tiny=("transformer-k4-m4",),
)

SLOW_INTERCONNECT = Benchmark(
    "table3-slow-interconnect",
    "GPipe's Table 3: M = 32 without a fast interconnect, speed-up by K = 2 (GPUs)",
    "speed",
    read_rows(
        _TITLES,
        """
        amoebanet-k2  9,15             1024  32  1.0
        amoebanet-k4  3,6,7,8          1024  32  1.7
        amoebanet-k8  2,2,2,3,3,4,4,4  1024  32  2.7
        """,
        bandwidth=1.0,
        **_AMOEBANET,
    )
    + read_rows(
        _TITLES,
        """
        transformer-k2  25,25            256  32  1.0
        transformer-k4  13,12,13,12      256  32  1.8
        transformer-k8  7,6,6,6,7,6,6,6  256  32  3.3
        """,
        bandwidth=1.0,
        **_TRANSFORMER,
    ),
    _work,
    "Every prediction of this table is for 1 GB/s between devices.",
    tiny=("transformer-k2",),
)


def largest_work(experiment: Experiment, scale: str) -> Work:
    """The same work with the optimizer of the table: one slot, 12 bytes a parameter."""
    build = transformer_work if experiment.group == "transformer" else amoebanetd.work
    return build(experiment, scale, optax.rmsprop(0.1))


_SIZES_OF_MODELS = "size | parameters | model, GB | activations, GB"


def _amoebanet(text: str, microbatches: int, remat: str) -> tuple[Experiment, ...]:
    titles = f"row | model | balance | {_SIZES_OF_MODELS}"
    settings = {"microbatches": microbatches, "remat": remat, "batch": 128}
    return read_rows(titles, text, group="amoebanet", **settings)


def _transformer(stages: int, text: str) -> tuple[Experiment, ...]:
    return read_rows(
        f"row | M | remat | model | {_SIZES_OF_MODELS}",
        f"transformer-{text}",
        balance=(1,) * stages,
        batch=32,
        group="transformer",
    )


LARGEST = Benchmark(
    "table1-memory",
    "GPipe's Table 1: the largest model that devices of one size can train",
    "largest",
    _amoebanet("amoebanet-naive-1 18,208 24 208 82e6 1.05 6.26", 1, "none")
    + _amoebanet(
        """
        amoebanet-pipeline-1  18,416  24                  416   318e6   3.8   3.46
        amoebanet-pipeline-2  18,544  16,8                544   542e6   6.45  8.11
        amoebanet-pipeline-4  36,544  16,12,7,7           544  1.05e9  12.53 15.21
        amoebanet-pipeline-8  72,512  23,16,11,6,6,5,5,6  512   1.8e9  24.62 26.24
        """,
        128,
        "full",
    )
    + _transformer(1, "naive-1  1  none  3  3  282.2e6  11.7  3.15")
    + _transformer(1, "pipeline-1  32  full  13  13  785.8e6  8.8  6.4")
    + _transformer(8, "pipeline-8  32  full  103  103  5.3e9  59.5  50.9")
    + _transformer(32, "pipeline-32  32  full  415  415  21e9  235.1  199.9")
    + _transformer(128, "pipeline-128  32  full  1663  1663  83.9e9  937.9  796.1"),
    largest_work,
    "AmoebaNet-D (L, D) on GPUs of 8 GB, L as published and D sought; Transformer-L "
    "on TPUs of 16 GB, the number of blocks sought.",
    same_batch=True,
    tiny=("transformer-pipeline-1", "transformer-pipeline-8"),
)
