"""Modules that stand in several layers below their top: one value, as in one parent."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen as nn

import jpipe

from .. import reference as ref

WIDTH = 4


class Holder(nn.Module):
    """A module that is given another."""

    inner: Any

    @nn.compact
    def __call__(self, x):
        return jnp.tanh(self.inner(x))


class Named(nn.Module):
    """Another class, in which the module has another name."""

    before: Any
    part: Any

    @nn.compact
    def __call__(self, x):
        return self.part(self.before["norm"](x)) + ref.dense(WIDTH, x.dtype)(x)


class Ends(nn.Module):
    """What encodes and what decodes, with a scale that both use."""

    def setup(self):
        options = {"dtype": jnp.float64, "param_dtype": jnp.float64}
        self.encoder = nn.Dense(WIDTH, **options)
        self.decoder = nn.Dense(WIDTH, **options)
        self.scale = self.param("scale", nn.initializers.ones, WIDTH, jnp.float64)

    def encode(self, x):
        return self.encoder(x) * self.scale

    def decode(self, x):
        return self.decoder(x) * self.scale

    def __call__(self, x):
        return self.decode(jnp.tanh(self.encode(x)))


class Whole(nn.Module):
    """Parts that share a child."""

    def setup(self):
        self.dense = ref.dense(WIDTH, jnp.float64)
        self.first = Holder(self.dense)
        self.second = nn.Sequential([self.dense, nn.relu])

    def __call__(self, x):
        return self.second(self.first(x))


def dense(params, x):
    return x @ params["kernel"] + params["bias"]


class Case(NamedTuple):
    """Layers, and the same arithmetic from the entries that hold their parameters."""

    layers: list[Any]
    by_hand: Callable[[Any, Any], Any]
    owned: list[list[str]]


def bound():
    x = jnp.ones((1, WIDTH), jnp.float64)
    return Whole().bind(Whole().init(jax.random.key(0), x))


def attributes_of_two():
    d = ref.dense(WIDTH, jnp.float64)

    def by_hand(params, x):
        own = params[0]["inner"]
        return jnp.tanh(dense(own, jnp.sin(jnp.tanh(dense(own, x)))))

    return Case([Holder(d), jnp.sin, Holder(d)], by_hand, [["inner"], [], []])


def below_itself():
    d = ref.dense(WIDTH, jnp.float64)

    def by_hand(params, x):
        return nn.relu(dense(params[0], dense(params[0], x)))

    layers = [d, nn.Sequential([d, nn.relu])]
    return Case(layers, by_hand, [["bias", "kernel"], []])


def in_a_rematerialized_one():
    d = ref.dense(WIDTH, jnp.float64)

    def by_hand(params, x):
        own = params[0]["inner"]["inner"]
        return jnp.tanh(dense(own, jnp.tanh(jnp.tanh(dense(own, x)))))

    layers = [Holder(Holder(d)), nn.remat(Holder)(d)]
    return Case(layers, by_hand, [["inner"], []])


def by_another_name():
    d = ref.dense(WIDTH, jnp.float64)
    norm = nn.LayerNorm(dtype=jnp.float64, param_dtype=jnp.float64)

    def by_hand(params, x):
        h = x
        for i, before in enumerate((0, 0)):
            own = params[before]
            h = norm.apply({"params": own["before_norm"]}, h)
            h = dense(own["part"], h) + dense(params[i]["Dense_0"], x)
            x = h
        return h

    layers = [Named({"norm": norm}, d), Named({"norm": norm}, d)]
    return Case(layers, by_hand, [["Dense_0", "before_norm", "part"], ["Dense_0"]])


def methods_that_need_different_parts():
    ends = Ends()

    def by_hand(params, x):
        scale = params[0]["scale"]
        h = jnp.tanh(dense(params[0]["encoder"], x) * scale)
        return dense(params[2]["decoder"], h) * scale

    layers = [jpipe.layer(ends, "encode"), jnp.tanh, jpipe.layer(ends, "decode")]
    return Case(layers, by_hand, [["encoder", "scale"], [], ["decoder"]])


def parts_of_a_bound_module():
    whole = bound()

    def by_hand(params, x):
        return nn.relu(
            dense(params[0]["inner"], jnp.tanh(dense(params[0]["inner"], x)))
        )

    return Case([whole.first, whole.second], by_hand, [["inner"], []])


def a_bound_module_and_its_part():
    whole = bound()

    def by_hand(params, x):
        own = params[0]["dense"]
        h = nn.relu(dense(own, jnp.tanh(dense(own, x))))
        return dense(own, h)

    return Case([whole, whole.dense], by_hand, [["dense"], []])


CASES = [
    attributes_of_two,
    below_itself,
    in_a_rematerialized_one,
    by_another_name,
    methods_that_need_different_parts,
    parts_of_a_bound_module,
    a_bound_module_and_its_part,
]


def batch(size=6):
    x, t = jax.random.normal(jax.random.key(5), (2, size, WIDTH), jnp.float64)
    return x, t


def loss_by_hand(case, t):
    return lambda params, x: ref.mse(case.by_hand(params, x), t)


@pytest.mark.parametrize("make", CASES, ids=lambda make: make.__name__)
def test_gradients_of_what_is_shared_are_sums_over_its_uses(double, make):
    case, (x, t) = make(), batch()
    pipe = jpipe.pipeline(case.layers, 3, schedule="zb_h1")
    variables = pipe.init(jax.random.key(0), x)
    params = ref.params_of(variables)
    assert [sorted(entry) for entry in params] == case.owned
    expected = jax.jit(jax.value_and_grad(loss_by_hand(case, t)))(params, x)
    value = pipe.value_and_grad(ref.mse)(variables, x, t)
    ref.assert_close(value, expected, ref.FLOAT64)


def test_a_flax_parent_of_the_same_layers_holds_as_much(double):
    class Parent(nn.Module):
        layers: Any

        def __call__(self, x):
            for layer in self.layers:
                x = layer(x)
            return x

    for make in (attributes_of_two, below_itself, by_another_name):
        layers, (x, _) = make().layers, batch()
        whole = Parent(layers).init(jax.random.key(0), x)
        ours = jpipe.pipeline(layers, 2).init(jax.random.key(0), x)
        sizes = [
            sorted(leaf.size for leaf in jax.tree.leaves(t)) for t in (whole, ours)
        ]
        assert sizes[0] == sizes[1]


def test_complete_variables_may_stand_in_any_one_of_the_entries(double):
    """As a checkpoint of the module has them: gradients come back in that entry."""
    case, (x, t) = methods_that_need_different_parts(), batch()
    pipe = jpipe.pipeline(case.layers, 3)
    whole = Ends().init(jax.random.key(3), x)
    h = whole["params"]

    def loss(params):
        y = Ends().apply({"params": params}, x)
        return ref.mse(y, t)

    expected = jax.value_and_grad(loss)(ref.on_host(h))
    for at in (0, 2):
        given = [{}, {}, {}]
        given[at] = whole
        value, grads = pipe.value_and_grad(ref.mse)(pipe.place(given), x, t)
        ref.assert_close((value, grads[at]), expected, ref.FLOAT64)
        assert [bool(entry) for entry in grads] == [i == at for i in range(3)]
    tx = optax.adam(1e-2)
    state = pipe.init_train_state(jax.random.key(0), x, tx, variables=given)
    state, metrics = pipe.train_step(ref.mse, tx)(state, x, t)
    assert float(metrics["loss"]) == pytest.approx(float(expected[0]), rel=1e-12)
    # Training starts from what each layer needs, where it runs.
    assert [sorted(entry) for entry in state.params] == case.owned
    ends = pipe.modules(state.variables)[0]
    assert sorted(ends.variables["params"]) == ["decoder", "encoder", "scale"]


def test_what_is_given_in_two_entries_is_refused(double):
    case, (x, _) = attributes_of_two(), batch()
    pipe = jpipe.pipeline(case.layers, 3)
    given = list(pipe.init(jax.random.key(0), x))
    given[2] = {"params": {**given[0]["params"], "more": jnp.ones(2)}}
    there = "variables[{}]['params']['inner']['{}']"
    with pytest.raises(ValueError, match="not those of this model") as no:
        pipe.apply(given, x)
    assert str(no.value).split("\n")[1:] == [
        *(
            f"  * tied: {there.format(2, leaf)} is {there.format(0, leaf)}; "
            f"give {{}} in its place"
            for leaf in ("bias", "kernel")
        ),
        "  * surplus: variables[2]['params']['more'] (2,)",
    ]
    with pytest.raises(ValueError, match=r"missing: variables\[0\]\['params'\]\['inn"):
        pipe.apply([{}, {}, {}], x)


class Transposed(nn.Module):
    """It reads the parameters of a module without calling it."""

    inner: Any

    def __call__(self, x):
        return x @ self.inner.variables["params"]["kernel"].T


def test_a_use_that_only_looks_up_what_another_made():
    d, x = nn.Dense(WIDTH, use_bias=False), ref.regression(6)[1]
    pipe = jpipe.pipeline([d, Transposed(d)], 2)
    variables = pipe.init(jax.random.key(0), x)
    assert variables[1] == {}
    kernel = ref.params_of(variables)[0]["kernel"]
    ref.assert_close(pipe.apply(variables, x), x @ kernel @ kernel.T, ref.FLOAT32)


def test_statistics_of_a_shared_module_are_refused():
    norm = nn.BatchNorm(use_running_average=True)
    pipe = jpipe.pipeline([Holder(norm), Holder(norm)], 2)
    listed = r"variables\[1\]\['batch_stats'\]\['inner'\]\['mean'\], "
    with pytest.raises(ValueError, match=f"of it not only parameters .{listed}"):
        pipe.init(jax.random.key(0), jnp.ones((4, WIDTH)))


def test_a_shared_module_of_two_shapes_is_refused_by_flax():
    d = nn.Dense(WIDTH)
    pipe = jpipe.pipeline([Holder(d), lambda x: x[:, :2], Holder(d)], 2)
    with pytest.raises(Exception, match=r"expected shape .*\(4, 4\)|shape"):
        pipe.init(jax.random.key(0), jnp.ones((4, WIDTH)))


def test_a_step_does_not_depend_on_what_the_pipeline_saw_last():
    d = nn.Dense(WIDTH)
    pipe = jpipe.pipeline([d, Holder(d), nn.Dense(2)], 2)
    tx = optax.sgd(0.1)
    x, t = jnp.ones((4, WIDTH)), jnp.ones((4, 2))
    state = pipe.init_train_state(jax.random.key(0), x, tx)
    step = pipe.train_step(ref.mse, tx)
    state, _ = step(state, x, t)
    pipe.init(jax.random.key(0), jnp.ones((4, 3, WIDTH)))
    own, _, last = jax.tree.map(jnp.copy, state.params)
    moved = ({}, {"params": {"inner": own}}, {"params": last})
    pipe.apply(pipe.place(moved), x)  # the same values, in other entries
    state, metrics = step(state, x, t)
    assert jnp.isfinite(metrics["loss"])
