"""The Transformers of the published tables: sizes, numbers, gradients."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jpipe
from benchmarks.models.transformer import transformer, transformer_l
from benchmarks.models.unet import unet

from .. import reference as ref
from .random_steps import IMAGES, drawn, routes_of, size, step

TOKENS = jax.ShapeDtypeStruct((2, 8), jnp.int32)


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
    known = jpipe.sequential(layers)._cache
    visits, _ = known.expected(known.sample(spec))
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
        visits, _ = pipe._cache.expected(pipe._cache.sample(x))
        assert visits[-1].x.dtype == expected
        leaves = jax.tree.leaves([visit.variables for visit in visits])
        assert {leaf.dtype for leaf in leaves} == {jnp.dtype(jnp.float32)}
