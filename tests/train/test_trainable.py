"""What is not trained: no gradient, no state, no backward, no residual, no change."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import serialization

import jpipe
from jpipe._run._costs import costs_of
from jpipe.schedules import Action

from .. import reference as ref


def is_none(leaf):
    return leaf is None


def hide(params, chosen):
    """The parameters with ``None`` where a function of the path says no."""

    def keep(path, leaf):
        at = tuple(getattr(key, "key", getattr(key, "idx", None)) for key in path)
        return leaf if chosen("/".join(map(str, at))) else None

    return jax.tree_util.tree_map_with_path(keep, tuple(params))


def merge(free, params):
    return jax.tree.map(
        lambda a, b: b if a is None else a, free, params, is_leaf=is_none
    )


def plain(layers, params, chosen, x, targets):
    """The loss and the gradients of what is chosen; the rest is constant."""

    def loss(free):
        return ref.mse(ref.compose(layers, merge(free, params), x), targets)

    return jax.jit(jax.value_and_grad(loss))(hide(params, chosen))


def actions(pipe, trainable, x, targets):
    """What a step runs."""
    gradient = pipe.value_and_grad(ref.mse, trainable=trainable)
    variables = pipe.init(jax.random.key(0), x)
    program = gradient.program(variables, x, targets)
    return [
        str(i.label)
        for i in program.instructions
        if isinstance(i.label, Action) and i.source is None
    ]


def costs(pipe, x, trainable):
    """What a step keeps, and its works."""
    find = pipe.value_and_grad(ref.mse, trainable=trainable)
    gradient = find._gradients(pipe.init(jax.random.key(0), x), x, x, None, True)
    works = gradient.works
    placement = pipe.schedule.placement
    return costs_of(gradient.program, works, gradient.batch, placement), works


def stacked(width=5, **options):
    """Six equal layers, each a stage."""
    devices = jax.devices()[:6]
    layers = [ref.dense(width) for _ in range(6)]
    return jpipe.pipeline(layers, 4, devices=devices, **options)


# All below a name; across layers; a layer behind the frozen ones; in the middle of a
# stage, with frozen ones of the same stage before and after.
MATRICES = "4/Dense_0/kernel", "4/Dense_1/kernel"
SELECTIONS = [
    ("2/Dense_0", lambda at: at.startswith("2/Dense_0/")),
    (["5", "2/*/scale"], lambda at: at[0] == "5" or at == "2/LayerNorm_0/scale"),
    (lambda path, leaf: path[0] == 4 and leaf.ndim == 2, lambda at: at in MATRICES),
]


class TestGradients:
    @pytest.mark.parametrize(("trainable", "chosen"), SELECTIONS)
    def test_they_are_those_of_jax_with_the_rest_constant(
        self, double, trainable, chosen
    ):
        layers, (x, targets) = ref.mlp(jnp.float64), ref.regression(6, jnp.float64)
        pipe = jpipe.pipeline(layers, 3, balance=[1, 2, 2, 1], remat="none")
        variables = pipe.init(jax.random.key(0), x)
        actual = pipe.value_and_grad(ref.mse, trainable=trainable)(
            variables, x, targets
        )
        params = ref.params_of(variables)
        expected = plain(layers, params, chosen, x, targets)
        ref.assert_close(actual, expected, ref.FLOAT64)
        frozen = jax.tree.leaves(actual[1], is_leaf=is_none).count(None)
        assert frozen == sum(not chosen(at) for at in paths(params))

    def test_what_layers_share_is_trained_as_its_owner_says(self, double):
        tied = ref.dense(5, jnp.float64)
        layers = [tied, jnp.tanh, ref.dense(5, jnp.float64), tied]
        x, _ = ref.regression(6, jnp.float64)
        pipe = jpipe.pipeline(layers, 3, balance=[2, 1, 1])
        variables = pipe.init(jax.random.key(0), x)
        params = ref.params_of(variables)

        def loss(free):
            full = merge(free, params)
            return ref.mse(ref.compose(layers, [*full[:3], full[0]], x), x)

        for chosen in ("0/kernel", "2/kernel"):
            free = hide(params, lambda at, chosen=chosen: at == chosen)
            actual = pipe.value_and_grad(ref.mse, trainable=chosen)(variables, x, x)
            ref.assert_close(actual, jax.value_and_grad(loss)(free), ref.FLOAT64)
        with pytest.raises(ValueError, match="'3/kernel': the nearest are '2/kernel'"):
            pipe.value_and_grad(ref.mse, trainable="3/kernel")(variables, x, x)

    def test_leaves_of_integers_have_none_once_something_is_selected(self):
        def init(key, x):
            return {"params": {"scale": jnp.ones(()), "shift": jnp.ones((), jnp.int32)}}

        def apply(variables, x):
            return variables["params"]["scale"] * x + variables["params"]["shift"]

        pipe = jpipe.pipeline([jpipe.Stage(init, apply)], 2)
        x = jnp.ones((4, 3))
        variables = pipe.init(jax.random.key(0), x)
        _, grads = pipe.value_and_grad(ref.mse)(variables, x, x)
        assert grads[0]["shift"].dtype == jax.dtypes.float0
        _, grads = pipe.value_and_grad(ref.mse, trainable=True)(variables, x, x)
        assert grads[0]["shift"] is None
        assert grads[0]["scale"] == 2
        with pytest.raises(ValueError, match="'0/shift': the nearest are '0/scale'"):
            pipe.value_and_grad(ref.mse, trainable="0/shift")(variables, x, x)


def paths(params):
    def name(path):
        return "/".join(str(getattr(k, "key", getattr(k, "idx", k))) for k in path)

    flat = jax.tree_util.tree_leaves_with_path(tuple(params))
    return [name(path) for path, _ in flat]


class TestTraining:
    TX = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2))

    def test_a_step_returns_the_arrays_that_it_does_not_train(self):
        pipe, (x, _) = stacked(), ref.regression(8)
        chosen = {"trainable": ["*/bias", "2"]}
        state = pipe.init_train_state(jax.random.key(0), x, self.TX, **chosen)
        before = [entry["kernel"] for entry in state.params]
        state, _ = pipe.train_step(ref.mse, self.TX, **chosen)(state, x, x)
        after = [entry["kernel"] for entry in state.params]
        same = [a is b for a, b in zip(before, after, strict=True)]
        assert same == [True, True, False, True, True, True]

    def test_a_loop_of_ones_own_hides_and_merges_with_plain_jax(self):
        pipe, (x, _) = stacked(), ref.regression(8)
        tx, chosen = optax.adamw(1e-2), {"trainable": "*/bias"}
        state = pipe.init_train_state(jax.random.key(0), x, tx, **chosen)
        gradient, here = pipe.value_and_grad(ref.mse, **chosen), jax.devices()[0]
        params, opt_state = jax.device_put((state.params, state.opt_state), here)
        for _ in range(2):
            variables = pipe.place([{"params": own} for own in params])
            _, grads = gradient(variables, x, x)
            # As in the guide.
            free = jax.tree.map(
                lambda g, p: None if g is None else p, grads, params, is_leaf=is_none
            )
            grads, free = jax.device_put((grads, free), here)
            updates, opt_state = tx.update(grads, opt_state, free)
            params = jax.tree.map(
                lambda p, u: p if u is None else p + u, params, updates
            )
        step = pipe.train_step(ref.mse, tx, **chosen)
        for _ in range(2):
            state, _ = step(state, x, x)
        ref.assert_close(state.params, params, ref.FLOAT32)

    def test_statistics_of_frozen_layers_go_on(self):
        layers = [ref.dense(5), nn.BatchNorm(), nn.BatchNorm(use_running_average=True)]
        pipe, (x, _) = jpipe.pipeline(layers, 2, balance=[1, 2]), ref.regression(8)
        ends = []
        for trainable in (None, "0/kernel"):
            tx = optax.sgd(0.0)
            state = pipe.init_train_state(jax.random.key(0), x, tx, trainable=trainable)
            step = pipe.train_step(ref.mse, tx, trainable=trainable)
            before = ref.on_host(state.model_state)
            state, _ = step(state, x, x)
            ends.append(state.model_state)
            assert np.any(
                before[1]["batch_stats"]["mean"] != ends[-1][1]["batch_stats"]["mean"]
            )
            ref.assert_equal(ends[-1][2], before[2])
        ref.assert_equal(*ends)

    def test_a_state_is_saved_with_its_gaps(self):
        pipe, (x, _) = stacked(), ref.regression(8)
        like = pipe.init_train_state(jax.random.key(1), x, self.TX, trainable="*/bias")
        state = pipe.init_train_state(jax.random.key(0), x, self.TX, trainable="*/bias")
        step = pipe.train_step(ref.mse, self.TX, trainable="*/bias")
        state, _ = step(state, x, x)
        saved = serialization.to_bytes(state)
        restored = pipe.place(serialization.from_bytes(like, saved))
        ref.assert_equal(restored, state)
        ref.assert_equal(step(restored, x, x), step(state, x, x))

    def test_profiles_are_of_what_the_step_trains(self):
        pipe, (x, _) = stacked(), ref.regression(8)
        state = pipe.init_train_state(jax.random.key(0), x, self.TX, trainable="4")
        pipe.train_step(ref.mse, self.TX, trainable="4")

        def sums(*args, **options):
            timeline = pipe.profile_step(state, (x, x), *args, **options)
            return list(timeline.costs.accumulator_bytes)

        trained = [0, 0, 0, 0, (25 + 5) * 4, 4]
        assert sums() == trained
        assert sums(ref.mse, trainable="4") == trained
        assert sums(ref.mse) == [120] * 5 + [124]


class TestWhatItCosts:
    def test_stages_before_the_first_trained_leaf_run_no_backward(self):
        x, _ = ref.regression(8)
        ran = actions(stacked(), "3/bias", x, x)
        assert {a for a in ran if a[1] == "B"} == {
            f"{s}B{m}" for s in (3, 4, 5) for m in range(4)
        }
        split = stacked(schedule="zb_h1")
        ran = actions(split, "3/bias", x, x)
        # A half that has nothing to compute is left out.
        assert {a for a in ran if a[1] in "BIW"} == {
            f"{half}{m}" for half in ("3W", "4I", "5I") for m in range(4)
        }
        ran = actions(split, ["2/bias", "4/bias"], x, x)
        assert {a[:2] for a in ran if a[1] in "BIW"} == {"2W", "3I", "4I", "4W", "5I"}

    def test_frozen_stages_keep_nothing_and_have_no_sums(self):
        pipe, (x, _) = stacked(remat="none"), ref.regression(8)
        kept, _ = costs(pipe, x, "3/bias")
        assert not np.any(kept.residual_bytes[1:3])
        assert kept.accumulator_bytes == [0, 0, 0, 5 * 4, 0, 4]

    def test_a_frozen_weight_needs_no_input(self):
        """The gradient of a kernel reads the input of its layer; that of a bias not."""
        pipe, (x, _) = stacked(remat="none"), ref.regression(8)
        residuals = []
        for trainable in (None, "*/bias"):
            residuals.append(costs(pipe, x, trainable)[0].residual_bytes[1:5])
        assert np.all(np.array(residuals[0]) == 2 * 5 * 4)
        assert not np.any(residuals[1])

    def test_equal_stages_with_equal_selections_share_their_programs(self):
        pipe, (x, _) = stacked(), ref.regression(8)
        _, works = costs(pipe, x, ["1/*", "2/*", "3/bias"])
        first, second, third = (works.derivatives(s, 0, "full") for s in (1, 2, 3))
        assert second is not third
        assert first is not second  # nobody wants the gradient of its input
        _, works = costs(pipe, x, "*/bias")
        assert len({works.derivatives(s, 0, "full") for s in range(1, 5)}) == 1

    def test_the_plan_says_what_is_trained(self):
        pipe, (x, _) = stacked(), ref.regression(8)
        actions(pipe, "4/bias", x, x)
        pipe.apply(pipe.init(jax.random.key(0), x), x)
        trained = [stage.num_trained for stage in pipe.plan.stages]
        assert trained == [0, 0, 0, 0, 5, 0]
        assert "30 (5 trained)" in str(pipe)
        assert "30 (0 trained)" in str(pipe)
