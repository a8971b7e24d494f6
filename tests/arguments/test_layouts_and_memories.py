"""Arrays of another layout, memory or precision than JAX gives them by itself.

Results are those of plain JAX in float64.
"""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental.layout import Format, Layout

import jpipe

from .. import reference as ref
from ..listing import program_of

pytestmark = pytest.mark.usefixtures("double")

KEY = jax.random.key(0)
Space = jax.memory.Space
TX = optax.adam(1e-2)
MESH_SHAPE = (2, 2)


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape)


X, TARGETS = normal(0, 8, 3), normal(1, 8, 3)
PARAMS = {"tied": normal(2, 3, 5), "last": normal(3, 3, 3)}


def loss_fn(params: Any, x: Any, targets: Any) -> jax.Array:
    """Both stages read one parameter."""
    h = jpipe.boundary(jnp.tanh(x @ params["tied"]))
    return jnp.mean((h @ params["tied"].T @ params["last"] - targets) ** 2)


def column_major(tree: Any) -> Any:
    """The tree, each matrix laid out as the transpose of an array of PyTorch."""

    def lay_out(leaf: Any) -> Any:
        leaf = jnp.asarray(leaf)
        if leaf.ndim != 2:
            return leaf
        return jax.device_put(leaf, Format(Layout((1, 0)), leaf.sharding))

    laid_out = jax.tree.map(lay_out, tree)
    assert (1, 0) in orders(laid_out)
    return laid_out


def orders(tree: Any) -> set[tuple[int, ...]]:
    """The orders of axes in memory of all leaves."""
    return {leaf.format.layout.major_to_minor for leaf in jax.tree.leaves(tree)}


def layers() -> list[Any]:
    return [ref.dense(5, float), jnp.tanh, ref.dense(3, float)]


# ----------------------------------------------------------------------------- layouts


@pytest.mark.parametrize("has_mesh", [False, True])
@pytest.mark.parametrize("debugs", [False, True])
def test_column_major_arrays_have_the_gradients_of_plain_jax(
    has_mesh: bool, debugs: bool
) -> None:
    """Compiled ahead or not, the batch, and parameters that are placed or moved."""
    options: dict[str, Any] = {"devices": jax.devices()[:2]}
    if has_mesh:
        options = {"mesh": jax.make_mesh(MESH_SHAPE, ("stage", "data"))}
    grad_fn = jpipe.value_and_grad(loss_fn, 2, **options)
    expected = jax.value_and_grad(loss_fn)(PARAMS, X, TARGETS)
    batch = column_major((X, TARGETS))
    with jax.debug_nans(debugs):
        placed = grad_fn.place(column_major(PARAMS), *batch)
        assert orders(placed) == {(0, 1)}
        ref.assert_close(grad_fn(placed, *batch), expected, ref.FLOAT64)
        in_place = column_major(placed)
        ref.assert_close(grad_fn(in_place, *batch), expected, ref.FLOAT64)


@pytest.mark.parametrize("donated", [(), (0,)])
def test_functions_of_column_major_arrays_give_what_jax_gives(donated: Any) -> None:
    grad_fn = jpipe.value_and_grad(loss_fn, 2, devices=jax.devices()[:2])
    params = grad_fn.place(PARAMS, X, TARGETS)

    def function(params: Any) -> Any:
        return {**params, "product": params["last"] @ params["tied"]}

    jitted = grad_fn.jit(function, donate_argnums=donated)
    actual = jitted(column_major(params))
    ref.assert_close(actual, jax.jit(function)(PARAMS), ref.FLOAT64)


def test_a_column_major_state_trains_as_any_other() -> None:
    pipe = jpipe.pipeline(layers(), 2, balance=[2, 1])
    state = pipe.init_train_state(KEY, X, TX)
    step = pipe.train_step(ref.mse, TX)
    expected = pipe.init_train_state(KEY, X, TX)
    ref.assert_equal(
        pipe.apply(column_major(state.variables), column_major(X)),
        pipe.apply(state.variables, X),
    )
    state = state.replace(
        params=column_major(state.params), opt_state=column_major(state.opt_state)
    )
    for _ in range(2):
        state, _ = step(state, *column_major((X, TARGETS)))
        expected, _ = step(expected, X, TARGETS)
    ref.assert_equal(state, expected)


