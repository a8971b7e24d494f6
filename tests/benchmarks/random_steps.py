"""Random parameters of a list of layers, and a step from them."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jpipe

from .. import reference as ref

# Random numbers of this kind are compiled much sooner.
KEY = jax.random.key(0, impl="rbg")
IMAGES = jax.ShapeDtypeStruct((16, 192, 192, 3), jnp.float32)


def size(tree):
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))


def drawn(layers, x, seed=0):
    """Random parameters in double precision, one entry per layer."""
    pipe = jpipe.sequential(layers)
    visits, _ = pipe._cache.expected(pipe._cache.sample(jax.eval_shape(lambda: x)))
    rng = np.random.default_rng(seed)
    return tuple(
        jax.tree.map(lambda s: rng.normal(size=s.shape) * 0.3, visit.variables)
        for visit in visits
    )


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
    _, routes = pipe._cache.expected(pipe._cache.sample(jax.eval_shape(lambda: x)))
    return [(route.source, route.target) for route in routes]
