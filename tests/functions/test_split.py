"""The backward in two halves: what each computes, and that nothing else changes."""

import collections
import itertools

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen as nn

import jpipe
from jpipe import schedules
from jpipe._functions._objective import Objective
from jpipe.schedules import Action

from .. import reference as ref


def grads_of(layers, x, targets, microbatches, **options):
    pipe = jpipe.pipeline(layers, microbatches, **options)
    variables = pipe.init(jax.random.key(0), x)
    value = pipe.value_and_grad(ref.mse)(variables, x, targets)
    return pipe, variables, value


def gradient_of(layers, x, targets, microbatches=2, **options):
    pipe = jpipe.pipeline(layers, microbatches, **options)
    variables = pipe.init(jax.random.key(0), x)
    find = pipe._cache.gradients(Objective(ref.mse))
    return find(variables, x, targets, None, True)


class TestSchedules:
    def test_whole_backwards_give_the_same_bits(self):
        layers = [*ref.mlp()[:3], ref.dense(4)]
        x, targets = ref.regression(16)
        whole = ["gpipe", "gpipe_last_1f1b", "1f1b", "eager_1f1b", "1f1b_v"]
        whole += ["interleaved", "looped_bfs"]
        first, *others = (
            grads_of(layers, x, targets, 8, schedule=name)[2] for name in whole
        )
        for other in others:
            ref.assert_equal(other, first)

    def test_halves_give_the_same_bits_in_every_order_and_ulps_off_the_whole(self):
        layers = [*ref.mlp()[:3], ref.dense(4)]
        x, targets = ref.regression(16)
        # Made to measure: halves only, in an order that is none of the catalogue's.
        costs = schedules.Costs([1, 1.5, 1, 0.8], 3, 1, 1, latency=0.5)
        made = schedules.fit(costs, 4, 8, max_bytes=5)
        assert made.name == "fit"
        assert "B" not in {action.op for row in made.rows for action in row}
        names = ["zb_h2", "zb_v", "v_half", "v_min", "interleaved_zb", made]
        first, *others = (
            grads_of(layers, x, targets, 8, schedule=name)[2]
            for name in ("zb_h1", *names)
        )
        for other in others:
            ref.assert_equal(other, first)
        whole = grads_of(layers, x, targets, 8, schedule="gpipe")[2]
        ref.assert_close(first, whole, 1e-6)  # XLA fuses otherwise: a few ulps

    def test_a_schedule_without_backwards_applies_and_does_not_train(self):
        layers = [ref.dense(4), ref.dense(3)]
        pipe = jpipe.pipeline(layers, 2, schedule="forward_only")
        x, _ = ref.regression(6)
        variables = pipe.init(jax.random.key(0), x)
        expected = ref.compose(layers, ref.params_of(variables), x)
        ref.assert_close(pipe.apply(variables, x), expected, ref.FLOAT32)
        with pytest.raises(
            ValueError, match="'forward_only' has forwards only: it can"
        ):
            pipe.value_and_grad(ref.mse)
        with pytest.raises(ValueError, match="such as schedule='1f1b'"):
            pipe.train_step(ref.mse, optax.sgd(0.1))


def primitives(function, offered):
    """How often each primitive stands in what a function of leaves computes."""
    count = collections.Counter()

    def visit(jaxpr):
        for eqn in jaxpr.eqns:
            inner = [getattr(v, "jaxpr", v) for v in eqn.params.values()]
            inner = [v for v in inner if hasattr(v, "eqns")]
            count[eqn.primitive.name] += not inner
            for sub in inner:
                visit(sub)

    visit(jax.make_jaxpr(function.run)(*read(function, offered)).jaxpr)
    return count


def read(function, offered):
    """Of the leaves that a function is offered, those that it reads."""
    return [offered[i] for i in function.reads]


