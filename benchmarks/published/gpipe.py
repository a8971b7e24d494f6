"""The tables of GPipe: the largest models, throughput, slow interconnects."""

import dataclasses

import jax
import jax.numpy as jnp
import optax

from ..experiment import Experiment, Work, mean_cross_entropy
from ..models.transformer import transformer_l
from . import amoebanetd
from .benchmark import Benchmark

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
_BALANCES = {
    "amoebanet": {2: (9, 15), 4: (3, 6, 7, 8), 8: (2, 2, 2, 3, 3, 4, 4, 4)},
    "transformer": {2: (25, 25), 4: (13, 12, 13, 12), 8: (7, 6, 6, 6, 7, 6, 6, 6)},
}
_MODELS = {"amoebanet": (18, 256), "transformer": (48,)}
_TINY_BLOCKS = 6

# By the number of stages and of micro-batches.
_THROUGHPUT = {
    "amoebanet": {
        (2, 1): 1.0,
        (4, 1): 1.13,
        (8, 1): 1.38,
        (2, 4): 1.07,
        (4, 4): 1.26,
        (8, 4): 1.72,
        (2, 32): 1.21,
        (4, 32): 1.84,
        (8, 32): 3.48,
    },
    "transformer": {
        (2, 1): 1.0,
        (4, 1): 1.07,
        (8, 1): 1.3,
        (2, 4): 1.7,
        (4, 4): 3.2,
        (8, 4): 4.8,
        (2, 32): 1.8,
        (4, 32): 3.4,
        (8, 32): 6.3,
    },
}
_SLOW = {
    "amoebanet": {2: 1.0, 4: 1.7, 8: 2.7},
    "transformer": {2: 1.0, 4: 1.8, 8: 3.3},
}


def _row(
    group: str, stages: int, microbatches: int, speed_up: float, slow: bool
) -> Experiment:
    # Batches were adjusted to what fits; here micro-batches of all rows are alike.
    size = 8 if group == "transformer" else 32
    return Experiment(
        f"{group}-k{stages}" if slow else f"{group}-k{stages}-m{microbatches}",
        _BALANCES[group][stages],
        size * microbatches,
        microbatches,
        remat="full",
        model=_MODELS[group],
        group=group,
        bandwidth=1.0 if slow else None,
        published={"speed-up of GPipe": speed_up},
    )


THROUGHPUT = Benchmark(
    "table2-throughput",
    "GPipe's Table 2: K stages, M micro-batches, speed-up by K = 2, M = 1 (TPUs)",
    "speed",
    tuple(
        _row(group, stages, count, figure, slow=False)
        for group, figures in _THROUGHPUT.items()
        for (stages, count), figure in figures.items()
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
    tuple(
        _row(group, stages, 32, figure, slow=True)
        for group, figures in _SLOW.items()
        for stages, figure in figures.items()
    ),
    _work,
    "Every prediction of this table is for 1 GB/s between devices.",
    tiny=("transformer-k2",),
)


def _largest(
    name: str,
    group: str,
    balance: tuple[int, ...],
    model: tuple[int, ...],
    parameters: float,
    model_gb: float,
    activations_gb: float,
) -> Experiment:
    naive = name.startswith("naive")
    count = 1 if naive else 32
    return Experiment(
        f"{group}-{name}",
        balance,
        32 if group == "transformer" else 128,
        count if group == "transformer" or naive else 128,
        remat="none" if naive else "full",
        model=model,
        group=group,
        published={
            "parameters": parameters,
            "model, GB": model_gb,
            "activations, GB": activations_gb,
            "size": model[-1],
        },
    )


def largest_work(experiment: Experiment, scale: str) -> Work:
    """The same work with the optimizer of the table: one slot, 12 bytes a parameter."""
    build = transformer_work if experiment.group == "transformer" else amoebanetd.work
    return build(experiment, scale, optax.rmsprop(0.1))


LARGEST = Benchmark(
    "table1-memory",
    "GPipe's Table 1: the largest model that devices of one size can train",
    "largest",
    (
        _largest("naive-1", "amoebanet", (24,), (18, 208), 82e6, 1.05, 6.26),
        _largest("pipeline-1", "amoebanet", (24,), (18, 416), 318e6, 3.8, 3.46),
        _largest("pipeline-2", "amoebanet", (16, 8), (18, 544), 542e6, 6.45, 8.11),
        _largest(
            "pipeline-4",
            "amoebanet",
            (16, 12, 7, 7),
            (36, 544),
            1.05e9,
            12.53,
            15.21,
        ),
        _largest(
            "pipeline-8",
            "amoebanet",
            (23, 16, 11, 6, 6, 5, 5, 6),
            (72, 512),
            1.8e9,
            24.62,
            26.24,
        ),
        _largest("naive-1", "transformer", (1,), (3,), 282.2e6, 11.7, 3.15),
        _largest("pipeline-1", "transformer", (1,), (13,), 785.8e6, 8.8, 6.4),
        _largest("pipeline-8", "transformer", (1,) * 8, (103,), 5.3e9, 59.5, 50.9),
        _largest("pipeline-32", "transformer", (1,) * 32, (415,), 21e9, 235.1, 199.9),
        _largest(
            "pipeline-128", "transformer", (1,) * 128, (1663,), 83.9e9, 937.9, 796.1
        ),
    ),
    largest_work,
    "AmoebaNet-D (L, D) on GPUs of 8 GB, L as published and D sought; Transformer-L "
    "on TPUs of 16 GB, the number of blocks sought.",
    same_batch=True,
    tiny=("transformer-pipeline-1", "transformer-pipeline-8"),
)
