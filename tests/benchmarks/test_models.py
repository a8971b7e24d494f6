"""The models of the published tables: their sizes, their cuts, a step of small ones."""

from collections import Counter
from functools import cache, partial
from itertools import islice

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jpipe
from benchmarks.models.amoebanet import amoebanetd
from benchmarks.models.resnet import resnet101
from benchmarks.models.transformer import transformer_l
from benchmarks.models.unet import unet

from .. import reference as ref

TOKENS = jax.ShapeDtypeStruct((2, 8), jnp.int32)
IMAGES = jax.ShapeDtypeStruct((2, 224, 224, 3), jnp.float32)
PHOTOGRAPHS = jax.ShapeDtypeStruct((2, 192, 192, 3), jnp.float32)


@cache
def profile(model, *size, sample=IMAGES):
    """What is known of each layer, estimated: nothing is compiled."""
    return jpipe.profile(model(*size), sample, num_microbatches=1, measure=False)


def slow(*row):
    return pytest.param(*row, marks=pytest.mark.slow)


amoebanet = partial(amoebanetd, 1000)
resnet = partial(profile, resnet101), 105_344
small_unet = partial(profile, unet, 5, 64, sample=PHOTOGRAPHS), 0


RESNET_IN_EIGHT = (
    [26, 22, 33, 44, 44, 66, 66, 69],
    [
        *[154_944, 449_792, 840_192, 4_864_000, 4_468_736],
        *[6_703_104, 6_703_104, 20_365_288],
    ],
)

# A model and its statistics; layers and parameters of each stage, and how many skips go
# from one stage to another: Kim et al. (2020), and those of AmoebaNet-D of Huang et al.
# (2019), table 1.
CUTS = [
    slow(*resnet, [135, 235], [7_426_112, 37_123_048], {}),
    slow(
        *resnet,
        [44, 92, 124, 110],
        [406_080, 7_020_032, 12_551_680, 24_571_368],
        {(0, 1): 1, (2, 3): 1},
    ),
    slow(*resnet, *RESNET_IN_EIGHT, {}),
    slow(
        *small_unet,
        [30, 66, 84, 61],
        [370_368, 27_869_184, 203_489_280, 958_496],
        {(1, 2): 2, (1, 3): 1, (0, 3): 1},
    ),
    (
        *small_unet,
        [16, 27, 31, 44, 22, 57, 27, 17],
        [112_320, 700_416, 6_193_152, *[106_168_320] * 2, 12_976_128, 331_776, 36_896],
        # Stage 1 ends with a layer that hands its input on, straight to stage 2.
        {(1, 6): 2, (1, 2): 1, (3, 4): 1, (3, 5): 1, (2, 5): 1},
    ),
    slow(
        partial(profile, amoebanet, 18, 256),
        None,
        [3, 6, 7, 8],
        [419_328, 5_137_920, 22_586_624, 94_326_248],
        # Each cell takes the outputs of two before it: one is handed on.
        {(0, 1): 1, (1, 2): 1, (2, 3): 1},
    ),
    slow(partial(profile, amoebanet, 18, 208), 168_116, [24], [81_505_540], {}),
    slow(partial(profile, amoebanet, 72, 512), 1_510_528, [78], [1_844_858_344], {}),
    slow(
        partial(profile, unet, 48, 160, sample=PHOTOGRAPHS),
        *(0, [2133], [15_822_206_000], {}),
    ),
]


def sums(numbers, balance):
    """The sum of each stage."""
    assert sum(balance) == len(numbers)
    left = iter(numbers)
    return [sum(islice(left, count)) for count in balance]


def test_resnet_has_the_published_size_if_the_bottlenecks_of_a_group_are_alike():
    """Two bottlenecks of a group say what the others are: a quarter of the layers."""
    shallow = profile(partial(resnet101, blocks=(2, 2, 2, 2)))
    numbers = [layer.num_params for layer in shallow.layers]
    stem, blocks, head = numbers[:4], numbers[4:-3], numbers[-3:]
    grown = stem
    for group, count in enumerate((3, 4, 23, 3)):
        both = blocks[22 * group : 22 * (group + 1)]
        grown = grown + both[:11] + (count - 1) * both[11:]
    grown += head
    balance, params = RESNET_IN_EIGHT
    assert len(resnet101()) == len(grown)
    assert sums(grown, balance) == params


@pytest.mark.parametrize(("model", "stats", "balance", "params", "skips"), CUTS)
def test_models_have_the_published_sizes_and_cuts(model, stats, balance, params, skips):
    found = model()
    numbers = [layer.num_params for layer in found.layers]
    assert sums(numbers, balance) == params
    if stats is not None:
        assert sum(layer.state_bytes for layer in found.layers) == 4 * stats
    between = found.costs(balance).skips
    assert Counter((skip.source, skip.target) for skip in between) == skips


def rounded(number, like):
    """The number in as many digits as a published one."""
    unit = {"M": 1e6, "B": 1e9}[like[-1]]
    return f"{number / unit:.{len(like.partition('.')[2][:-1])}f}{like[-1]}"


def test_transformers_have_the_published_parameters():
    """Huang et al. (2019): Transformer-L of table 1."""
    layers = profile(transformer_l, 3, sample=TOKENS).layers
    embedding, *blocks, head = [layer.num_params for layer in layers]
    published = {3: "282.2M", 13: "785.8M", 103: "5.3B", 415: "21.0B", 1663: "83.9B"}
    for count, expected in published.items():
        assert rounded(embedding + head + count * blocks[0], expected) == expected


def words(seed):
    return np.random.default_rng(seed).integers(0, 11, (2, 7), np.int32)


def cross_entropy(logits, targets):
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    return losses.mean()


def squares(y, targets):
    return jnp.mean((y - targets) ** 2)


def pictures(size):
    return np.random.default_rng(1).normal(size=(4, size, size, 3)).astype("float32")


# A small one of each, where it is cut, and what it is trained on.
SMALL = {
    "resnet, inside of a block": lambda: (
        resnet101(5, width=4, blocks=(1, 1)),
        [20, 9],
        (pictures(16), np.ones((4, 5), np.float32), squares),
    ),
    "unet": lambda: (
        unet(1, 4, depth=1),
        [5, 5, 7],
        (pictures(8), np.ones((4, 8, 8, 1), np.float32), squares),
    ),
    "decoder": lambda: (
        transformer_l(1, width=8, hidden=12, heads=2, vocabulary=11),
        [2, 1],
        (words(5), words(6), cross_entropy),
    ),
}


# What becomes of the statistics is not its subject.
@pytest.mark.filterwarnings("ignore:value_and_grad leaves:UserWarning")
@pytest.mark.parametrize(
    "name",
    [n if n == "decoder" else pytest.param(n, marks=pytest.mark.slow) for n in SMALL],
)
def test_small_models_take_the_step_of_one_device(name):
    layers, balance, (x, targets, loss_fn) = SMALL[name]()

    def gradient(pipe):
        variables = pipe.init(jax.random.key(0), x)
        value = pipe.value_and_grad(loss_fn)
        return value(variables, x, targets, rngs={"dropout": jax.random.key(1)})

    with ref.unoptimized():
        found = gradient(jpipe.pipeline(layers, 2, balance=balance))
        expected = gradient(jpipe.sequential(layers, 2))
    # Gradients before a norm are differences of large numbers.
    ref.assert_close(found, expected, 1e-3)