def backwards_of(gradient, s):
    """Both halves and the whole backward of a stage, each with what it is offered."""
    works = gradient.works
    task, made = works.task(s), works.derivatives(s, 0, works.mode(s, 0))
    results = list(made.forward.results)
    carried, outputs = results[task.num_results :], results[: task.num_outputs]
    given = [*task.weights.specs, *task.x, *task.extra_specs, *carried, *outputs]
    both = [*given, *crossing_of(made)]
    return (made.input_grad, given), (made.weight_grad, both), (made.backward, given)


def crossing_of(derivatives):
    """What the second half is given by the first."""
    return list(derivatives.input_grad.results)[sum(derivatives.task.wanted.x) :]


def halves_and_whole(gradient, s):
    """What both halves and the whole backward of a stage compute."""
    return [primitives(*each) for each in backwards_of(gradient, s)]


class Chain(nn.Module):
    """Two matrix products with a sine between, in one of several wrappings."""

    wrap: str = "plain"

    @nn.compact
    def __call__(self, x):
        def both(first, second, x):
            return jnp.sin(x @ first) @ second

        width = x.shape[-1]
        weights = [
            self.param(name, nn.initializers.lecun_normal(), (width, width), x.dtype)
            for name in ("first", "second")
        ]
        if self.wrap == "jit":
            both = jax.jit(both)
        if self.wrap == "checkpoint":
            both = jax.checkpoint(both)
        if self.wrap == "custom_vjp":
            both = custom(both)
        if self.wrap == "scan":
            both = scanned
        return both(*weights, x)


def custom(function):
    wrapped = jax.custom_vjp(function)

    def forward(first, second, x):
        y, pullback = jax.vjp(function, first, second, x)
        return y, pullback

    wrapped.defvjp(forward, lambda pullback, ct: pullback(ct))
    return wrapped


def scanned(first, second, x):
    stacked = jnp.stack([first, second])
    return jax.lax.scan(lambda x, w: (jnp.sin(x @ w), None), x, stacked)[0]


def chain_gradient(wrap, remat):
    x, targets = jnp.ones((4, 5)), jnp.ones((4, 3))
    layers = [ref.dense(6), Chain(wrap), ref.dense(3)]
    return gradient_of(layers, x, targets, schedule="zb_h1", remat=remat)


class TestWhatTheHalvesCompute:
    @pytest.mark.parametrize("wrap", ["plain", "jit", "custom_vjp"])
    def test_the_first_has_the_products_of_dx_the_second_those_of_dw(self, wrap):
        first, second, whole = halves_and_whole(chain_gradient(wrap, "none"), 1)
        assert first["dot_general"] == second["dot_general"] == 2
        assert whole["dot_general"] == 4

    @pytest.mark.parametrize(
        ("wrap", "remat"),
        [("plain", "full"), ("checkpoint", "none"), ("checkpoint", "full")],
    )
    def test_what_is_recomputed_is_recomputed_once(self, wrap, remat):
        first, second, whole = halves_and_whole(chain_gradient(wrap, remat), 1)
        assert whole["dot_general"] - 4 in (1, 2)  # the forward again
        assert second["dot_general"] == 2
        for name in ("dot_general", "sin", "cos"):
            assert first[name] + second[name] == whole[name]

    def test_a_scan_stays_whole_in_the_first(self):
        first, second, _ = halves_and_whole(chain_gradient("scan", "none"), 1)
        assert first["dot_general"] == 2
        assert second["dot_general"] == 0

    @pytest.mark.parametrize(
        ("wrap", "remat"),
        [
            ("plain", "full"),
            ("plain", "none"),
            ("jit", "min_cut"),
            ("custom_vjp", "none"),
            ("custom_vjp", "min_cut"),
            ("checkpoint", "full"),
            ("scan", "full"),
            ("scan", "min_cut"),
        ],
    )
    def test_gradients_are_those_of_one_device(self, double, wrap, remat):
        layers = [ref.dense(6, jnp.float64), Chain(wrap), ref.dense(3, jnp.float64)]
        x, targets = ref.regression(6, jnp.float64)
        _, variables, value = grads_of(
            layers, x, targets[:, :3], 3, schedule="zb_h1", remat=remat
        )
        params = ref.params_of(variables)
        expected = ref.value_and_grad(layers, params, x, targets[:, :3])
        ref.assert_close(value, expected, ref.FLOAT64)

    @pytest.mark.parametrize("remat", ["full", "none", "min_cut"])
    def test_both_cost_no_more_than_a_tenth_above_the_whole(self, remat):
        x = jnp.ones((8, 32))
        layers = [ref.dense(64), ref.Residual(64)]
        gradient = gradient_of([*layers, ref.dense(4)], x, x[:, :4], remat=remat)

        def flops(function, offered):
            lowered = jax.jit(function.run).lower(*read(function, offered))
            return lowered.compile().cost_analysis()["flops"]

        first, second, whole = (flops(*each) for each in backwards_of(gradient, 1))
        assert first + second <= 1.1 * whole

    def test_nothing_that_follows_from_weights_alone_crosses(self):
        class Scaled(nn.Module):
            @nn.compact
            def __call__(self, x):
                w = self.param("w", nn.initializers.ones, (6, 6), x.dtype)
                return jnp.sin(x @ jnp.exp(w))

        layers = [ref.dense(6), Scaled(), ref.dense(3)]
        x = jnp.ones((4, 5))
        works = gradient_of(layers, x, x[:, :3], schedule="zb_h1", remat="none").works
        crossing = crossing_of(works.derivatives(1, 0, works.mode(1, 0)))
        assert crossing
        assert (6, 6) not in [spec.shape for spec in crossing]


