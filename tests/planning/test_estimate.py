"""What layers cost on paper: the bytes of a pipeline, and seconds by hand."""

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn

import jpipe
from jpipe._functions._objective import Objective
from jpipe._layers import _rng
from jpipe._run._costs import costs_of

from .. import reference as ref
from .models import MODELS, X, profile


def pipeline_of(name, remat="min_cut"):
    """A pipeline with a stage for each layer, traced with its loss, and its costs."""
    model = MODELS[name]
    layers = model.layers()
    devices = [jax.devices()[0]] * len(layers)
    pipe = jpipe.pipeline(layers, 2, schedule="gpipe", remat=remat, devices=devices)
    programs = pipe._cache
    visits, _ = programs.expected(programs.sample(model.x))
    variables = [visit.variables for visit in visits]
    find = programs.gradients(Objective(model.loss))
    gradient = find(variables, model.x, model.targets, _rng.key_spec(), True)
    works, batch = gradient.works, gradient.batch
    return pipe, costs_of(gradient.program, works, batch, pipe.schedule.placement)


@pytest.mark.parametrize("name", ["norms", "skips"])
def test_bytes_and_parameters_are_those_of_a_pipeline_of_these_layers(name):
    made = profile(name, measure=False)
    pipe, costs = pipeline_of(name)
    count = len(made.layers)
    assert [layer.name for layer in made.layers] == [
        *(name for stage in pipe.plan.stages for name in stage.layers)
    ]
    stages = pipe.plan.stages
    assert [x.num_params for x in made.layers] == [s.num_params for s in stages]
    assert [x.param_bytes for x in made.layers] == [s.param_bytes for s in stages]
    held = [x.param_bytes + x.state_bytes for x in made.layers]
    # Beside constants: the row of a batch, numbers of micro-batches, a share.
    stays = zip(held, costs.parameter_bytes, strict=True)
    assert all(0 <= beside - own <= 32 for own, beside in stays)
    assert made.microbatch_size == 4
    entering = [made.input_bytes, *(x.output_bytes for x in made.layers[:-1])]
    assert entering == [row[0] for row in costs.boundary_bytes]
    returning = [row[0] for row in costs.cotangent_bytes[1:]]
    assert [x.cotangent_bytes for x in made.layers[:-1]] == returning
    assert [tuple(vars(skip).values())[1:5] for skip in made.skips] == [
        (s, t, size[0], gradient[0]) for s, t, size, gradient in costs.skips
    ]
    assert len(made.skips) == (name == "skips")
    assert made.layers[-1].output_bytes == made.layers[-1].cotangent_bytes == 0
    assert count == len(pipe.plan.stages)


@pytest.mark.parametrize(
    ("name", "mode"),
    [("norms", "min_cut"), ("skips", "full")],
)
def test_kept_bytes_are_those_of_one_stage_per_layer(name, mode):
    made = profile(name, measure=False)
    # What a plan of "none" says of "full" is what a stage is given.
    pipe, _ = pipeline_of(name, "none" if mode == "full" else mode)
    kept = [stage.kept[mode] for stage in pipe.plan.stages]
    assert [layer.kept_bytes[mode] for layer in made.layers] == kept
    assert sum(kept) > 0


def test_of_tied_layers_the_first_owns_what_others_use():
    made = profile("tied", measure=False)
    assert made.ties == ((0, 2),)
    assert [layer.num_params for layer in made.layers] == [66, 42, 0]
    assert profile("skips", measure=False).ties == ()


def test_a_skip_that_is_the_output_too_is_known():
    def keep(x):
        jpipe.stash("x", x := jnp.sin(x))
        return x

    def add(x):
        return x + jpipe.pop("x")

    (skip,) = jpipe.profile([keep, jnp.tanh, add], X, measure=False).skips
    assert skip.is_output
    (skip,) = profile("skips", measure=False).skips
    assert not skip.is_output


def test_an_estimate_is_the_same_each_time_and_compiles_nothing(caplog):
    with jax.log_compiles(), caplog.at_level("WARNING"):
        first = profile("norms", measure=False)
        assert "Compiling" not in caplog.text
    assert profile("norms", measure=False) == first
    model = MODELS["norms"]
    specs = jax.eval_shape(lambda x: x, (model.x, model.targets))
    options = {"num_microbatches": 2, "loss": model.loss, "targets": specs[1]}
    same = jpipe.profile(model.layers(), specs[0], measure=False, **options)
    assert same == first


# Bytes and operations so slow that only one of them counts.
BYTES = {"peak_flops": 1e30, "memory_bandwidth": 1.0}
FLOPS = {"peak_flops": 1.0, "memory_bandwidth": 1e30}


def times(layer):
    return layer.forward, layer.backward, layer.input_grad, layer.weight_grad


THREE = [nn.Dense(5, use_bias=False), lambda x: x * x, nn.Dense(3, use_bias=False)]


