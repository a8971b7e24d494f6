"""Parameters over the devices of a stage: FSDP, tensor parallel, both; who says so."""

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen as nn
from flax import nnx
from jax.sharding import PartitionSpec as P

import jpipe

from .. import reference as ref
from .stages import batch, close, compare, dense, mesh, normed

pytestmark = pytest.mark.usefixtures("double")


INIT = nn.initializers.lecun_normal()
FACTORED = optax.adafactor(0.1, min_dim_size_to_factor=4)


def boxed(names, init=INIT, how=nn.with_partitioning):
    return how(init, names)


class Wide(nn.Module):
    """A block that is cut as Megatron cuts it."""

    how: object = nn.with_partitioning
    across: str = "model"

    @nn.compact
    def __call__(self, x):
        options = {"dtype": float, "param_dtype": float}
        first = boxed((None, self.across), how=self.how)
        bias = boxed((self.across,), nn.initializers.zeros, self.how)
        second = boxed((self.across, None), how=self.how)
        h = nn.Dense(16, kernel_init=first, bias_init=bias, **options)(x)
        return x + nn.Dense(x.shape[-1], kernel_init=second, **options)(jnp.tanh(h))


def wide(**options):
    return [dense(8), Wide(**options), Wide(**options), dense(4)]


def spec(leaf):
    return leaf.sharding.spec


def last_axis(path, leaf):
    """FSDP of what the devices divide."""
    even = leaf.shape[-1] % 2 == 0 and path[-1] == "kernel"
    return P(*[None] * (leaf.ndim - 1), "data") if even else None


def test_fully_sharded_training_is_that_of_one_device():
    options = {"sharding": last_axis, "mesh": mesh(2, 2)}
    pipe = jpipe.pipeline(normed(), 2, balance=[2, 2], **options)
    got = compare(normed, pipe, 4, *batch(16))
    kernel = got["state"].params[2]["kernel"]
    assert spec(kernel) == P(None, "data")
    assert spec(got["state"].opt_state[1][0].trace[2]["kernel"]) == P(None, "data")
    assert spec(got["state"].params[2]["bias"]) == P()
    assert kernel.addressable_shards[0].data.shape == (8, 4)
    assert "data 104" in str(pipe)  # of the kernels of the first stage


def test_tensor_parallel_boxes_train_with_an_optimizer_of_rows_and_columns():
    """On explicit axes, whose names are part of the types of arrays."""
    where = mesh(2, 1, 2, explicit=("stage", "data", "model"))
    pipe = jpipe.pipeline(wide(), 2, balance=[2, 2], mesh=where)
    got = compare(wide, pipe, 2, *batch(16), tx=FACTORED)
    kernel = got["state"].params[1]["Dense_0"]["kernel"]
    assert isinstance(kernel, nn.Partitioned)
    assert spec(kernel.value) == P(None, "model")


def test_a_custom_loop_trains_with_tensor_parallel_and_fsdp():
    """Functions of trees leave what they return as what they were given lies."""
    x, targets = batch(16)

    def rule(path, leaf):
        if path[1:2] == ("Dense_0",):
            return P("data", "model") if leaf.ndim == 2 else P("model")
        return None

    pipe = jpipe.pipeline(wide(), 2, balance=[2, 2], mesh=mesh(2, 2, 2), sharding=rule)
    one = jpipe.sequential(wide(), 4)
    found = []
    for each in (pipe, one):
        params = [entry["params"] for entry in each.init(jax.random.key(0), x)]
        tx = each.optimizer(optax.adamw(1e-2))
        state = tx.init(tuple(params))
        variables = tuple({"params": own} for own in params)
        _, grads = each.value_and_grad(ref.mse)(variables, x, targets)
        updates, state = tx.update(grads, state, tuple(params))
        params = each.jit(optax.apply_updates)(tuple(params), updates)
        found.append((params, state, each.jit(optax.tree.norm)(grads)))
    close(*found)
    assert spec(found[0][0][1]["Dense_0"]["kernel"].value) == P("data", "model")
    assert spec(found[0][1][0].mu[1]["Dense_0"]["kernel"].value) == P("data", "model")


