"""Convolutional models: how they are walked, and what they compute, by hand."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jpipe
from benchmarks.models.amoebanet import amoebanetd
from jpipe._layers import _layer, _stage, _walk
from jpipe._run import _variables

from .. import reference as ref

# Double precision (2e-16) through fifty convolutions and norms of few examples.
DOUBLE = 1e-10


def walk(layers, balance=None, size=224, dtype=jnp.float32):
    """What jpipe meets at each layer, and the routes of the skip connections."""
    stages = _stage.fuse(_layer.as_layers(layers), balance or [len(layers)])
    spec = jax.ShapeDtypeStruct((2, size, size, 3), dtype)
    return _walk.walk(stages, jax.random.key(0), spec)


def elements(tree):
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))


def counts(visits, collection):
    return [elements(visit.variables.get(collection, {})) for visit in visits]


def per_stage(numbers, balance):
    """Sums of so many neighbours each."""
    assert sum(balance) == len(numbers)
    ends = np.cumsum(balance)
    return [sum(numbers[e - n : e]) for e, n in zip(ends, balance, strict=True)]


def windows(x, size, strides=(1, 1), padding=(0, 0), fill=0.0):
    """For each offset in a window, what is there in all windows."""
    (above, left), (rows, columns) = padding, x.shape[1:3]
    batch, features = x.shape[0], x.shape[3]
    padded = np.full((batch, rows + 2 * above, columns + 2 * left, features), fill)
    padded[:, above : above + rows, left : left + columns] = x
    down = (padded.shape[1] - size[0]) // strides[0] + 1
    across = (padded.shape[2] - size[1]) // strides[1] + 1
    return {
        (i, j): padded[:, i:, j:][:, :: strides[0], :: strides[1]][:, :down, :across]
        for i, j in np.ndindex(*size)
    }


def conv(x, kernel, strides=(1, 1), padding=(0, 0)):
    parts = windows(x, kernel.shape[:2], strides, padding)
    return sum(part @ kernel[at] for at, part in parts.items())


def largest(x, size, stride, padding):
    parts = windows(x, (size, size), (stride,) * 2, (padding,) * 2, -np.inf)
    return np.max(list(parts.values()), axis=0)


def mean_inside(x, stride):
    """Of 3 x 3, of what is not padding."""
    sums = sum(windows(x, (3, 3), (stride,) * 2, (1, 1)).values())
    ones = np.ones_like(x)
    return sums / sum(windows(ones, (3, 3), (stride,) * 2, (1, 1)).values())


def relu(x):
    return np.maximum(x, 0)


def norm(x, params, stats, train):
    mean, var = stats["mean"], stats["var"]
    if train:
        mean, var = x.mean((0, 1, 2)), x.var((0, 1, 2))
    return (x - mean) / np.sqrt(var + 1e-5) * params["scale"] + params["bias"]


def random_variables(layers, size):
    """Every leaf drawn anew, in double precision; running variances above zero."""
    rng = np.random.default_rng(0)

    def draw(path, leaf):
        values = rng.standard_normal(leaf.shape)
        if path[-1].key == "var":
            return 0.5 + np.abs(values)
        if path[-1].key in (
            "scale",
            "bias",
        ):  # near those at the start: no dead channels
            return (path[-1].key == "scale") + values / 4
        return values / math.sqrt(max(math.prod(leaf.shape[:-1]), 1))

    visits, _ = walk(layers, size=size, dtype=jnp.float64)
    specs = tuple(visit.variables for visit in visits)
    return jax.tree_util.tree_map_with_path(draw, specs)


def check_evaluation(layers, by_hand, size):
    """Against by hand, on one device."""
    variables, x, _ = example(layers, size)
    one = jpipe.sequential(layers)
    y = one.apply(one.place(variables), x)
    assert y.dtype == jnp.float64
    ref.assert_close(y, by_hand(variables, x, False), DOUBLE)


def check_step(layers, by_hand, size, balance, num_microbatches):
    """A step in stages against the same on one device, whose outputs are by hand."""
    variables, x, targets = example(layers, size)
    params = _variables.params(variables)
    tx = optax.sgd(1.0)
    state = jpipe.TrainState(
        step=jnp.int32(0),
        params=params,
        opt_state=tx.init(params),
        model_state=_variables.model_state(variables),
        rng=jax.random.key(0),
    )

    def loss_fn(y, t):
        return ref.mse(y, t), y

    def gradients(pipe):
        step = pipe.train_step(loss_fn, tx, has_aux=True, donate=False)
        after, metrics = step(pipe.place(state), x, targets)
        change = jax.tree.map(np.subtract, params, ref.on_host(after.params))
        return change, after.model_state, metrics

    one = gradients(jpipe.sequential(layers, num_microbatches))
    pipe = jpipe.pipeline(layers, num_microbatches, balance=balance, remat="none")
    several = gradients(pipe)
    ref.assert_close(several, one, DOUBLE)
    assert all(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(one[0]))
    # Batch norm normalizes each micro-batch by itself.
    parts = [by_hand(variables, p, True) for p in np.split(x, num_microbatches)]
    ref.assert_close(one[2]["aux"], np.stack(parts), DOUBLE)


def example(layers, size):
    """Variables, images and targets."""
    rng = np.random.default_rng(1)
    x = rng.standard_normal((4, size, size, 3))
    return random_variables(layers, size), x, rng.standard_normal((4, 5))


def part_of_amoebanet(*numbers, **options):
    """Some of the layers, and the last: what is compiled in seconds."""
    layers = amoebanetd(5, 6, 8, **options)
    return [*(layers[number] for number in numbers), layers[-1]]
