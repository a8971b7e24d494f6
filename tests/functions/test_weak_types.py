"""Weakly typed arrays take the dtype of what they meet, as on one device."""

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen as nn

import jpipe

from .. import reference as ref


def weak(shape, value):
    """An array of the default dtype that is weakly typed."""
    array = jnp.full(shape, value)
    assert array.weak_type
    return array


def strong(tree):
    return jax.tree.map(lambda leaf: leaf.astype(leaf.dtype), tree)


def single(width):
    """A layer of the dtype that its parameters and its input make together."""
    return nn.Dense(width, param_dtype=jnp.float32)


class Like(nn.Module):
    """Has a parameter of the dtype that comes out of the layer before."""

    @nn.compact
    def __call__(self, x):
        h = single(3)(x)
        return h * self.param("scale", nn.initializers.ones, (3,), h.dtype)


def keep(x):
    jpipe.stash("kept", 2 * x["b"])
    return x["a"]


def add(h):
    return h + jpipe.pop("kept")


def kinds(tree):
    """The dtype of each leaf, and whether it is weak."""
    return jax.tree.map(lambda leaf: (leaf.dtype, leaf.weak_type), tree)


class TestSkipping:
    """What is weak enters, crosses boundaries, and goes round a layer."""

    layers = (keep, Like(), add, single(4))

    def outputs(self, params, x):
        h = Like().apply({"params": params[1]}, x["a"]) + 2 * x["b"]
        return single(4).apply({"params": params[3]}, h)

    def value_and_grad(self, params, x, targets):
        def loss(params):
            y = self.outputs(params, x)
            return ref.mse(y, targets), (y, 2 * targets)

        return jax.jit(jax.value_and_grad(loss, has_aux=True))(params)

    @pytest.mark.parametrize("is_weak", [True, False])
    @pytest.mark.parametrize(
        "make",
        [
            lambda layers: jpipe.sequential(layers, 2),
            lambda layers: jpipe.pipeline(layers, 2),
            lambda layers: jpipe.pipeline(layers, 2, schedule="zb_h1", remat="none"),
        ],
    )
    def test_gives_what_flax_gives(self, double, make, is_weak):
        """Single precision of weak input, where strong input makes it double."""
        x = {"a": weak((4, 5), 1.25), "b": weak((4, 3), -0.5)}
        targets = weak((4, 4), 0.25)
        if not is_weak:
            x, targets = strong((x, targets))
        pipe = make(self.layers)
        variables = pipe.init(jax.random.key(0), x)
        flax = jax.eval_shape(Like().init, jax.random.key(0), x["a"])["params"]
        assert kinds(variables[1]["params"]) == kinds(flax)
        assert flax["scale"].dtype == ("float32" if is_weak else "float64")

        params = ref.params_of(variables)
        expected = self.value_and_grad(params, x, targets)
        actual = pipe.value_and_grad(
            lambda y, t: (ref.mse(y, t), (y, 2 * t)), has_aux=True, aux_axes=0
        )(variables, x, targets)
        ref.assert_close(actual, expected, ref.FLOAT32)
        (_, aux), _ = actual
        (_, expected_aux), _ = expected
        assert kinds(aux) == kinds(expected_aux)
        assert aux[1].weak_type == is_weak
        ref.assert_close(pipe.apply(variables, x), expected_aux[0], ref.FLOAT32)

    def test_steps_are_those_of_optax(self, double):
        layers = [jnp.sin, single(3), jnp.tanh, single(4)]
        x, targets = weak((4, 5), 1.25), weak((4, 4), 0.25)
        pipe = jpipe.pipeline(layers, 2, balance=[1, 2, 1])
        ref.compare_steps(pipe, layers, x, targets, optax.adam(1e-2), ref.FLOAT32)


def test_a_layer_of_half_precision():
    layers = [nn.Dense(3, param_dtype=jnp.bfloat16), jnp.tanh]
    x = weak((4, 5), 1.25)
    for make in (jpipe.sequential, jpipe.pipeline):
        pipe = make(layers, 2)
        variables = pipe.init(jax.random.key(0), x)
        y = pipe.apply(variables, x)
        assert y.dtype == jnp.bfloat16
        ref.assert_close(y, ref.compose(layers, ref.params_of(variables), x), 1e-2)
        assert pipe.apply(variables, strong(x)).dtype == jnp.float32


def test_outputs_stay_weak():
    layers = [lambda x: (2 * x, jnp.ones_like(x, float)), lambda p: (p[0] + 1, p[1])]
    x = weak((4, 3), 1.25)
    for make in (jpipe.sequential, jpipe.pipeline):
        pipe = make(layers, 2)
        y, ones = pipe.apply(({}, {}), x)
        assert y.weak_type
        assert not ones.weak_type
        assert not pipe.apply(({}, {}), strong(x))[0].weak_type


