"""The U-Net of the published tables: sizes, cuts, numbers, gradients."""

import math
from collections import Counter
from functools import cache
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

import jpipe
from benchmarks.models.unet import convolution, unet
from jpipe._layers import _layer, _stage, _walk

from .. import reference as ref
from .random_steps import IMAGES, KEY, drawn, routes_of, size, step

# Kim et al. (2020), tables of U-Net: (B, C), parameters, layers.
SIZES = {
    (5, 64): (232_687_328, 241),
    (6, 72): (362_157_516, 285),
    (11, 128): (2_213_834_176, 505),
    (24, 128): (4_993_859_008, 1077),
    (24, 160): (7_802_903_600, 1077),
    (48, 160): (15_822_206_000, 2133),
}


# (B, C), balance, skips between stages, parameters of each stage.
BALANCES = [
    ((5, 64), [104, 137], {(0, 1): 4}, None),
    (
        (5, 64),
        [30, 66, 84, 61],
        {(1, 2): 2, (1, 3): 1, (0, 3): 1},
        [370_368, 27_869_184, 203_489_280, 958_496],
    ),
    (
        (5, 64),
        [34, 76, 70, 61],
        {(1, 2): 3, (1, 3): 1, (0, 3): 1},
        [517_824, 56_033_280, 175_177_728, 958_496],
    ),
    (
        (5, 64),
        [16, 27, 31, 44, 22, 57, 27, 17],
        {(1, 6): 2, (3, 4): 1, (3, 5): 1, (2, 5): 1},
        [112_320, 700_416, 6_193_152, *[106_168_320] * 2, 12_976_128, 331_776, 36_896],
    ),
    ((24, 128), [526, 551], {(0, 1): 5}, [2_465_025_408, 2_528_833_600]),
    (
        (24, 160),
        [472, 54, 36, 515],
        {(0, 3): 4, (1, 3): 1},
        [1_610_269_920, 2_241_331_200, 2_123_366_400, 1_827_936_080],
    ),
    (
        (48, 160),
        [800, 140, 62, 36, 36, 36, 36, 987],
        {(0, 7): 4, (2, 7): 1},
        [
            *[1_254_532_320, 2_064_384_000, 2_182_348_800],
            *[2_123_366_400] * 4,
            1_827_475_280,
        ],
    ),
]


@cache
def walked(num_convs, base_channels):
    """Parameters of each layer, and the routes between layers."""
    layers = _layer.as_layers(unet(num_convs, base_channels))
    stages = _stage.fuse(layers, [1] * len(layers))
    visits, routes = _walk.walk(stages, KEY, IMAGES)
    return [size(visit.variables) for visit in visits], routes


