"""The U-Net and the Transformers of the published tables: sizes, numbers, gradients."""

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
from benchmarks.models.transformer import transformer, transformer_l
from benchmarks.models.unet import convolution, unet
from jpipe._layers import _layer, _stage, _walk

from . import reference as ref

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
# Random numbers of this kind are compiled much sooner.
KEY = jax.random.key(0, impl="rbg")
IMAGES = jax.ShapeDtypeStruct((16, 192, 192, 3), jnp.float32)
TOKENS = jax.ShapeDtypeStruct((2, 8), jnp.int32)


def size(tree):
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))


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
    visits, routes = pipe._library.expected(IMAGES)
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


def drawn(layers, x, seed=0):
    """Random parameters in double precision, one entry per layer."""
    pipe = jpipe.sequential(layers)
    visits, _ = pipe._library.expected(jax.eval_shape(lambda: x))
    rng = np.random.default_rng(seed)
    return tuple(
        jax.tree.map(lambda s: rng.normal(size=s.shape) * 0.3, visit.variables)
        for visit in visits
    )


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


def step(pipe, variables, x, targets, loss_fn):
    """The loss of a step and the gradients that it followed."""
    params = tuple(entry.get("params", {}) for entry in variables)
    tx = optax.sgd(1.0)
    state = jpipe.TrainState(
        step=jnp.int32(0),
        params=params,
        opt_state=tx.init(params),
        model_state=({},) * len(params),
        rng=KEY,
    )
    after, metrics = pipe.train_step(loss_fn, tx)(pipe.place(state), x, targets)
    moved = jax.tree.map(np.subtract, params, ref.on_host(after.params))
    return ref.on_host(metrics["loss"]), moved


def routes_of(pipe, x):
    _, routes = pipe._library.expected(jax.eval_shape(lambda: x))
    return [(route.source, route.target) for route in routes]


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


# Huang et al. (2019), table 1: layers, millions of parameters, digits given.
TRANSFORMER_L = [
    (3, 282_182_912, "282.2M"),
    (13, 785_765_632, "785.8M"),
    (103, 5_318_010_112, "5.3B"),
    (415, 21_029_790_976, "21.0B"),
    (1663, 83_876_914_432, "83.9B"),
]
# Section 5: T(L, H, A).
TRANSFORMERS = [
    ((6, 8192, 16), 430_723_920, "0.4B"),
    ((24, 8192, 16), 1_261_933_392, "1.3B"),
    ((12, 16384, 32), 1_261_749_072, "1.3B"),
    ((32, 16384, 32), 3_108_574_032, "3B"),
    ((64, 16384, 32), 6_063_493_968, "6B"),
]


def rounded(number, like):
    """The number in as many digits as a published one."""
    unit = {"M": 1e6, "B": 1e9}[like[-1]]
    digits = len(like.partition(".")[2][:-1])
    return f"{number / unit:.{digits}f}{like[-1]}"


def sizes_of(layers, spec):
    visits, _ = jpipe.sequential(layers)._library.expected(spec)
    return [size(visit.variables) for visit in visits]


def test_transformer_l_has_the_published_parameters():
    embedding, *blocks, head = sizes_of(transformer_l(3), TOKENS)
    assert blocks == [50_358_272] * 3
    assert embedding + head == 131_108_096
    for layers, expected, published in TRANSFORMER_L:
        params = embedding + head + layers * blocks[0]
        assert params == expected
        assert rounded(params, published) == published
        assert len(transformer_l(layers)) == layers + 2


@pytest.mark.parametrize(("which", "expected", "published"), TRANSFORMERS)
def test_transformer_has_the_published_parameters(which, expected, published):
    number, *kind = which
    _, source, encoder, target, decoder, head = sizes_of(
        transformer(1, *kind), (TOKENS, TOKENS)
    )
    params = source + target + head + number * (encoder + decoder)
    assert params == expected
    assert rounded(params, published) == published
    assert len(transformer(*which)) == 2 * number + 4


@pytest.mark.parametrize("words", [46_176, 46_177, 56_272, 56_273])
def test_the_range_of_words_that_fits(words):
    """As `transformer` says: a word more has three rows of tables and a bias."""
    fits = [
        rounded(params + (words - 50_000) * (3 * 1024 + 1), published) == published
        for _, params, published in TRANSFORMERS
    ]
    assert all(fits) == (words in (46_177, 56_272))


def np_norm(p, x):
    mean, var = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
    return (x - mean) / np.sqrt(var + 1e-6) * p["scale"] + p["bias"]


def np_attention(p, x, memory, causal):
    """One head, example and query after the other."""
    heads, head_dim = p["query"]["bias"].shape
    out = np.tile(p["out"]["bias"], (*x.shape[:2], 1))
    for n, h in np.ndindex(len(x), heads):
        query = x[n] @ p["query"]["kernel"][:, h] + p["query"]["bias"][h]
        pair, bias = p["key_value"]["kernel"], p["key_value"]["bias"]
        key, value = (memory[n] @ pair[:, i, h] + bias[i, h] for i in (0, 1))
        for t, q in enumerate(query):
            seen = t + 1 if causal else len(key)
            weights = np.exp(key[:seen] @ q / math.sqrt(head_dim))
            read = weights / weights.sum() @ value[:seen]
            out[n, t] += read @ p["out"]["kernel"][h]
    return out


