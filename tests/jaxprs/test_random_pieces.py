"""A computation on arrays in pieces is the one on whole arrays: random programs.

They are drawn operation by operation, on a stack whose layers are along any axis.
No operation knows of pieces. What the rewritten program computes is compared with
plain evaluation: only sums over layers are added in another order.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, strategies

from jpipe._jaxprs._pieces import Pieces

from .in_pieces import assert_equal_grads, assert_equal_results, partitions


def scan(draw: Any, x: jax.Array) -> jax.Array:
    """A scan over the first axis; its carry may be a literal, or a constant as well."""
    row = jnp.cos(jnp.arange(math.prod(x.shape[1:]), dtype=x.dtype)).reshape(
        x.shape[1:]
    )
    init = draw(strategies.sampled_from(["literal", "row", "first"]))
    carry = {"literal": 0.5, "row": row, "first": x[0]}[init]
    is_doubled = draw(strategies.booleans())

    def body(carry: Any, xs: Any) -> Any:
        a, b, i = xs
        new_carry = jnp.tanh(jnp.mean(carry + a) + row * 0.1 + b)
        if init == "literal":
            new_carry = new_carry.mean()
        return new_carry, (new_carry * i, a + row)

    last, (ys, zs) = jax.lax.scan(
        body,
        carry,
        (x, x if is_doubled else jnp.sin(x), jnp.arange(x.shape[0], dtype=x.dtype)),
        reverse=draw(strategies.booleans()),
        unroll=draw(strategies.sampled_from([1, 2])),
    )
    ys = ys.reshape(ys.shape + (1,) * (x.ndim - ys.ndim))
    return zs + ys + last


def transpose(draw: Any, x: jax.Array) -> jax.Array:
    return x.transpose(draw(strategies.permutations(range(x.ndim))))


def reduce(draw: Any, x: jax.Array) -> jax.Array:
    axis = draw(strategies.integers(0, x.ndim - 1))
    reduction = draw(strategies.sampled_from([jnp.sum, jnp.mean, jnp.max, jnp.min]))
    return x - reduction(x, axis=axis, keepdims=True)


def arg_extreme(draw: Any, x: jax.Array) -> jax.Array:
    axis = draw(strategies.integers(0, x.ndim - 1))
    return x + jnp.expand_dims(jnp.argmax(x, axis), axis).astype(x.dtype)


def accumulate(draw: Any, x: jax.Array) -> jax.Array:
    axis = draw(strategies.integers(0, x.ndim - 1))
    operation = draw(strategies.sampled_from([jnp.cumsum, jnp.sort]))
    return operation(x, axis=axis)


def join_or_divide_axes(draw: Any, x: jax.Array) -> jax.Array:
    shapes = [(x.size,), (*x.shape, 1), (1, *x.shape)]
    if x.ndim > 1:
        shapes += [(x.shape[0] * x.shape[1], *x.shape[2:])]
    if x.shape[0] % 2 == 0:
        shapes += [
            (2, x.shape[0] // 2, *x.shape[1:]),
            (x.shape[0] // 2, 2, *x.shape[1:]),
        ]
    return x.reshape(draw(strategies.sampled_from(shapes)))


def broadcast(draw: Any, x: jax.Array) -> jax.Array:
    axis = draw(strategies.integers(0, x.ndim))
    expanded = jnp.expand_dims(x, axis)
    shape = list(expanded.shape)
    shape[axis] = 2
    return jnp.broadcast_to(expanded, shape).sum(axis) + expanded.squeeze(axis)


def take(draw: Any, x: jax.Array) -> jax.Array:
    """Slices along an axis: one row, several, or by a start that is an array."""
    axis = draw(strategies.integers(0, x.ndim - 1))
    length = x.shape[axis]
    begin = draw(strategies.integers(0, length - 1))
    end = draw(strategies.integers(begin + 1, length))
    step = draw(strategies.sampled_from([1, 2]))
    rows = jax.lax.slice_in_dim(x, begin, end, step, axis)
    if draw(strategies.booleans()):
        rows = jax.lax.dynamic_slice_in_dim(x, begin, end - begin, axis)
    return x * rows.mean() + rows.sum(axis, keepdims=True)


def index_by_data(draw: Any, x: jax.Array) -> jax.Array:
    index = jnp.argmax(x.reshape(-1)) % x.shape[0]
    return x + jax.lax.dynamic_index_in_dim(x, index, 0)


def join_arrays(draw: Any, x: jax.Array) -> jax.Array:
    axis = draw(strategies.integers(0, x.ndim - 1))
    length = x.shape[axis]
    joined = jnp.concatenate([x, jnp.cos(x)], axis)
    return jax.lax.slice_in_dim(joined, 1, length + 1, axis=axis)


def divide(draw: Any, x: jax.Array) -> jax.Array:
    axis = draw(strategies.integers(0, x.ndim - 1))
    if draw(strategies.booleans()):
        first, *others = jnp.unstack(x, axis=axis)
        return (
            jnp.expand_dims(first, axis) - x * sum(others, jnp.zeros_like(first)).sum()
        )
    first, second = jnp.split(x, [x.shape[axis] // 2], axis)
    return x * (1 + first.sum()) - second.mean()


def multiply_matrices(draw: Any, x: jax.Array) -> jax.Array:
    flat = x.reshape(x.shape[0], -1)
    if draw(strategies.booleans()):
        product = jnp.einsum("li,lj->lij", flat, flat).mean(2)  # the layers as a batch
    elif draw(strategies.booleans()):
        product = flat @ jnp.cos(flat.T @ flat)  # a sum over the layers
    else:
        weights = jnp.sin(jnp.arange(flat.shape[1] ** 2, dtype=x.dtype))
        product = flat @ weights.reshape(flat.shape[1], -1)
    return product.reshape(x.shape)


def elementwise(draw: Any, x: jax.Array) -> jax.Array:
    choice = draw(strategies.integers(0, 4))
    if choice == 0:
        return x * x
    if choice == 1:
        return jnp.where(x > 0.3, 0.5, x)
    if choice == 2:
        return x.astype(jnp.float32).astype(x.dtype) + 1
    if choice == 3:
        return jnp.clip(x, -0.7, 0.7)
    return jnp.sin(x) / 2


def branch(draw: Any, x: jax.Array) -> jax.Array:
    """Branches some of which keep the layers apart, one of a constant."""
    axis = draw(strategies.integers(0, x.ndim - 1))
    branches = [
        lambda x: (x * 2, x.sum(axis, keepdims=True) * jnp.ones_like(x)),
        lambda x: (jnp.zeros_like(x), jnp.cos(x)),
        lambda x: (x - x.mean(), jnp.cumsum(x, axis)),
    ]
    chosen = draw(strategies.lists(strategies.sampled_from(branches), min_size=1))
    index = jnp.argmax(x.reshape(-1)) % len(chosen)
    first, second = jax.lax.switch(index, chosen, x)
    return jnp.sin(first + second)


def loop(draw: Any, x: jax.Array) -> jax.Array:
    """A loop that carries the stack, a counter and sums; it goes along an axis."""
    axis = draw(strategies.integers(0, x.ndim - 1))
    mixes_layers = draw(strategies.booleans())

    def step(carry: Any, row: jax.Array) -> Any:
        count, y, total = carry
        y = jnp.cos(y + x * count)
        if mixes_layers:
            y = y - y.mean(axis, keepdims=True)
        return (count + 1, y, total + y), (row + count, y.sum(axis))

    init = 0, x, jnp.zeros_like(x)
    (count, y, total), (rows, sums) = jax.lax.scan(
        step, init, jnp.moveaxis(x, axis, 0), reverse=draw(strategies.booleans())
    )
    return y * count + total / 4 + jnp.moveaxis(rows, 0, axis) + sums.mean()


def checkpoint(draw: Any, x: jax.Array) -> jax.Array:
    axis = draw(strategies.integers(0, x.ndim - 1))
    return jax.checkpoint(lambda x: jnp.sin(x) - x.max(axis, keepdims=True))(x)


def reorder(draw: Any, x: jax.Array) -> jax.Array:
    """Axes are turned around, shifted, padded, or sorted beside another array."""
    axis = draw(strategies.integers(0, x.ndim - 1))
    choice = draw(strategies.integers(0, 4))
    if choice == 0:
        return jnp.flip(x, axis)
    if choice == 1:
        return jnp.roll(x, 1, axis)
    if choice == 2:
        padding = [(0, 0)] * x.ndim
        padding[axis] = (1, 0)
        return jax.lax.slice_in_dim(jnp.pad(x, padding), 0, x.shape[axis], axis=axis)
    if choice == 3:
        keys, values = jax.lax.sort((x, jnp.cos(x)), dimension=axis, num_keys=1)
        return keys - values
    return jax.lax.optimization_barrier((x, 0.5, jnp.sin(x)))[2]


def index(draw: Any, x: jax.Array) -> jax.Array:
    """Rows along an axis, by indices: read, set, or other ones for each element."""
    axis = draw(strategies.integers(0, x.ndim - 1))
    length = x.shape[axis]
    rows = draw(strategies.lists(strategies.integers(0, length - 1), min_size=1))
    indices = jnp.array(rows)
    choice = draw(strategies.integers(0, 3))
    if choice == 0:
        return x * jnp.take(x, rows[0], axis=axis, mode="clip").mean()
    if choice == 1:
        return x + jnp.take(x, indices, axis=axis).sum(axis, keepdims=True)
    if choice == 2:
        moved = jnp.moveaxis(x, axis, 0)
        return jnp.moveaxis(moved.at[indices].add(moved[indices] * 2), 0, axis)
    return jnp.take_along_axis(x, jnp.argsort(x, axis), axis)


def join_parts(draw: Any, x: jax.Array) -> jax.Array:
    """Parts along an axis, computed apart, in their order or in another one."""
    axis = draw(strategies.integers(0, x.ndim - 1))
    end = draw(strategies.integers(0, x.shape[axis]))
    first, second = jnp.split(x, [end], axis)
    parts = [2 * first, jnp.sin(second)]
    order = draw(strategies.permutations([0, 1]))
    return jnp.concatenate([parts[i] for i in order], axis)


def compute_on_matrices(draw: Any, x: jax.Array) -> jax.Array:
    """Of the last two axes, which may be those of the layers."""
    if x.ndim < 2:
        return x
    square = x @ x.mT + jnp.eye(x.shape[-2])
    choice = draw(strategies.integers(0, 2))
    if choice == 0:
        return jnp.linalg.inv(square) @ x
    if choice == 1:
        return jnp.linalg.cholesky(square) @ x
    return jnp.linalg.qr(square)[0] @ x


@jax.custom_vjp
def other_gradient(x: jax.Array, scale: float) -> jax.Array:
    return jnp.sin(x) * scale


other_gradient.defvjp(
    lambda x, scale: (other_gradient(x, scale), jnp.cos(x)),
    lambda cos, g: (3 * cos * g, None),
)


@jax.custom_jvp
def centred(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    mean = x.mean(-1, keepdims=True)
    return x - mean, mean


@centred.defjvp
def _centred_jvp(primals: Any, tangents: Any) -> Any:
    (x,) = primals
    (dx,) = tangents
    return centred(x), (2 * dx, dx.sum(-1, keepdims=True))


def custom_rule(draw: Any, x: jax.Array) -> jax.Array:
    """Rules that are no derivatives, of each element, or of each row."""
    choice = draw(strategies.integers(0, 4))
    if choice == 0:
        return jax.nn.softplus(x) - jax.nn.relu(x)
    if choice == 1:
        return jnp.logaddexp(x, jnp.cos(x))
    if choice == 2:
        return other_gradient(x, 0.5)
    if choice == 3:
        axis = draw(strategies.integers(0, x.ndim - 1))
        differences, means = centred(jnp.moveaxis(x, axis, -1))
        return jnp.moveaxis(differences + jnp.sin(means), -1, axis)
    return jnp.logaddexp(x, jnp.sum(x) / x.size)


OPERATIONS = [
    accumulate,
    arg_extreme,
    branch,
    broadcast,
    checkpoint,
    compute_on_matrices,
    custom_rule,
    divide,
    elementwise,
    index,
    index_by_data,
    join_arrays,
    join_parts,
    join_or_divide_axes,
    loop,
    multiply_matrices,
    reduce,
    reorder,
    scan,
    take,
    transpose,
]


def draw_function(
    draw: Any, operations: list[Any]
) -> Callable[[jax.Array, jax.Array], Any]:
    """Draws a program ``(x, y) -> results``, the same in each trace of it."""
    choices = list[Any]()

    def function(x: jax.Array, y: jax.Array) -> Any:
        remaining = iter(list(choices))

        def choose(strategy: Any) -> Any:
            if (choice := next(remaining, None)) is None:
                choice = draw(strategy)
                choices.append(choice)
            return choice

        z = x + y * 0.5
        results = [z]
        for operation in operations:
            z = operation(choose, z)
            results.append(z)
        return results, z.sum()

    return function


def draw_pieces(draw: Any) -> tuple[list[np.ndarray], dict[int, Pieces]]:
    """Draws two stacks whose layers are along any axis, and pieces of each."""
    length = draw(strategies.integers(2, 6), label="layers")
    axis = draw(strategies.integers(0, 2), label="axis")
    shape = (2, 3)
    shape = (*shape[:axis], length, *shape[axis:])
    pieces = {
        0: draw(partitions(length, axis), label="pieces of the first"),
        1: draw(partitions(length, axis), label="pieces of the second"),
    }
    return [*np.random.default_rng(0).normal(size=(2, *shape))], pieces


def draw_operations(draw: Any, among: list[Any]) -> list[Any]:
    lists = strategies.lists(strategies.sampled_from(among), min_size=1, max_size=5)
    return draw(lists)


@given(data=strategies.data())
def test_random_programs_in_pieces(data: Any) -> None:
    args, input_pieces = draw_pieces(data.draw)
    operations = draw_operations(data.draw, OPERATIONS)
    with jax.enable_x64(True):
        function = draw_function(data.draw, operations)
        assert_equal_results(function, [*args], input_pieces)


@given(data=strategies.data())
def test_gradients_of_random_programs_in_pieces(data: Any) -> None:
    """Those of plain JAX: also where rules that are no derivatives give them."""
    args, input_pieces = draw_pieces(data.draw)
    others = [compute_on_matrices, elementwise, index, join_parts, scan, transpose]
    operations = [custom_rule, *draw_operations(data.draw, [custom_rule, *others])]
    with jax.enable_x64(True):
        function = draw_function(data.draw, operations)
        assert_equal_grads(function, [*args], input_pieces)