# ---------------------------------------------------------------------------- memories


def in_host_memory(tx: optax.GradientTransformation) -> optax.GradientTransformation:
    """An optimizer whose state is in the memory of the host between steps."""

    def init(params: Any) -> Any:
        return jax.device_put(tx.init(params), Space.Host)

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        state = jax.device_put(state, Space.Device)
        updates, state = tx.update(updates, state, params)
        return updates, jax.device_put(state, Space.Host)

    return optax.GradientTransformation(init, update)


def memories(tree: Any) -> set[str]:
    """The memories in which the leaves are, and those of their pieces."""
    kinds: set[str] = set()
    for leaf in jax.tree.leaves(tree):
        arrays = leaf.arrays if isinstance(leaf, jpipe.Stacked) else [leaf]
        kinds |= {array.sharding.memory_kind for array in arrays}
    return kinds


HOST, DEVICE = {"pinned_host"}, {"device"}


@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("has_mesh", [False, True])
def test_optimizer_state_in_host_memory_trains_and_stays_there(
    donate: bool, has_mesh: bool
) -> None:
    options: dict[str, Any] = {"balance": [2, 1]}
    if has_mesh:
        options["mesh"] = jax.make_mesh(MESH_SHAPE, ("stage", "data"))
    pipe = jpipe.pipeline(layers(), 2, **options)
    one = jpipe.sequential(layers(), 4)
    tx = in_host_memory(TX)
    state = pipe.init_train_state(KEY, X, tx)
    step = pipe.train_step(ref.mse, tx, donate=donate)
    expected = one.init_train_state(KEY, X, TX)
    for _ in range(3):
        assert memories(state.opt_state) == HOST
        assert memories(state.params) == DEVICE
        state, _ = step(state, X, TARGETS)
        expected, _ = one.train_step(ref.mse, TX)(expected, X, TARGETS)
    ref.assert_close(state, expected, ref.FLOAT64)
    for placed in (pipe.place(state), one.place(state)):
        assert memories(placed.opt_state) == HOST
        ref.assert_equal(placed, state)


def test_optimizer_state_that_was_restored_to_devices_goes_to_the_host_again() -> None:
    pipe = jpipe.pipeline(layers(), 2, balance=[2, 1])
    tx = in_host_memory(TX)
    step = pipe.train_step(ref.mse, tx, donate=False)
    state, _ = step(pipe.init_train_state(KEY, X, tx), X, TARGETS)
    expected, _ = step(state, X, TARGETS)
    restored = state.replace(opt_state=jax.device_get(state.opt_state))
    placed = pipe.place(restored)
    assert memories(placed.opt_state) == DEVICE
    state, _ = step(placed, X, TARGETS)
    assert memories(state.opt_state) == HOST
    ref.assert_equal(state, expected)


def test_a_loop_of_ones_own_keeps_optimizer_state_in_host_memory() -> None:
    pipe = jpipe.pipeline(layers(), 2, balance=[2, 1])
    variables = pipe.init(KEY, X)
    _, grads = pipe.value_and_grad(ref.mse)(variables, X, TARGETS)
    params = tuple(entry.get("params", {}) for entry in variables)
    optimizer = pipe.optimizer(in_host_memory(TX))
    host_grads, host_params = jax.device_get((grads, params))
    state, expected_state = optimizer.init(params), TX.init(host_params)
    for _ in range(2):
        assert memories(state) == HOST
        updates, state = optimizer.update(grads, state, params)
        expected, expected_state = TX.update(host_grads, expected_state, host_params)
        ref.assert_close((updates, state), (expected, expected_state), ref.FLOAT64)