def by_formula(num_convs, base_channels, depth=5):
    """The parameters of a U-Net, from its description."""

    def stack(entering, inner, last):
        middle = (num_convs - 2) * inner**2
        return 9 * (entering * inner + middle + inner * last)

    total = base_channels // 2
    for k in range(depth):
        c = base_channels * 2**k
        total += stack(c // 2 if k else 3, c, c) + stack(2 * c, c // 2, c // 2)
    c = base_channels * 2**depth
    return total + stack(c // 2, c, c // 2)


@pytest.mark.parametrize("which", SIZES)
def test_unet_has_the_published_parameters(which):
    params, layers = SIZES[which]
    counts, _ = walked(*which)
    assert (sum(counts), len(counts)) == (params, layers)
    assert by_formula(*which) == params
    assert len(counts) == 44 * which[0] + 21


@pytest.mark.parametrize(("which", "balance", "skips", "params"), BALANCES)
def test_unet_is_cut_as_published(which, balance, skips, params):
    counts, routes = walked(*which)
    ends = np.cumsum(balance)
    assert ends[-1] == len(counts)
    stage = [int(np.searchsorted(ends, i, side="right")) for i in range(len(counts))]
    between = Counter((stage[route.source], stage[route.target]) for route in routes)
    assert {pair: n for pair, n in between.items() if pair[0] != pair[1]} == skips
    if params:
        cuts = pairwise([0, *ends])
        assert [sum(counts[first:end]) for first, end in cuts] == params


def test_the_pipeline_itself_cuts_the_unet_as_published():
    _, balance, skips, params = BALANCES[3]
    pipe = jpipe.pipeline(unet(), 40, balance=balance)
    visits, routes = pipe._cache.expected(pipe._cache.sample(IMAGES))
    assert Counter((route.source, route.target) for route in routes) == skips
    sizes = Counter()
    for visit in visits:
        sizes[visit.stage] += size(visit.variables)
    assert list(sizes.values()) == params
    entered = [visits[i].x.shape[1:] for i in np.cumsum(balance)[:-1]]
    sides = [192, 96, 24, 6, 12, 96, 192]
    channels = [64, 128, 512, 2048, 512, 128, 32]
    assert entered == [(s, s, c) for s, c in zip(sides, channels, strict=True)]


def test_no_layer_of_the_unet_is_another_one():
    for carried in (False, True):
        modules = [x for x in unet(carried=carried) if isinstance(x, nn.Module)]
        assert len(set(map(id, modules))) == len(modules)


def test_the_unet_needs_an_even_number_of_channels():
    with pytest.raises(ValueError, match="even"):
        unet(2, 3)


def test_convolutions_start_as_in_pytorch():
    x = jnp.zeros((1, 4, 4, 20))
    kernel = convolution(16, 3, None).init(KEY, x)["params"]["kernel"]
    bound = 1 / math.sqrt(3 * 3 * 20)
    assert 0.99 * bound < float(jnp.max(jnp.abs(kernel))) <= bound
    assert abs(float(jnp.std(kernel)) / (bound / math.sqrt(3)) - 1) < 0.05


def np_conv(x, kernel):
    reach = kernel.shape[0] // 2
    height, width = x.shape[1:3]
    padded = np.pad(x, [(0, 0), (reach, reach), (reach, reach), (0, 0)])
    return sum(
        padded[:, i : i + height, j : j + width] @ kernel[i, j]
        for i in range(kernel.shape[0])
        for j in range(kernel.shape[1])
    )


def np_unet(kernels, x, num_convs, depth):
    """The U-Net as described, in NumPy; kernels in the order of their use."""
    kernels = iter(kernels)

    def stack(x):
        for _ in range(num_convs):
            x = np_conv(x, next(kernels))
            mean, var = x.mean((1, 2), keepdims=True), x.var((1, 2), keepdims=True)
            x = (x - mean) / np.sqrt(var + 1e-5)
            x = np.where(x > 0, x, 0.01 * x)
        return x

    kept = []
    for _ in range(depth):
        x = stack(x)
        kept.append(x)
        rows, columns = x.shape[1] // 2 * 2, x.shape[2] // 2 * 2
        quarters = [x[:, i:rows:2, j:columns:2] for i in (0, 1) for j in (0, 1)]
        x = np.max(quarters, axis=0)
    x = stack(x)
    for skip in reversed(kept):
        large = np.zeros((*skip.shape[:3], x.shape[3]))
        for i in range(2 * x.shape[1]):
            for j in range(2 * x.shape[2]):
                large[:, i, j] = x[:, i // 2, j // 2]
        x = stack(np.concatenate([large, skip], axis=3))
    return np_conv(x, next(kernels))


@pytest.mark.parametrize(
    ("shape", "carried"), [((2, 8, 12, 3), False), ((1, 13, 11, 2), True)]
)
def test_unet_computes_what_is_described(double, shape, carried):
    layers = unet(3, 4, depth=2, out_channels=2, carried=carried)
    x = np.random.default_rng(1).normal(size=shape)
    variables = drawn(layers, x)
    expected = np_unet(jax.tree.leaves(variables), x, 3, 2)
    pipe = jpipe.sequential(layers)
    y = pipe.apply(pipe.place(variables), x)
    ref.assert_close(y, expected, 1e-11)


def bce(logits, targets):
    return optax.sigmoid_binary_cross_entropy(logits, targets).mean()


def test_unet_takes_a_step_in_stages_with_skips_carried_or_stashed(double):
    rng = np.random.default_rng(1)
    x, targets = rng.normal(size=(2, 8, 8, 3)), np.ones((2, 8, 8, 1))
    stashed, carried = (unet(1, 4, depth=1, carried=c) for c in (False, True))
    variables = drawn(stashed, x)
    batch = variables, x, targets, bce
    one = jpipe.sequential(stashed, 2)
    loss, expected = step(one, *batch)
    balance = [5, 5, 7]
    pipe = jpipe.pipeline(stashed, 2, balance=balance)
    assert routes_of(pipe, x) == [(0, 2)]
    ref.assert_close(step(pipe, *batch)[1], expected, ref.FLOAT64)
    twin = jpipe.pipeline(carried, 2, balance=balance)
    assert routes_of(twin, x) == []
    ref.assert_close(step(twin, *batch)[1], expected, ref.FLOAT64)
    # Dropout did something, else the draws of the three were not compared.
    kept = one.apply(one.place(variables), x)
    assert abs(float(bce(kept, targets) - loss)) > 1e-4