class TestPrograms:
    """One for what is weak, one for what is strong, and neither traced again."""

    def model(self):
        traces = []

        def counted(x):
            traces.append(1)
            return x

        pipe = jpipe.pipeline([nn.Dense(3), counted], 2)
        x, targets = weak((4, 5), 1.25), weak((4, 3), 0.25)
        return pipe, [(x, targets), strong((x, targets)), (x, strong(targets))], traces

    def assert_traces_once(self, call, batches, traces):
        for batch in batches:
            before = len(traces)
            call(*batch)
            assert len(traces) > before
        before = len(traces)
        for batch in batches:
            call(*batch)
        assert len(traces) == before

    def test_of_a_forward_pass(self):
        pipe, batches, traces = self.model()
        variables = pipe.init(jax.random.key(0), batches[0][0])
        inputs = [(x,) for x, _ in batches[:2]]
        self.assert_traces_once(lambda x: pipe.apply(variables, x), inputs, traces)

    def test_of_a_gradient(self):
        pipe, batches, traces = self.model()
        variables = pipe.init(jax.random.key(0), batches[0][0])
        loss_and_grad = pipe.value_and_grad(ref.mse)
        self.assert_traces_once(
            lambda x, t: loss_and_grad(variables, x, t), batches, traces
        )

    def test_of_a_step(self, caplog):
        pipe, batches, traces = self.model()
        tx = optax.sgd(0.1)
        state = pipe.init_train_state(jax.random.key(0), batches[0][0], tx)
        step = pipe.train_step(ref.mse, tx)

        def take(x, targets):
            nonlocal state
            state, _ = step(state, x, targets)

        self.assert_traces_once(take, batches, traces)
        caplog.clear()
        with jax.log_compiles(), caplog.at_level("WARNING"):
            take(*batches[0])
        assert not [r for r in caplog.records if "Compiling" in r.getMessage()]


class TestVariables:
    """Initialization meets the input as it is, and what is given is taken as it is."""

    def test_a_stage_of_ones_own_is_given_weak_zeros(self):
        def init(key, x):
            return {"params": {"scale": jnp.ones(3, (x * jnp.bfloat16(1)).dtype)}}

        stage = jpipe.Stage(init, lambda variables, x: x * variables["params"]["scale"])
        pipe = jpipe.pipeline([stage], 2)
        x = weak((4, 3), 1.25)
        for given, dtype in [(x, jnp.bfloat16), (strong(x), jnp.float32)]:
            (variables,) = pipe.init(jax.random.key(0), given)
            assert variables["params"]["scale"].dtype == dtype

    def test_equal_layers_on_other_input_are_made_for_it(self, double):
        pipe = jpipe.pipeline([Like(), lambda h: h, Like()], 2)
        x = weak((4, 5), 1.25)
        for given in (x, strong(x)):
            one = jpipe.pipeline([Like()], 2).init(jax.random.key(0), given)
            both = pipe.init(jax.random.key(0), given)
            assert kinds(both[0]) == kinds(one[0])
            assert kinds(both[2]["params"]["scale"]) == kinds(one[0]["params"]["scale"])

    def test_values_of_the_input_are_as_little_there_as_of_a_strong_one(self):
        class Centred(nn.Module):
            @nn.compact
            def __call__(self, x):
                return x - self.param("mean", lambda key: x.mean(0))

        x = weak((4, 5), 1.25)
        for given in (x, strong(x)):
            with pytest.raises(
                ValueError, match="from its values, as params/mean would"
            ):
                jpipe.pipeline([Centred()], 2).init(jax.random.key(0), given)

    def test_a_linen_layer_that_pops_is_met_once(self):
        class Add(nn.Module):
            @nn.compact
            def __call__(self, x):
                return nn.Dense(5)(x) + jpipe.pop("kept")

        def start(x):
            jpipe.stash("kept", x)
            return x

        x = weak((4, 5), 1.25)
        pipe = jpipe.pipeline([start, Add()], 2)
        variables = pipe.init(jax.random.key(0), x)
        dense = variables[1]["params"]["Dense_0"]
        expected = nn.Dense(5).apply({"params": ref.on_host(dense)}, x) + x
        ref.assert_close(pipe.apply(variables, x), expected, ref.FLOAT32)

    def test_a_weak_parameter_is_taken_as_it_is_given(self):
        def scale(variables, x):
            return x * variables["params"]["scale"]

        stage = jpipe.Stage(lambda key, x: {"params": {"scale": jnp.ones(())}}, scale)
        pipe = jpipe.pipeline([stage, lambda y: y + 1], 2)
        x = jnp.full((4, 3), 1.25, jnp.bfloat16)
        for value in (jnp.asarray(1.7), jnp.float32(1.7), jnp.asarray(1.7)):
            given = ({"params": {"scale": value}}, {})

            def loss(params, x=x):
                return ref.mse(scale({"params": params}, x) + 1, x)

            expected = jax.value_and_grad(loss)(given[0]["params"])
            value, grads = pipe.value_and_grad(ref.mse)(pipe.place(given), x, x)
            ref.assert_close((value, grads[0]), expected, 1e-2)
            y = pipe.apply(pipe.place(given), x)
            assert y.dtype == (scale(given[0], x) + 1).dtype

    def test_a_weak_parameter_of_a_state_is_strong_after_a_step(self):
        """So optax makes it: the first step computes in half precision, the second not.

        Other than the parameters that `init` makes, as after a step.
        """

        class Scale(nn.Module):
            @nn.compact
            def __call__(self, x):
                return x * self.param("scale", nn.initializers.ones, ())

        layers = [Scale(), lambda y: y + 1]
        pipe, tx = jpipe.pipeline(layers, 2), optax.sgd(0.1)
        x = jnp.full((4, 3), 1.25, jnp.bfloat16)
        state = pipe.init_train_state(jax.random.key(0), x, tx)
        params = {"scale": jnp.asarray(1.7)}, {}
        state = pipe.place(state.replace(params=jax.tree.map(jnp.copy, params)))
        assert state.params[0]["scale"].weak_type
        step = pipe.train_step(ref.mse, tx)
        for dtype in (jnp.bfloat16, jnp.float32, jnp.float32):
            loss, grads = ref.gradient(layers)(params, x, x)
            params = optax.apply_updates(params, tx.update(grads, tx.init(params))[0])
            state, metrics = step(state, x, x)
            assert metrics["loss"].dtype == loss.dtype == dtype
            ref.assert_close((metrics["loss"], state.params), (loss, params), 1e-2)