def test_functions_take_arrays_in_host_memory() -> None:
    pipe = jpipe.pipeline(layers(), 2, balance=[2, 1])
    variables = pipe.init(KEY, X)
    on_host = jax.device_put(variables, Space.Host)

    def double(tree: Any) -> Any:
        return jax.tree.map(lambda leaf: 2 * jax.device_put(leaf, Space.Device), tree)

    doubled = pipe.jit(double)(on_host)
    assert memories(doubled) == DEVICE
    ref.assert_equal(doubled, double(ref.on_host(variables)))
    copied = pipe.jit(lambda tree: tree)(on_host)
    assert memories(copied) == HOST
    ref.assert_equal(copied, variables)


def test_batch_and_parameters_in_host_memory_go_to_their_devices() -> None:
    pipe = jpipe.pipeline(layers(), 2, balance=[2, 1])
    variables = pipe.init(KEY, X)
    gradient = pipe.value_and_grad(ref.mse)
    expected = gradient(variables, X, TARGETS)
    on_host = jax.device_put((variables, X, TARGETS), Space.Host)
    with pytest.raises(ValueError, match=r"in the memory of the host \(pinned_host\)"):
        gradient(*on_host)
    placed = pipe.place(on_host[0])
    assert memories(placed) == DEVICE
    ref.assert_equal(gradient(placed, *on_host[1:]), expected)


def test_a_put_of_a_tree_moves_no_leaf_to_another_stage() -> None:
    """In a jaxpr it is one equation of leaves of all stages."""
    pipe = jpipe.pipeline(layers(), 2, balance=[2, 1])

    def moves(tx: optax.GradientTransformation) -> list[Any]:
        state = pipe.init_train_state(KEY, X, tx)
        program = program_of(pipe.train_step(ref.mse, tx), state, X, TARGETS)
        moved = [x for x in program.instructions if x.is_move]
        return [(str(x.label), x.source, x.place, len(x.reads)) for x in moved]

    assert moves(in_host_memory(TX)) == moves(TX)


# -------------------------------------------------------------------- explicit dtypes


@pytest.fixture
def explicit(double: None) -> Iterator[None]:
    """64 bits only for arrays that are made with them."""
    config: Any = jax.config
    mode = config.jax_explicit_x64_dtypes.name.lower()
    jax.config.update("jax_explicit_x64_dtypes", "allow")
    with jax.enable_x64(False):
        yield
    jax.config.update("jax_explicit_x64_dtypes", mode)


@pytest.mark.usefixtures("explicit")
@pytest.mark.parametrize("has_mesh", [False, True])
def test_arrays_of_explicit_float64_stay_so(has_mesh: bool) -> None:
    """Here a stack of layers; whose pieces are uneven, or of several devices."""

    def loss_fn(params: Any, x: Any, targets: Any) -> jax.Array:
        def layer(h: jax.Array, weights: jax.Array) -> tuple[jax.Array, None]:
            return jnp.tanh(h @ weights), None

        return jnp.mean((jax.lax.scan(layer, x, params)[0] - targets) ** 2)

    def update(params: Any, grads: Any) -> Any:
        return params - grads

    options: dict[str, Any] = {"devices": jax.devices()[:2]}
    if has_mesh:
        options = {"mesh": jax.make_mesh(MESH_SHAPE, ("stage", "data"))}
    arrays = [normal(0, 4 if has_mesh else 5, 3, 3), X, TARGETS]
    params, *batch = [jnp.asarray(array, "float64") for array in arrays]
    grad_fn = jpipe.value_and_grad(loss_fn, 2, **options)
    expected_loss, expected = jax.jit(jax.value_and_grad(loss_fn))(params, *batch)
    placed = grad_fn.place(params, *batch)
    loss, grads = grad_fn(placed, *batch)
    assert isinstance(grads, jpipe.Stacked)
    ref.assert_close((loss, grads), (expected_loss, expected), ref.FLOAT64)
    updated = grad_fn.jit(update)(placed, grads)
    ref.assert_close(updated, update(params, expected), ref.FLOAT64)
    # Arrays of NumPy have 32 bits.
    loss, grads = grad_fn(grad_fn.place(arrays[0], *batch), *arrays[1:])
    assert loss.dtype == grads.dtype == jnp.float32
