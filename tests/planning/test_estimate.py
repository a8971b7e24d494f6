"""What layers cost on paper: the bytes of a pipeline, and seconds by hand."""

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen as nn

import jpipe

from .. import reference as ref
from ..listing import program_of
from .models import MODELS, X, profile


# What becomes of the statistics is not its subject.
@pytest.mark.filterwarnings("ignore:value_and_grad leaves:UserWarning")
@pytest.mark.parametrize(("name", "mode"), [("norms", "min_cut"), ("skips", "full")])
def test_bytes_are_those_of_a_pipeline_with_a_stage_for_each_layer(name, mode):
    made, model = profile(name, measure=False), MODELS[name]
    layers = model.layers()
    options = {"schedule": "gpipe", "remat": "none" if mode == "full" else mode}
    devices = [jax.devices()[0]] * len(layers)
    pipe = jpipe.pipeline(layers, 2, devices=devices, **options)
    variables = pipe.init(jax.random.key(0), model.x)
    find = pipe.value_and_grad(model.loss)
    program_of(find, variables, model.x, model.targets, rngs=jax.random.key(1))
    stages = find.plan.stages
    assert [(x.name,) for x in made.layers] == [tuple(s.layers) for s in stages]
    assert [x.num_params for x in made.layers] == [s.num_params for s in stages]
    assert [x.param_bytes for x in made.layers] == [s.param_bytes for s in stages]
    kept = [stage.residuals[mode] for stage in stages]
    assert [x.residual_bytes[mode] for x in made.layers] == kept
    assert sum(kept) > 0
    assert len(made.skips) == (name == "skips")


def test_the_first_of_tied_layers_owns_their_variables():
    made = profile("tied", measure=False)
    assert made.ties == ((0, 2),)
    assert [layer.num_params for layer in made.layers] == [66, 42, 0]
    assert profile("skips", measure=False).ties == ()


def test_a_skip_that_is_the_output_of_its_layer_is_marked_so():
    def keep(x):
        jpipe.stash("x", x := jnp.sin(x))
        return x

    def add(x):
        return x + jpipe.pop("x")

    def keep_inside(x):
        jpipe.stash("x", jnp.sin(x))
        return x * x

    for first, is_output in ((keep, True), (keep_inside, False)):
        (skip,) = jpipe.profile([first, jnp.tanh, add], X, measure=False).skips
        assert (skip.name, skip.source, skip.target) == ("'x'", 0, 2)
        assert skip.is_output == is_output


def test_a_layer_that_hands_its_input_on_leaves_the_output_to_the_next_reader():
    layers = [jnp.sin, lambda x: x, jnp.tanh]
    made = jpipe.profile(layers, X, num_microbatches=1, measure=False)
    assert made.layers[0].output_bytes == X.nbytes
    (skip,) = made.skips
    assert (skip.source, skip.target, skip.is_output) == (0, 2, True)
    assert made.costs([1, 2]).skips == ()


def test_an_entry_of_a_dictionary_is_a_skip_past_the_layers_that_hand_it_on():
    def use(d):
        return d["h"] + d["kept"]

    layers = [
        lambda x: {"h": jnp.sin(x), "kept": jnp.cos(x)},
        lambda d: {**d, "h": jnp.tanh(d["h"])},
        use,
    ]
    (skip,) = jpipe.profile(layers, X, measure=False).skips
    assert (skip.name, skip.source, skip.target) == ("kept", 0, 2)


# Bytes and operations so slow that only one of them counts.
BYTES = {"peak_flops": 1e30, "memory_bandwidth": 1.0}
FLOPS = {"peak_flops": 1.0, "memory_bandwidth": 1e30}


def times(layer):
    return layer.forward, layer.backward, layer.input_grad, layer.weight_grad


THREE = [nn.Dense(5, use_bias=False), lambda x: x * x, nn.Dense(3, use_bias=False)]


def test_estimated_seconds_are_those_counted_by_hand():
    made = jpipe.profile(
        THREE, jnp.ones((2, 7)), num_microbatches=1, measure=False, **FLOPS
    )
    first, _, last = map(times, made.layers)
    # Gradients of 7 x 5 and of 5 x 3 weights are added to their sums.
    assert first == (140, 140 + 35, 0, 140 + 35)
    assert last == (60, 120 + 15, 60, 60 + 15)
    assert made.layers[0].flops == 140