def np_dense(p, x):
    return x @ p["kernel"] + p["bias"]


def np_block(p, x, memory=None, causal=True):
    h = np_norm(p["LayerNorm_0"], x)
    x = x + np_attention(p["Attention_0"], h, h, causal)
    last = 1
    if memory is not None:
        h = np_norm(p["LayerNorm_1"], x)
        x = x + np_attention(p["Attention_1"], h, memory, False)
        last = 2
    h = np_dense(p["Dense_0"], np_norm(p[f"LayerNorm_{last}"], x))
    return x + np_dense(p["Dense_1"], np.maximum(h, 0))


def np_embedding(p, tokens):
    table = p["Embed_0"]["embedding"]
    width = table.shape[1]
    x = table[tokens] * math.sqrt(width)
    for t, i in np.ndindex(tokens.shape[1], width):
        angle = t / 10_000 ** ((i - i % 2) / width)
        x[:, t, i] += math.cos(angle) if i % 2 else math.sin(angle)
    return x


def np_head(p, x):
    return np_dense(p["Dense_0"], np_norm(p["LayerNorm_0"], x))


def np_decoder(params, tokens):
    first, *blocks, head = params
    x = np_embedding(first, tokens)
    for p in blocks:
        x = np_block(p, x)
    return np_head(head, x)


def np_transformer(params, source, target):
    number = (len(params) - 3) // 2
    x = np_embedding(params[0], source)
    for p in params[1 : number + 1]:
        x = np_block(p, x, causal=False)
    middle = params[number + 1]
    memory = np_norm(middle["LayerNorm_0"], x)
    y = np_embedding(middle["Embedding_0"], target)
    for p in params[number + 2 : -1]:
        y = np_block(p, y, memory)
    return np_head(params[-1], y)


def small_decoder(number=2):
    return transformer_l(number, width=8, hidden=12, heads=2, vocabulary=11)


def small_transformer(number=2):
    return transformer(number, 12, 2, width=8, head_dim=3, vocabulary=11)


def words(*lengths, batch=2):
    rng = np.random.default_rng(5)
    return tuple(rng.integers(0, 11, (batch, n), np.int32) for n in lengths)


def test_transformer_l_computes_what_is_described(double):
    (tokens,) = words(7)
    variables = drawn(small_decoder(), tokens)
    expected = np_decoder([v["params"] for v in variables], tokens)
    pipe = jpipe.sequential(small_decoder(), 2)
    y = pipe.apply(pipe.place(variables), tokens)
    ref.assert_close(y, expected, ref.FLOAT64)


def test_transformer_computes_what_is_described(double):
    pair = words(6, 5)
    variables = drawn(small_transformer(), pair)
    expected = np_transformer([v["params"] for v in variables[1:]], *pair)
    pipe = jpipe.sequential(small_transformer(), 2)
    y = pipe.apply(pipe.place(variables), pair)
    ref.assert_close(y, expected, ref.FLOAT64)


def cross_entropy(logits, targets):
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    return losses.mean()


@pytest.mark.parametrize(
    ("layers", "balance", "lengths", "routes"),
    [
        (small_decoder, [2, 1], [7], []),
        (small_transformer, [2, 2, 2], [6, 7], [(0, 1)]),
    ],
)
def test_transformers_take_a_step_in_stages(double, layers, balance, lengths, routes):
    pair, (targets,) = words(*lengths), words(7)
    x = pair if len(pair) > 1 else pair[0]
    batch = drawn(layers(1), x), x, targets, cross_entropy
    pipe = jpipe.pipeline(layers(1), 2, balance=balance)
    assert routes_of(pipe, x) == routes
    one = jpipe.sequential(layers(1), 2)
    ref.assert_close(step(pipe, *batch), step(one, *batch), ref.FLOAT64)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, None])
def test_the_dtype_is_that_of_the_arithmetic(dtype):
    expected = dtype or jnp.float32
    spec = (TOKENS, TOKENS)
    for layers, x in [
        (unet(2, 4, depth=1, dtype=dtype), IMAGES),
        (transformer(1, 8, 2, width=8, dtype=dtype), spec),
        (transformer_l(1, width=8, hidden=8, heads=2, dtype=dtype), TOKENS),
    ]:
        pipe = jpipe.sequential([*layers, lambda y: y])
        visits, _ = pipe._library.expected(x)
        assert visits[-1].x.dtype == expected
        leaves = jax.tree.leaves([visit.variables for visit in visits])
        assert {leaf.dtype for leaf in leaves} == {jnp.dtype(jnp.float32)}
