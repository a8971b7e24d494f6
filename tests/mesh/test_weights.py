"""Parameters over the devices of a stage: FSDP, tensor parallel, both; who says so."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from jax.sharding import PartitionSpec as P

import jpipe

from .. import reference as ref
from .stages import TX, Normed, batch, close, compare, dense, mesh

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


def normed():
    return [Normed(), Normed(), dense(8), dense(4)]


def last_axis(path, leaf):
    """FSDP of what the devices divide."""
    even = leaf.shape[-1] % 2 == 0 and path[-1] == "kernel"
    return P(*[None] * (leaf.ndim - 1), "data") if even else None


def test_fully_sharded():
    options = {"sharding": last_axis, "mesh": mesh(2, 2)}
    pipe = jpipe.pipeline(normed(), 2, balance=[2, 2], **options)
    got = compare(normed, pipe, 4, *batch(16))
    kernel = got["state"].params[2]["kernel"]
    assert spec(kernel) == P(None, "data")
    assert spec(got["state"].opt_state[1][0].trace[2]["kernel"]) == P(None, "data")
    assert spec(got["state"].params[2]["bias"]) == P()
    assert kernel.addressable_shards[0].data.shape == (8, 4)
    assert "data 104" in str(pipe)  # of the kernels of the first stage


@pytest.mark.parametrize(
    ("shape", "parts", "explicit", "tx"),
    [
        ((2, 2, 2), 4, ("data",), TX),
        # It keeps rows and columns of what is cut.
        ((2, 1, 2), 2, ("stage", "data", "model"), FACTORED),
    ],
)
def test_tensor_parallel_by_boxes(shape, parts, explicit, tx):
    where = mesh(*shape, explicit=explicit)
    pipe = jpipe.pipeline(wide(), 2, balance=[2, 2], mesh=where)
    got = compare(wide, pipe, parts, *batch(16), tx=tx)
    kernel = got["state"].params[1]["Dense_0"]["kernel"]
    assert isinstance(kernel, nn.Partitioned)
    assert spec(kernel.value) == P(None, "model")


def test_both_and_a_loop_of_ones_own():
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


def test_arrays_of_another_mesh_of_the_same_devices_are_refused():
    pipe = jpipe.pipeline([dense(8), dense(4)], 2, mesh=mesh(2, 2))
    devices = jax.devices()[:2]
    for names, order in (("other", devices), ("data", devices[::-1])):
        own = jax.sharding.Mesh(np.array(order), (names,))
        array = jax.device_put(jnp.ones(4), jax.NamedSharding(own, P(names)))
        with pytest.raises(
            ValueError, match="those of one stage, in its mesh; type pip"
        ):
            pipe.jit(jnp.sin)(array)


def test_logical_axes_by_the_rules_of_flax():
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


def test_metadata_of_nnx():
    def linear(n, m, seed, names):
        init = nnx.with_partitioning(nnx.initializers.lecun_normal(), names)
        return nnx.Linear(
            n, m, kernel_init=init, param_dtype=float, rngs=nnx.Rngs(seed)
        )

    def layers():
        with nnx.use_eager_sharding(False):
            return [
                linear(5, 8, 0, (None, "model")),
                jnp.tanh,
                linear(8, 8, 1, ("data", None)),
                linear(8, 4, 2, (None, "unknown")),
            ]

    pipe = jpipe.pipeline(layers(), 2, balance=[2, 2], mesh=mesh(2, 2, 2))
    got = compare(layers, pipe, 4, *batch(16))
    kernels = [got["state"].params[i]["kernel"] for i in (0, 2, 3)]
    assert list(map(spec, kernels)) == [P(None, "model"), P("data"), P()]


@pytest.mark.parametrize("where", ["context", "metadata"])
def test_logical_axes_of_nnx_by_the_rules_of_flax(where):
    rules = [("hidden", "model"), ("embedded", None)]
    metadata = {"sharding_rules": rules} if where == "metadata" else {}
    init = nnx.with_partitioning(INIT, ("embedded", "hidden"), **metadata)
    context = nn.logical_axis_rules(rules if where == "context" else ())
    with nnx.use_eager_sharding(False), context:
        layers = [
            nnx.Linear(5, 8, kernel_init=init, param_dtype=float, rngs=nnx.Rngs(0)),
            dense(4),
        ]
        pipe = jpipe.pipeline(layers, 2, mesh=mesh(2, 1, 2))
        variables = pipe.init(jax.random.key(0), batch(8)[0])
    assert spec(variables[0]["params"]["kernel"]) == P(None, "model")


def test_a_sharding_of_nnx_says_what_its_spec_says():
    whole = jax.NamedSharding(mesh(2, 1, 2), P(None, "model"))
    init = nnx.with_partitioning(INIT, whole)
    with nnx.use_eager_sharding(False):
        layers = [nnx.Linear(5, 8, kernel_init=init, rngs=nnx.Rngs(0)), dense(4)]
    pipe = jpipe.pipeline(layers, 2, mesh=mesh(2, 1, 2))
    variables = pipe.init(jax.random.key(0), batch(8)[0])
    assert spec(variables[0]["params"]["kernel"]) == P(None, "model")


class Empty(nn.Module):
    """A parameter without entries, and one without axes."""

    @nn.compact
    def __call__(self, x):
        empty = self.param("empty", lambda key: jnp.zeros((0, 4)))
        scale = self.param("scale", lambda key: jnp.ones(()))
        return x * scale + empty.sum()


def test_what_has_no_entries_is_in_no_parts():
    layers = [Empty(), dense(4)]
    pipe = jpipe.pipeline(
        layers,
        2,
        mesh=mesh(2, 2),
        sharding=lambda path, leaf: P("data") if leaf.ndim == 2 else None,
        gather="microbatch",
    )
    x, targets = jnp.ones((8, 4)), jnp.zeros((8, 4))
    ref.compare(pipe, layers, x, targets, ref.FLOAT64)


def test_axes_that_a_mesh_does_not_have_say_nothing():
    pipe = jpipe.pipeline(wide(), 2, balance=[2, 2], mesh=mesh(2, 2))
    variables = pipe.init(jax.random.key(0), batch(8)[0])
    assert spec(variables[1]["params"]["Dense_0"]["kernel"].value) == P()


def test_what_cannot_be_cut_is_said():
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
    with pytest.raises(TypeError, match=r"returned a str for .*; needs a jax.sharding"):
        pipeline(lambda path, leaf: "data").init(jax.random.key(0), x)
    with pytest.raises(ValueError, match="an axis stands twice"):
        pipeline(lambda path, leaf: P(*["data"] * leaf.ndim)).init(jax.random.key(0), x)
    with pytest.raises(ValueError, match="has fewer axes than"):
        pipeline(lambda path, leaf: P(None, None, "data")).init(jax.random.key(0), x)


def test_variables_that_lie_otherwise_are_not_in_place():
    pipe = jpipe.pipeline(wide(), 2, balance=[2, 2], mesh=mesh(2, 1, 2))
    x, targets = batch(8)
    variables = pipe.init(jax.random.key(0), x)
    device = pipe.devices[0].devices.flat[0]
    moved = jax.device_put(variables, device)
    with pytest.raises(ValueError, match=r"not in place; type variables = pipe.place"):
        pipe.apply(moved, x)
    expected = pipe.apply(variables, x)
    ref.assert_equal(pipe.apply(pipe.place(moved), x), expected)
    on_host = jax.tree.map(np.asarray, variables)
    ref.assert_equal(pipe.apply(pipe.place(on_host), x), expected)
    state = pipe.init_train_state(jax.random.key(0), x, TX)
    step = pipe.train_step(ref.mse, TX, donate=False)
    elsewhere = jax.device_put(state.opt_state, device)
    with pytest.raises(ValueError, match=r"not in place; type state = pipe.place"):
        step(state.replace(opt_state=elsewhere), x, targets)
    again = pipe.place(state.replace(opt_state=elsewhere))
    ref.assert_equal(step(again, x, targets), step(state, x, targets))
