"""Faults that were found and mended: each test fails without its fix."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

import jpipe
from jpipe._functions._task import Task
from jpipe._train import _gradient
from jpipe.schedules import Schedule, ScheduleError, one_f_one_b

from . import reference as ref

DOTS = jax.checkpoint_policies.dots_saveable


@pytest.mark.parametrize("remat", ["full", "none", DOTS])
def test_a_layer_may_print_what_it_computes(remat, capfd):
    def printing(x):
        jax.debug.print("mean {}", x.mean())
        return x

    layers = [ref.dense(4), printing, ref.dense(4)]
    pipe = jpipe.pipeline(layers, 2, remat=remat, schedule="gpipe")
    x, targets = ref.regression(4)
    variables = pipe.init(jax.random.key(0), x)
    value = pipe.value_and_grad(ref.mse)(variables, x, targets)
    jax.effects_barrier()
    assert capfd.readouterr().out.count("mean") >= 2
    layers[1] = jnp.positive
    expected = ref.value_and_grad(layers, ref.params_of(variables), x, targets)
    ref.assert_close(value, expected, ref.FLOAT32)


OPTIMIZERS = {
    # Its first moment starts as the first update: one array in two places.
    "novograd": optax.novograd(1e-2),
    "cocob": optax.contrib.cocob(),
    "copies of the parameters in the state": optax.GradientTransformation(
        lambda params: (params, params),
        lambda grads, state, params=None: (grads, (grads, state[1])),
    ),
    # Both hold branches over the whole tree.
    "MultiSteps": optax.MultiSteps(optax.adam(1e-2), 2).gradient_transformation(),
    "apply_if_finite": optax.apply_if_finite(optax.adam(1e-2), 3),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_result_of_an_optimizer_is_an_array_of_its_own(name):
    tx = OPTIMIZERS[name]
    layers = ref.mlp()
    x, targets = ref.regression(8)
    pipe = jpipe.pipeline(layers, 2, balance=[2, 2, 2])
    state = pipe.init_train_state(jax.random.key(0), x, tx)
    expected = ref.optax_steps(
        layers, ref.params_of(state.variables), x, targets, tx, 3
    )
    step = pipe.train_step(ref.mse, tx)
    for _ in range(3):
        state, _ = step(state, x, targets)
    ref.assert_close(state.params, expected[0], 1e-4)


@pytest.mark.parametrize("name", ["MultiSteps", "apply_if_finite"])
def test_an_optimizer_with_branches_moves_no_parameters(name, moved):
    tx = OPTIMIZERS[name]
    pipe = jpipe.pipeline(ref.mlp(), 2, balance=[2, 2, 2])
    x, targets = ref.regression(8)
    state = pipe.init_train_state(jax.random.key(0), x, tx)
    step = pipe.train_step(ref.mse, tx)
    state, _ = step(state, x, targets)
    moved.clear()
    step(state, x, targets)
    # The largest that moves is a boundary activation: four examples of width 12.
    assert max(size for size, _ in moved) == 48


class Previous(nn.Module):
    """Keeps in one variable what another was."""

    @nn.compact
    def __call__(self, x):
        now = self.variable("memory", "now", lambda: jnp.float32(0))
        before = self.variable("memory", "before", lambda: jnp.float32(-5))
        if self.is_mutable_collection("memory"):
            before.value = now.value
            now.value = now.value + 1
        return ref.dense(4)(x)


def test_a_variable_may_take_the_value_of_another():
    pipe = jpipe.pipeline([Previous(), jnp.tanh], 2)
    x, targets = ref.regression(4)
    tx = optax.sgd(0.0)
    state = pipe.init_train_state(jax.random.key(0), x, tx)
    made = ref.on_host(state.model_state[0]["memory"])
    state, _ = pipe.train_step(ref.mse, tx)(state, x, targets)
    memory = ref.on_host(state.model_state[0]["memory"])
    assert memory["before"] == made["now"]
    assert memory["now"] == made["now"] + 1


def test_half_precision_is_summed_in_single_precision():
    """The gradient of a thousand equal micro-batches is that of one."""
    pipes = [jpipe.pipeline([ref.dense(1, jnp.bfloat16)], m) for m in (1, 512)]
    x = jnp.ones((512, 3), jnp.bfloat16)
    targets = jnp.full((512, 1), 3.0)
    variables = pipes[0].init(jax.random.key(0), x)

    def loss_fn(y, t):
        return jnp.mean((y.astype(jnp.float32) - t) ** 2)

    whole, parts = (
        pipe.value_and_grad(loss_fn)(variables, x, targets)[1] for pipe in pipes
    )
    assert parts[0]["bias"].dtype == jnp.bfloat16
    # XLA sums the batch in bfloat16 too; lost terms would halve the gradient.
    ref.assert_close(parts, whole, 2**-4)


def test_keys_may_pass_through_the_stages():
    layers = [
        lambda p: (jnp.sin(p[0]), p[1]),
        nn.Sequential([lambda p: p[0], ref.dense(4)]),
        jnp.tanh,
    ]
    x, targets = ref.regression(4)
    keys = jax.random.split(jax.random.key(1), 4)
    for remat in ("full", "none"):
        pipe = jpipe.pipeline(layers, 2, remat=remat)
        variables = pipe.init(jax.random.key(0), (x, keys))
        value = pipe.value_and_grad(ref.mse)(variables, (x, keys), targets)
        params = ref.params_of(variables)
        expected = ref.value_and_grad(layers, params, (x, keys), targets)
        ref.assert_close(value, expected, ref.FLOAT32)


def test_what_partial_has_set_stays_set():
    def scaled(x, train=False):
        return 2 * x if train else x

    pipe = jpipe.pipeline([functools.partial(scaled, train=True)], 1)
    np.testing.assert_array_equal(pipe.apply(({},), jnp.ones(2)), [2, 2])
    pipe = jpipe.pipeline([scaled], 1)
    np.testing.assert_array_equal(pipe.apply(({},), jnp.ones(2)), [1, 1])
    np.testing.assert_array_equal(pipe.apply(({},), jnp.ones(2), train=True), [2, 2])


class Switched(nn.Module):
    """A block with a switch that stands by position."""

    @nn.compact
    def __call__(self, x, train):
        return nn.Dropout(0.5)(ref.dense(4)(x), deterministic=not train)


def test_a_rematerialized_block_has_static_switches():
    layer = nn.remat(Switched, static_argnums=(2,))()
    pipe = jpipe.pipeline([layer, ref.dense(4)], 2)
    x, targets = ref.regression(4)
    variables = pipe.init(jax.random.key(0), x)
    pipe.apply(variables, x)
    rngs = {"dropout": jax.random.key(1)}
    plain = jpipe.pipeline([Switched(), ref.dense(4)], 2)
    params = [{"params": p} for p in ref.params_of(variables)]
    # The same parameters under the name that flax gives the plain block's layers.
    expected = plain.value_and_grad(ref.mse)(plain.place(params), x, targets, rngs=rngs)
    actual = pipe.value_and_grad(ref.mse)(variables, x, targets, rngs=rngs)
    ref.assert_close(actual, expected, ref.FLOAT32)


def test_inside_a_trace_the_message_says_where_to_call():
    pipe = jpipe.pipeline([ref.dense(4)], 2)
    x, targets = ref.regression(4)
    variables = pipe.init(jax.random.key(0), x)
    says = pytest.raises(TypeError, match=r"outside of jax\.jit")
    with says:
        jax.jit(pipe.value_and_grad(ref.mse))(variables, x, targets)
    with says:
        jax.eval_shape(pipe.apply, variables, x)
    tx = optax.sgd(0.1)
    state = pipe.init_train_state(jax.random.key(0), x, tx)
    with says:
        jax.jit(pipe.train_step(ref.mse, tx))(state, x, targets)


def test_a_builder_may_refuse_a_number_of_ranks():
    def picky(num_ranks, num_microbatches):
        if num_ranks > 1:
            raise ScheduleError("one rank only")
        return one_f_one_b(num_ranks, num_microbatches)

    assert jpipe.pipeline([jnp.sin], 2, schedule=picky).num_stages == 1
    with pytest.raises(ScheduleError, match="2 ranks: one rank only"):
        jpipe.pipeline([jnp.sin, jnp.cos], 2, schedule=picky)


def test_one_micro_batch_has_nothing_to_join():
    pipe = jpipe.sequential([lambda x: x.sum()])
    assert pipe.apply(({},), jnp.ones(3)) == 3


def test_apply_does_not_ask_for_the_axes_of_targets():
    pipe = jpipe.pipeline([jnp.sin], 2, target_axes=(0, None))
    np.testing.assert_allclose(pipe.apply(({},), jnp.ones(4)), np.sin(np.ones(4)))


class TestBoundariesWithoutGradients:
    """A stage whose input is integers only has no first half of a backward."""

    def layers(self):
        class Digitize(nn.Module):
            @nn.compact
            def __call__(self, x):
                return jnp.argmax(nn.Dense(7)(x), -1)

        return [Digitize(), nn.Embed(7, 5), nn.Dense(4)]

    @pytest.mark.parametrize("schedule", ["zb_h1", "zb_h2", "gpipe"])
    @pytest.mark.parametrize("remat", ["full", "none"])
    def test_trains_under_every_schedule(self, schedule, remat):
        x, targets = ref.regression(8)
        values = [
            pipe.value_and_grad(ref.mse)(pipe.init(jax.random.key(0), x), x, targets)
            for pipe in (
                jpipe.pipeline(self.layers(), 4, schedule=schedule, remat=remat),
                jpipe.sequential(self.layers(), 4),
            )
        ]
        ref.assert_close(*values, ref.FLOAT32)

    def test_a_profile_does_not_wait_for_what_it_does_not_read(self):
        def first(x):
            jpipe.stash("x", x)
            return jnp.argmax(x, -1)

        def last(x):
            return x + jpipe.pop("x")[:, :4]

        order = Schedule.from_text(
            """
            0F0 0F1 0B0 0F2 0B1 0B2
            1F0 1I0 1F1 1I1 1F2 1I2 1W0 1W1 1W2
            2F0 2B0 2F1 2B1 2F2 2B2
            """
        )
        layers = [ref.dense(6), first, nn.Embed(6, 4), last, ref.dense(4)]
        pipe = jpipe.pipeline(layers, 3, balance=[2, 1, 2], schedule=order)
        x, targets = ref.regression(6)
        state = pipe.init_train_state(jax.random.key(0), x, optax.sgd(0.1))
        assert pipe.profile_step(state, (x, targets), ref.mse).makespan > 0


def test_skips_that_depend_on_training_are_refused_whatever_the_balance():
    def first(x, train):
        if train:
            jpipe.stash("q", x)
        return x

    def second(x, train):
        return x + jpipe.pop("q") if train else x

    x, _ = ref.regression(4)
    pipe = jpipe.pipeline([first, second], 2)
    with pytest.raises(ValueError, match="stashed or popped in training and not in"):
        pipe.value_and_grad(ref.mse)(({}, {}), x, x)


def test_namespaces_nest():
    def keep(x):
        jpipe.stash("a", x)
        return x

    def take(x):
        return x + jpipe.pop("a")

    def block(name, layer):
        return jpipe.isolate(jpipe.isolate(layer, name), "outer")

    layers = [block("i", keep), block("j", keep), block("i", take), block("j", take)]
    y = jpipe.sequential(layers).apply(({},) * 4, jnp.ones(3))
    np.testing.assert_array_equal(y, 3 * np.ones(3))


def test_a_forward_alone_makes_no_sums_of_gradients():
    pipe = jpipe.pipeline([ref.dense(4), ref.dense(4)], 2)
    x, _ = ref.regression(4)
    variables = pipe.init(jax.random.key(0), x)
    inference = pipe._library.inference(variables, x, None, False)
    live = inference.program.feed(pipe._leaves(variables), [x])
    assert not jax.tree.leaves((live.grads, live.tally))


class Last(nn.Module):
    """Keeps the first number of the micro-batch that it saw last, as an integer."""

    @nn.compact
    def __call__(self, x):
        seen = self.variable("memory", "seen", lambda: jnp.int32(-1))
        if self.is_mutable_collection("memory") and not self.is_initializing():
            seen.value = x[0, 0].astype(jnp.int32)
        return nn.Dense(1)(x)


@pytest.mark.parametrize("remat", ["full", "none", "except_last"])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_an_integer_is_what_the_last_microbatch_makes_of_it(schedule, remat):
    x, tx = jnp.arange(4.0)[:, None], optax.sgd(0.0)
    layers = [jnp.positive, Last()]
    pipe = jpipe.pipeline(layers, 4, schedule=schedule, remat=remat)
    state = pipe.init_train_state(jax.random.key(0), x, tx)
    state, metrics = pipe.train_step(ref.mse, tx)(state, x, x)
    assert state.model_state[1]["memory"]["seen"] == 3
    twin = jpipe.sequential(layers)
    other = twin.init_train_state(jax.random.key(0), x, tx)
    _, expected = twin.train_step(ref.mse, tx)(other, x, x)
    np.testing.assert_allclose(metrics["loss"], expected["loss"], rtol=1e-6)


def test_parameters_that_start_from_a_python_number_compile_nothing_twice(caplog):
    class Scale(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(3)(x) * self.param("scale", lambda key: 1.5)

    pipe = jpipe.pipeline([Scale(), nn.Dense(4)], 2)
    x, targets = ref.regression(4)
    tx = optax.adam(1e-2)
    state = pipe.init_train_state(jax.random.key(0), x, tx)
    assert not any(leaf.weak_type for leaf in jax.tree.leaves(state.params))
    step = pipe.train_step(ref.mse, tx)
    state, _ = step(state, x, targets)
    caplog.clear()
    with jax.log_compiles(), caplog.at_level("WARNING"):
        step(state, x, targets)
    assert not [r for r in caplog.records if "Compiling" in r.getMessage()]


def test_streams_of_one_key_draw_different_numbers():
    class Two(nn.Module):
        @nn.compact
        def __call__(self, x):
            keys = self.make_rng("noise"), self.make_rng("dropout")
            noise, dropout = (jax.random.uniform(key, x.shape) for key in keys)
            return noise - dropout

    pipe = jpipe.sequential([Two()], 2)
    y = pipe.apply(({},), jnp.ones((4, 3)), rngs=jax.random.key(0), train=True)
    assert np.all(np.asarray(y) != 0)


def test_a_mean_is_not_kept_as_an_integer():
    class Mean(nn.Module):
        @nn.compact
        def __call__(self, x):
            kept = self.variable("stats", "m", lambda: jnp.array(0))
            if self.is_mutable_collection("stats") and not self.is_initializing():
                kept.value = x.mean()
            return nn.Dense(4)(x)

    pipe = jpipe.pipeline([ref.dense(4), Mean()], 2)
    x, targets = ref.regression(4)
    variables = pipe.init(jax.random.key(0), x)
    message = r"layer 1 \(Mean\) writes float32 to \['stats'\]\['m'\], .* as int32"
    with pytest.raises(ValueError, match=message):
        pipe.value_and_grad(ref.mse)(variables, x, targets)


def test_sums_of_a_weighted_loss_are_divided_in_place(monkeypatch):
    given = []
    divide = _gradient._divide

    def noted(sums, weight):
        given.extend(sums)
        return divide(sums, weight)

    monkeypatch.setattr(_gradient, "_divide", noted)
    pipe = jpipe.pipeline([ref.dense(4), ref.dense(4)], 2)
    x, targets = ref.regression(4)
    variables = pipe.init(jax.random.key(0), x)

    def loss(y, t):
        return jnp.sum((y - t) ** 2), jnp.float32(y.size)

    pipe.value_and_grad(loss, reduction="weighted")(variables, x, targets)
    assert len(given) == 5
    assert all(leaf.is_deleted() for leaf in given)


def test_a_hyperparameter_that_is_a_python_number_is_named():
    tx = optax.inject_hyperparams(optax.sgd)(learning_rate=0.1)
    pipe = jpipe.sequential([ref.dense(4)], 2)
    x, targets = ref.regression(4)
    state = pipe.init_train_state(jax.random.key(0), x, tx)
    state.opt_state.hyperparams["learning_rate"] = 0.05
    message = r"learning_rate'\]: given a Python float, needs float32\[\]"
    with pytest.raises(ValueError, match=message):
        pipe.train_step(ref.mse, tx)(state, x, targets)
    state.opt_state.hyperparams["learning_rate"] = jnp.asarray(0.05)
    pipe.train_step(ref.mse, tx)(state, x, targets)


def test_tracers_are_refused_the_second_time_too():
    pipe = jpipe.pipeline([jnp.sin, jnp.cos], 2)
    x, _ = ref.regression(4)

    def total(x):
        return pipe.apply(({}, {}), x).sum()

    for _ in range(2):
        with pytest.raises(TypeError, match="a pipeline compiles its own stages"):
            jax.grad(total)(x)
        total(x)


SETTINGS = {
    "precision": lambda: jax.default_matmul_precision("bfloat16"),
    "x64": lambda: jax.enable_x64(True),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_a_profile_runs_the_programs_of_the_step_around_it(name, monkeypatch):
    traced = []
    tally = Task.tally

    def noted(*args):
        traced.append(args[0].index)
        return tally(*args)

    monkeypatch.setattr(Task, "tally", noted)
    pipe = jpipe.pipeline([ref.dense(4), ref.dense(4)], 2)
    x, targets = ref.regression(4)
    with SETTINGS[name]():
        state = pipe.init_train_state(jax.random.key(0), x, optax.sgd(0.1))
        pipe.profile_step(state, (x, targets), ref.mse)
    assert sorted(traced) == [0, 1], "a program was traced again while it was timed"
