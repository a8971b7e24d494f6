"""Loss functions as users write them, with parameters and a batch."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

import jpipe

from .. import reference as ref

RNG = np.random.default_rng(0)
X, TARGETS = RNG.normal(size=(10, 6)), RNG.normal(size=(10, 3))
TOKENS = RNG.integers(0, 11, (10, 8), np.int32)
WIDE = {"dtype": jnp.float64, "param_dtype": jnp.float64}
TEACHER = RNG.normal(size=(6, 3))


class Transformer(nn.Module):
    """Tied embedding, mask, table of positions, a long skip."""

    @nn.compact
    def __call__(self, tokens):
        embed = nn.Embed(11, 8, **WIDE)
        positions = self.param("positions", nn.initializers.normal(), (8, 8), float)
        mask = nn.make_causal_mask(tokens) * nn.make_attention_mask(
            tokens > 0, tokens > 0
        )
        first = x = embed(tokens) + positions
        for _ in range(4):
            h = nn.LayerNorm(**WIDE)(x)
            x = x + nn.MultiHeadDotProductAttention(2, **WIDE)(h, mask=mask)
            h = nn.gelu(nn.Dense(16, **WIDE)(nn.LayerNorm(**WIDE)(x)))
            x = x + nn.Dense(8, **WIDE)(h)
        return embed.attend(x + 0.1 * first)


class Repeated(nn.Module):
    """One block six times, as of ALBERT."""

    @nn.compact
    def __call__(self, x):
        block = nn.Dense(6, **WIDE)
        for _ in range(6):
            x = x + jnp.tanh(block(x))
        return nn.Dense(3, **WIDE)(x)


def tokens_loss(model):
    def loss(params, tokens):
        logits = model.apply(params, tokens)
        targets = jax.nn.one_hot(jnp.roll(tokens, -1, 1), 11, dtype=logits.dtype)
        return -(targets * jax.nn.log_softmax(logits)).sum(-1).mean()

    return loss


def matrices(*widths):
    shapes = itertools.pairwise(widths)
    return [RNG.normal(size=shape) / 3 for shape in shapes]


def perceptron(params, x):
    for w in params:
        x = jnp.tanh(x @ w)
    return x


def squares(y, targets):
    return jnp.mean((y - targets) ** 2)


def plain(params, x, targets):
    return squares(perceptron(params, x), targets)


def penalized(params, x, targets):
    penalty = sum(jnp.sum(w**2) for w in params)
    return 0.5 * (plain(params, x, targets) + 0.1 * penalty) - 3.0


def low_rank(params, x, targets):
    base, *adapters = params
    whole = [w + a @ b for w, (a, b) in zip(base, adapters, strict=True)]
    return plain(whole, x, targets)


def by_global_norm(params, x, targets):
    return plain(params, x / optax.tree.norm(params), targets)


def distilled(params, x, targets):
    y = perceptron(params, x)
    return squares(y, targets) + squares(y, jnp.asarray(TEACHER)[None].sum(1))


def marked(params, x, targets):
    for w in params[:2]:
        x = jnp.tanh(x @ w)
    x = jpipe.boundary(x)
    return squares(perceptron(params[2:], x), targets)


def skipping(params, x, targets):
    first = x @ params[0]
    return squares(perceptron(params[1:], first) + first[:, :3], targets)


def read_twice(params, x, targets):
    """What the first stage makes, both others read."""
    memory = jpipe.boundary(jnp.tanh(x @ params[0]))
    h = jpipe.boundary(jnp.tanh(memory @ params[1]))
    memory, h = jpipe.boundary((memory, h))  # the same place: nothing is between
    return squares((h * memory) @ params[2], targets)


def late(params, x, targets):
    """What the last stage reads is computed first."""
    second = targets @ params["second"]
    return squares(perceptron(params["first"], x) + jnp.sin(second), targets)


def flax(module, x):
    params = module.init(jax.random.key(0), x)
    return jax.tree.map(np.asarray, params)


# The function, its parameters, the batch, and how many stages.
PROGRAMS = {
    "transformer": lambda: (
        tokens_loss(Transformer()),
        flax(Transformer(), TOKENS),
        (TOKENS,),
        4,
    ),
    "one block six times": lambda: (
        lambda p, x, t: squares(Repeated().apply(p, x), t),
        flax(Repeated(), X),
        (X, TARGETS),
        3,
    ),
    "one checkpoint": lambda: (
        jax.checkpoint(lambda p, x, t: squares(nn.remat(Repeated)().apply(p, x), t)),
        flax(Repeated(), X),
        (X, TARGETS),
        3,
    ),
    "checkpoints and jits inside of each other": lambda: (
        jax.checkpoint(jax.jit(jax.checkpoint(jax.jit(plain)))),
        matrices(6, 8, 8, 3),
        (X, TARGETS),
        3,
    ),
    "nn.remat(nn.jit(module))": lambda: (
        lambda p, x, t: squares(nn.remat(nn.jit(Repeated))().apply(p, x), t),
        flax(Repeated(), X),
        (X, TARGETS),
        3,
    ),
    "a mark in a checkpoint": lambda: (
        jax.checkpoint(marked),
        matrices(6, 8, 8, 3),
        (X, TARGETS),
        None,
    ),
    "penalty": lambda: (penalized, matrices(6, 8, 8, 3), (X, TARGETS), 3),
    "low rank": lambda: (
        low_rank,
        [
            matrices(6, 8, 3),
            (RNG.normal(size=(6, 2)), RNG.normal(size=(2, 8))),
            (RNG.normal(size=(8, 2)), RNG.normal(size=(2, 3))),
        ],
        (X, TARGETS),
        2,
    ),
    "global norm": lambda: (by_global_norm, matrices(6, 8, 8, 3), (X, TARGETS), 2),
    "closed over": lambda: (distilled, matrices(6, 8, 3), (X, TARGETS), 2),
    "marked": lambda: (marked, matrices(6, 4, 9, 8, 3), (X, TARGETS), None),
    "skip": lambda: (skipping, matrices(6, 8, 8, 8, 3), (X, TARGETS), 4),
    "read twice": lambda: (read_twice, matrices(6, 8, 8, 3), (X, TARGETS), 3),
    "late": lambda: (
        late,
        {"first": matrices(6, 8, 8, 3), "second": RNG.normal(size=(3, 3))},
        (X, TARGETS),
        3,
    ),
    "inner jit": lambda: (jax.jit(plain), matrices(6, 8, 3), (X, TARGETS), 2),
}


def run(grad_fn, params, *args):
    """What a gradient gives twice alike, each leaf where its parameter is."""
    placed = grad_fn.place(params, *args)
    found = grad_fn(placed, *args)
    ref.assert_equal(grad_fn(placed, *args), found)
    for leaf, grad in zip(
        jax.tree.leaves(placed), jax.tree.leaves(found[1]), strict=True
    ):
        assert leaf.devices() == grad.devices()
    return found