def test_a_number_in_the_state_of_an_optimizer_is_placed():
    """As one has who sets a rate, or reads a file; its parameters are cut."""
    pipe = jpipe.pipeline([dense(8), dense(4)], 2, sharding=last_axis, mesh=mesh(2, 2))
    tx = optax.inject_hyperparams(optax.sgd)(0.1, momentum=0.9)
    state = pipe.init_train_state(jax.random.key(0), batch()[0], tx)
    state.opt_state.hyperparams["learning_rate"] = 0.5
    placed = pipe.place(state).opt_state
    assert placed.hyperparams["learning_rate"] == 0.5
    assert spec(placed.inner_state[0].trace[0]["kernel"]) == P(None, "data")


def test_arrays_of_another_mesh_of_the_same_devices_are_refused():
    pipe = jpipe.pipeline([dense(8), dense(4)], 2, mesh=mesh(2, 2))
    own = jax.make_mesh((2,), ("other",), devices=jax.devices()[:2])
    array = jax.device_put(jnp.ones(4), jax.NamedSharding(own, P("other")))
    with pytest.raises(ValueError, match="those of one stage, in its mesh; type pip"):
        pipe.jit(jnp.sin)(array)


def test_logical_axis_rules_of_flax_decide_where_parameters_are():
    layers = wide(how=nn.with_logical_partitioning, across="hidden")
    with nn.logical_axis_rules([("hidden", "model")]):
        pipe = jpipe.pipeline(layers, 2, balance=[2, 2], mesh=mesh(2, 1, 2))
        variables = pipe.init(jax.random.key(0), batch(8)[0])
        kernel = variables[1]["params"]["Dense_0"]["kernel"].value
        assert spec(kernel) == P(None, "model")
    other = jpipe.pipeline(layers, 2, balance=[2, 2], mesh=mesh(2, 1, 2))
    with pytest.raises(
        ValueError,
        match=r"there as .*'model'.*, needed as \S+ \(under other nn.logical_axis_rul",
    ):
        other.apply(variables, batch(8)[0])


def test_nnx_sharding_metadata_decides_where_parameters_are():
    def linear(n, m, seed, names, **metadata):
        init = nnx.with_partitioning(INIT, names, **metadata)
        return nnx.Linear(
            n, m, kernel_init=init, param_dtype=float, rngs=nnx.Rngs(seed)
        )

    def layers():
        whole = jax.NamedSharding(mesh(2, 2, 2), P("data"))
        with nnx.use_eager_sharding(False):
            return [
                linear(5, 8, 0, (None, "in"), sharding_rules=[("in", "model")]),
                linear(8, 8, 1, whole),
                linear(8, 4, 2, (None, "unknown")),
            ]

    pipe = jpipe.pipeline(layers(), 2, balance=[2, 1], mesh=mesh(2, 2, 2))
    got = compare(layers, pipe, 4, *batch(16))
    kernels = [own["kernel"] for own in got["state"].params]
    assert list(map(spec, kernels)) == [P(None, "model"), P("data"), P()]


def test_parameters_that_cannot_be_sharded_are_named():
    layers, x = [dense(8), dense(3)], batch(8)[0]

    def pipeline(rule):
        return jpipe.pipeline(layers, 2, mesh=mesh(2, 2), sharding=rule)

    with pytest.raises(
        ValueError,
        match=r"variables\[0\]\['params'\]\['kernel'\] of shape \(5, 8\) as "
        r".*\('data',\): 2 devices do not divide 5",
    ):
        pipeline(lambda path, leaf: P("data")).init(jax.random.key(0), x)
    with pytest.raises(ValueError, match=r"names \['model'\] for .* the axes \['data'"):
        pipeline(lambda path, leaf: P("model")).init(jax.random.key(0), x)


def test_variables_with_another_sharding_are_refused_until_placed():
    pipe = jpipe.pipeline(wide(), 2, balance=[2, 2], mesh=mesh(2, 1, 2))
    x, _ = batch(8)
    variables = pipe.init(jax.random.key(0), x)
    moved = jax.device_put(variables, pipe.devices[0].devices.flat[0])
    with pytest.raises(ValueError, match=r"not in place; type variables = pipe.place"):
        pipe.apply(moved, x)
    ref.assert_equal(pipe.apply(pipe.place(moved), x), pipe.apply(variables, x))