def test_seconds_of_operations_by_hand():
    made = jpipe.profile(THREE, jnp.ones((2, 7)), measure=False, **FLOPS)
    first, _, last = map(times, made.layers)
    assert first == (140, 140, 0, 140)
    assert last == (60, 120, 60, 60)
    assert made.layers[0].flops == 140


def test_seconds_of_bytes_by_hand():
    made = jpipe.profile(THREE, jnp.ones((2, 7)), measure=False, **BYTES)
    first, middle, last = map(times, made.layers)
    product = 4 * (2 * 7 + 7 * 5 + 2 * 5)
    assert first[0] == product
    # It is transposed where it is written.
    assert first[3] == first[1] == product + 2 * 4 * 7 * 5
    # What comes in and what goes out: all in between is fused.
    assert middle == (2 * 40, 3 * 40, 3 * 40, 0)
    assert last[0] == 4 * (2 * 5 + 5 * 3 + 2 * 3)
    assert last[1] == last[2] + last[3]


def test_a_lookup_reads_what_it_gives():
    tokens = jnp.zeros((2, 3), jnp.int32)
    small, large = (
        jpipe.profile([nn.Embed(count, 4)], tokens, measure=False, **BYTES).layers[0]
        for count in (10, 1000)
    )
    assert small.forward == large.forward
    assert large.backward > 50 * small.backward  # a gradient of the whole table


def test_a_loop_takes_what_its_body_takes_as_often_as_it_turns():
    def looping(x):
        return jax.lax.scan(lambda c, _: (c @ jnp.ones((4, 4)), None), x, None, 10)[0]

    made = jpipe.profile([looping], jnp.ones((2, 4)), measure=False, **FLOPS)
    assert made.layers[0].forward == pytest.approx(10 * 2 * 2 * 4 * 4, rel=0.1)


def test_what_is_frozen_has_no_backward():
    layers = [ref.dense(6), ref.dense(6), ref.dense(6)]
    made = jpipe.profile(layers, X, measure=False, trainable="1/*")
    first, second, third = made.layers
    assert times(first)[1:] == (0, 0, 0)
    assert set(first.kept_bytes.values()) == {0}
    assert second.input_grad == 0
    assert second.weight_grad == second.backward > 0
    assert third.weight_grad == 0
    assert third.input_grad == third.backward > 0
    assert [layer.cotangent_bytes for layer in made.layers] == [0, 8 * 6 * 4, 8 * 6 * 4]


def test_what_every_micro_batch_gets_whole_is_not_cut():
    x = {"x": X, "bias": jnp.ones(5)}
    layers = [lambda x: x["x"] + x["bias"], ref.dense(3)]
    options = {"in_axes": {"x": 0, "bias": None}, "num_microbatches": 3}
    made = jpipe.profile(layers, x, measure=False, **options)
    assert made.microbatch_size == 3  # of 3, 3 and 2
    assert made.input_bytes == 4 * (3 * 5 + 5)


@pytest.mark.parametrize(
    ("layers", "options", "differ"),
    [
        ([nn.Dense(6), jnp.sin, nn.Dense(4)], {}, ["layer 1"]),
        ([nn.Dense(6), jnp.tanh, nn.Dense(4, use_bias=False)], {}, ["layer 2"]),
        ([nn.Dense(7), jnp.tanh, nn.Dense(4)], {}, ["layer 0", "layer 1", "layer 2"]),
        ([nn.Dense(6), jnp.tanh, nn.Dense(4, name="b")], {}, ["layer 2"]),
        (None, {"peak_flops": 1e13}, ["flops per second"]),
        (None, {"train": False}, ["train"]),
    ],
)
def test_a_profile_of_something_else_differs(layers, options, differ):
    own = [nn.Dense(6), jnp.tanh, nn.Dense(4)]
    made = jpipe.profile(own, X, measure=False).made
    other = jpipe.profile(layers or own, X, measure=False, **options).made
    assert [name for name in made if made[name] != other[name]] == differ


def test_a_profile_is_printed_as_a_table():
    made = profile("skips", measure=False)
    first, skip, header, *rows, last = str(made).splitlines()
    assert first.startswith(
        "estimated at 1e+12 flops and 1e+11 bytes per second for a micro-batch of "
        "4 examples (float32[4,5]), jax "
    )
    assert skip == "skip connection 'across': layer 1 to 3, 96 B"
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
        (
            {"num_microbatches": 0, "rounds": 2.0, "targets": X},
            r"num_microbatches=0: .* at least 1; rounds=2.0: .*; targets are for a ",
        ),
        ({"peak_flops": 1e12}, r"peak_flops=.* is for an estimate; give measure=False"),
        (
            {"measure": False, "memory_bandwidth": 0},
            r"memory_bandwidth=0: needs a number above 0",
        ),
        ({"num_microbatches": 9}, r"sample has 8 examples, fewer than"),
        ({"measure": False, "in_axes": 3}, r"sample of shape \(8, 5\) has no axis 3"),
    ],
)
def test_bad_arguments_are_refused(options, says):
    with pytest.raises(ValueError, match=says):
        jpipe.profile([ref.dense(3)], X, **options)