def test_frozen_stages_have_no_backward():
    layers = [ref.dense(6), ref.dense(6), ref.dense(6)]
    options = {"num_microbatches": 1, "measure": False}
    made = jpipe.profile(layers, X, trainable="1/*", **options)
    first, second, third = made.layers
    assert times(first)[1:] == (0, 0, 0)
    assert set(first.residual_bytes.values()) == {0}
    assert second.input_grad == 0
    assert second.weight_grad == second.backward > 0
    assert third.weight_grad == 0
    assert third.input_grad == third.backward > 0
    assert [layer.cotangent_bytes for layer in made.layers] == [0, 8 * 6 * 4, 8 * 6 * 4]


def test_inputs_without_a_batch_axis_are_not_split():
    x = {"x": X, "bias": jnp.ones(5)}
    layers = [lambda x: x["x"] + x["bias"], ref.dense(3)]
    options = {"in_axes": {"x": 0, "bias": None}, "num_microbatches": 3}
    made = jpipe.profile(layers, x, measure=False, **options)
    assert made.microbatch_size == 3  # of 3, 3 and 2
    assert made.input_bytes == 4 * (3 * 5 + 5)


def test_unused_reads_are_not_counted_as_sent():
    def summed(x):
        return x, x.sum(1, keepdims=True)

    def last(given):
        x, total = given
        jnp.sin(x)
        return 2 * total

    made = jpipe.profile(
        [summed, last], jnp.ones((4, 3)), num_microbatches=1, measure=False
    )
    assert [layer.output_bytes for layer in made.layers] == [4 * 4, 4 * 4]


def test_a_profile_is_printed_as_a_table():
    made = profile("skips", measure=False)
    origin, examples, skip, header, *rows, last = str(made).splitlines()
    assert examples == "a micro-batch of 4 examples (float32[4,5])"
    assert origin.startswith(
        "estimated for a device of 1e+12 flops and 1e+11 bytes of memory per second, "
        "and 2e-05 s for each action (peak_flops=, memory_bandwidth=, "
        "action_seconds=), "
    )
    assert skip == "skip connection 'across': layer 0 to 3, 96 B"
    assert header.split()[:7] == [
        *("layer", "forward", "backward", "I", "W", "parameters", "output")
    ]
    assert [row.split()[:2] for row in rows] == [
        [str(i), layer.name] for i, layer in enumerate(made.layers)
    ]
    assert last.split()[0] == "sum"
    assert str(6 * 6 + 3 * 4 + 4 * 7) in last.split()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"num_microbatches": ()}, r"num_microbatches=\(\): give one number or sev"),
        ({"num_microbatches": (4, "2")}, r"num_microbatches='2': needs an int of at"),
        (
            {"num_microbatches": 0, "rounds": 2.0, "targets": X},
            r"num_microbatches=0: .* at least 1; rounds=2.0: .*; targets are for a ",
        ),
        ({"peak_flops": 1e12}, r"peak_flops=.* is for an estimate; give measure=False"),
        ({"num_microbatches": 9}, r"x has 8 examples, fewer than"),
    ],
)
def test_bad_arguments_are_refused(options, says):
    with pytest.raises(ValueError, match=says):
        jpipe.profile([ref.dense(3)], X, **options)


@pytest.mark.parametrize("call", ["profile", "plan"])
def test_a_loss_without_its_targets_is_told_to_type_them(call):
    def loss_fn(outputs, targets):
        return jnp.mean((outputs - targets) ** 2)

    def call_with(loss_fn, **options):
        layers = [ref.dense(3)]
        options |= {"loss_fn": loss_fn, "measure": False}
        if call == "profile":
            return jpipe.profile(layers, X, **options)
        return jpipe.plan(layers, X, optax.sgd(0.1), num_devices=1, **options)

    says = (
        r"loss_fn, loss_fn at .*, was called with targets=\(\), and raised TypeError: "
        r"unsupported operand .*\nType targets=targets beside loss_fn="
    )
    with pytest.raises(TypeError, match=says):
        call_with(loss_fn)
    with pytest.raises(TypeError, match="takes 1 positional argument") as refusal:
        call_with(lambda outputs: jnp.mean(outputs))
    assert "a pipeline calls loss_fn(outputs, targets)" in refusal.value.__notes__[0]
    assert call_with(loss_fn, targets=jnp.ones((8, 3)))
    assert call_with(lambda outputs, _: jnp.mean(outputs))