def calls_of(gradient, s):
    """What the calls of a stage compute, by the op of their action."""
    calls = collections.defaultdict(set)
    for instruction in gradient.program.instructions:
        label = instruction.label
        if instruction.source is None and getattr(label, "stage", None) == s:
            calls[label.op].add(instruction.run.function.name)
    return dict(calls)


class TestWhatRuns:
    """What is drawn; a half that has nothing to compute is left out."""

    def test_the_first_stage_has_no_first_half(self):
        gradient = chain_gradient("plain", "full")
        assert calls_of(gradient, 0) == {
            "F": {"forward"},
            "W": {"weight_grad_add_grads"},
        }
        assert calls_of(gradient, 1) == {
            "F": {"forward"},
            "I": {"input_grad"},
            "W": {"weight_grad_add_grads"},
        }

    def test_layers_without_parameters_have_no_second_half(self):
        layers = [ref.dense(6), jnp.sin, ref.dense(3)]
        x = jnp.ones((4, 5))
        gradient = gradient_of(layers, x, x[:, :3], schedule="zb_h1")
        assert calls_of(gradient, 1) == {"F": {"forward"}, "I": {"input_grad"}}

    @pytest.mark.parametrize("remat", ["full", "none"])
    def test_the_forward_with_the_loss_joins_the_first_half(self, remat):
        x = jnp.ones((4, 5))
        layers = [ref.dense(6), ref.dense(3)]
        gradient = gradient_of(layers, x, x[:, :3], schedule="zb_h1", remat=remat)
        assert calls_of(gradient, 1) == {
            "I": {"forward_add_results_input_grad"},
            "W": {"weight_grad_add_grads"},
        }

    @pytest.mark.parametrize("name", ["zb_v", "interleaved", "looped_bfs"])
    def test_neighbours_on_one_rank_move_nothing(self, name):
        schedule = schedules.BY_NAME[name](2, 4)
        layers = [ref.dense(5) for _ in range(schedule.num_stages)]
        x = jnp.ones((8, 5))
        gradient = gradient_of(layers, x, x, 4, schedule=schedule)
        place, devices = gradient.pipe.place, gradient.pipe.devices
        found = collections.Counter(
            (i.source, i.place, i.label.op in "BI", *i.label[1:])
            for i in gradient.program.instructions
            if isinstance(i.label, Action) and i.source is not None
        )
        apart = [
            pair
            for pair in itertools.pairwise(range(schedule.num_stages))
            if devices[pair[0]] != devices[pair[1]]
        ]
        assert found == {
            (place(a), place(b), a > b, a, m): 1
            for pair in apart
            for a, b in (pair, pair[::-1])
            for m in range(4)
        }
