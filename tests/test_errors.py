"""Errors say what was given, what was needed and what to type; all at once.

Everything here goes through the public API, and nothing is left half-made.
"""

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

import jpipe
from jpipe.schedules import Schedule, ScheduleError, gpipe

KEY = jax.random.key(0)
X = np.arange(12, dtype=np.float32).reshape(4, 3) / 12
TARGETS = np.ones((4, 2), np.float32)


def mse(outputs, targets):
    return jnp.mean((outputs - targets) ** 2)


def says(*parts: str) -> str:
    """A pattern: these texts, literally, in this order, with anything between."""
    return "(?s)" + ".*".join(map(re.escape, parts))


def two_stages() -> list[Any]:
    return [nn.Dense(5), nn.relu, nn.Dense(2)]


@pytest.fixture(scope="module")
def pipe():
    return jpipe.pipeline(two_stages(), num_microbatches=2, balance=[2, 1])


@pytest.fixture(scope="module")
def variables(pipe):
    return pipe.init(KEY, X)


# ------------------------------------------------------------------- the layers


def test_no_layers():
    for make in (jpipe.pipeline, jpipe.sequential):
        with pytest.raises(ValueError, match=says("stages=[]", "at least one layer")):
            make([], 2)


def test_layers_that_are_no_layers_are_all_listed():
    listed = [
        3,
        nn.Dense,
        nn.relu,
        nnx.Module(),
        nn.Dense(2),
        "relu",
    ]
    with pytest.raises(TypeError, match=r"module, a jpipe\.Stage or a func") as refusal:
        jpipe.pipeline(listed, 2)
    faults = [
        r"layer 0: 3 is an? int",
        r"layer 1: Dense is a class; write Dense\(\.\.\.\)",
        r"layer 3: Module is an nnx module without __call__",
        r"layer 5: 'relu' is a str",
    ]
    lines = str(refusal.value).splitlines()[1:]
    assert len(lines) == len(faults)
    for line, fault in zip(lines, faults, strict=True):
        assert re.fullmatch(rf"  \* {fault}", line)


@pytest.mark.parametrize("make", [jpipe.pipeline, jpipe.sequential])
def test_one_layer_in_place_of_a_sequence(make):
    with pytest.raises(
        TypeError, match=says("needs a sequence of layers", "[nn.Dense")
    ):
        make(nn.Dense(2), 2)


def test_variables_of_a_model_that_does_not_share():
    shared = nn.Dense(3)
    pipe = jpipe.pipeline([shared, nn.relu, shared, nn.relu], 2)
    apart = jpipe.pipeline([nn.Dense(3), nn.relu, nn.Dense(3), nn.relu], 2)
    with pytest.raises(ValueError, match=says("surplus: variables[2]['params']")):
        pipe.apply(apart.init(KEY, X), X)


# ---------------------------------------------------- numbers, balance, devices


@pytest.mark.parametrize("number", [0, -3])
def test_fewer_than_one_microbatch(number):
    match = says(f"num_microbatches={number}", "at least 1")
    with pytest.raises(ValueError, match=match):
        jpipe.pipeline(two_stages(), number)


@pytest.mark.parametrize("number", [True, 2.0, "2", None])
def test_number_of_microbatches_that_is_no_int(number):
    match = says(f"num_microbatches={number!r} is a {type(number).__name__}", "an int")
    with pytest.raises(TypeError, match=match):
        jpipe.pipeline(two_stages(), number)


def test_numpy_numbers_are_numbers():
    number = np.int64(2)
    pipe = jpipe.pipeline(two_stages(), number, balance=np.array([2, 1]))
    assert (pipe.num_microbatches, pipe.num_stages) == (2, 2)


@pytest.mark.parametrize(
    ("balance", "parts"),
    [
        ([1, 1], ["balance=[1, 1]", "its sum is 2", "3 layers"]),
        ([3, 0], ["balance=[3, 0]", "every stage needs at least one layer"]),
        ([4, -1], ["balance=[4, -1]", "every stage needs at least one layer"]),
        ([0, 4], ["at least one layer", "its sum is 4, the model has 3 layers"]),
        ([], ["balance=[]", "its sum is 0"]),
        (
            "time",
            ["balance='time'", "number of layers of each stage", "balance=[2, 1]"],
        ),
    ],
    ids=str,
)
def test_balance_that_does_not_fit(balance, parts):
    with pytest.raises(ValueError, match=says(*parts)):
        jpipe.pipeline(two_stages(), 2, balance=balance)


@pytest.mark.parametrize("balance", [3, [1.0, 2], [True, 2], [[1], [2]]], ids=str)
def test_balance_that_is_no_sequence_of_ints(balance):
    match = says(f"balance={balance!r}", "a sequence of ints")
    with pytest.raises(TypeError, match=match):
        jpipe.pipeline(two_stages(), 2, balance=balance)


@pytest.mark.parametrize("num_layers", [1, 2, 5])
def test_balance_that_an_error_proposes_can_be_typed(num_layers):
    layers = [nn.relu] * num_layers
    with pytest.raises(ValueError, match="such as balance=") as refusal:
        jpipe.pipeline(layers, 2, balance="time")
    proposed = re.search(r"such as balance=\[([\d, ]+)\]", str(refusal.value))
    sizes = [int(size) for size in proposed[1].split(",")]
    assert jpipe.pipeline(layers, 2, balance=sizes).num_stages == len(sizes)


def test_more_stages_than_devices():
    devices = jax.devices()[:2]
    match = says(
        "3 stages need 3 devices, there are 2",
        "devices=[",
        "balance=",
        "jax.config.update('jax_num_cpu_devices', 3)",
    )
    with pytest.raises(ValueError, match=match) as refusal:
        jpipe.pipeline(two_stages(), 2, devices=devices)
    # What it says to type works when it is typed.
    typed = re.search(r"devices=(\[.*?range\(\d+\)\])", str(refusal.value))[1]
    repeated = eval(typed, {"jax": jax})
    assert jpipe.pipeline(two_stages(), 2, devices=repeated).num_stages == 3


def test_more_stages_than_the_machine_has_devices():
    needed = jax.device_count() + 1
    with pytest.raises(
        ValueError,
        match=f"{needed} stages need {needed} devices, there are {needed - 1}",
    ):
        jpipe.pipeline([nn.relu] * needed, 2)


def test_devices_that_are_no_devices():
    with pytest.raises(TypeError, match=says("devices", "'cpu:0'", "jax.Device")):
        jpipe.pipeline([nn.relu], 2, devices=["cpu:0"])


def test_one_device_in_place_of_a_sequence():
    with pytest.raises(TypeError, match=says("devices", "a sequence")):
        jpipe.pipeline([nn.relu], 2, devices=jax.devices()[0])


# ------------------------------------------------------------- schedule and remat


def test_unknown_schedule():
    with pytest.raises(
        ValueError, match=says("unknown schedule 'zb'", "'gpipe', '1f1b'", "Schedule")
    ):
        jpipe.pipeline(two_stages(), 2, schedule="zb")


def test_schedule_that_is_no_schedule():
    with pytest.raises(TypeError, match=says("schedule=3", "int", "'gpipe', '1f1b'")):
        jpipe.pipeline(two_stages(), 2, schedule=3)


def test_builder_that_builds_no_schedule():
    with pytest.raises(TypeError, match=says("schedule", "NoneType", "Schedule")):
        jpipe.pipeline(two_stages(), 2, schedule=lambda num_ranks, number: None)


def test_schedule_for_other_numbers():
    match = says(
        "schedule 'gpipe' is for 2 stages, the pipeline has 3",
        "5 micro-batches, the pipeline has num_microbatches=4",
    )
    with pytest.raises(ValueError, match=match):
        jpipe.pipeline(two_stages(), 4, schedule=gpipe(2, 5))


def test_schedule_that_cannot_run():
    backwards_first = dataclasses.replace(
        gpipe(1, 1), rows=tuple(row[::-1] for row in gpipe(1, 1).rows)
    )
    assert isinstance(backwards_first, Schedule)
    with pytest.raises(ScheduleError, match="0B0 runs before 0F0"):
        jpipe.pipeline([nn.relu], 1, schedule=backwards_first)


def test_unknown_remat():
    known = "'full', 'none', 'except_last' or a policy of jax.checkpoint_policies"
    with pytest.raises(ValueError, match=says("unknown remat 'half'", known)):
        jpipe.pipeline(two_stages(), 2, remat="half")


def test_unknown_remats_are_all_named_as_they_were_given():
    with pytest.raises(ValueError, match=says("unknown remat 'half', 3: choose")):
        jpipe.pipeline(two_stages(), 2, remat=["half", "full", 3])


def test_remat_of_the_wrong_length():
    with pytest.raises(ValueError, match=says("remat has 2 entries for 3 stages")):
        jpipe.pipeline(two_stages(), 2, remat=["full", "none"])


# --------------------------------------------------------------------- the batch


@pytest.fixture(params=["apply", "value_and_grad", "train_step"])
def call(request, pipe, variables):
    """The three ways to give a batch to a pipeline."""
    if request.param == "apply":
        return lambda x: pipe.apply(variables, x)
    if request.param == "value_and_grad":
        return lambda x: pipe.value_and_grad(mse)(variables, x, TARGETS)
    state = pipe.init_train_state(KEY, X, optax.sgd(0.1))
    return lambda x: pipe.train_step(mse, optax.sgd(0.1))(state, x, TARGETS)


def test_leaf_that_is_no_array(call):
    with pytest.raises(TypeError, match=says("jnp.asarray", "x['a'] is", "x['b'] is")):
        call({"a": 3, "b": "text", "c": X})


def test_a_list_of_numbers_does_not_fill_the_screen():
    pipe = jpipe.sequential([jnp.tanh], 2)
    with pytest.raises(TypeError, match=r"x\[19\] is a float: 1.0\n  \* and 28 more$"):
        pipe.apply(({},), [1.0] * 48)


def test_batch_smaller_than_the_number_of_microbatches(pipe, variables):
    match = says("x has 1 examples", "num_microbatches=2", "num_microbatches=1")
    with pytest.raises(ValueError, match=match):
        pipe.apply(variables, X[:1])
    with pytest.raises(ValueError, match=match):
        pipe.value_and_grad(mse)(variables, X[:1], TARGETS[:1])


def test_batch_without_examples(pipe, variables):
    # There is no number of micro-batches that would help.
    with pytest.raises(ValueError, match="x has 0 examples") as refusal:
        pipe.apply(variables, X[:0])
    assert "num_microbatches=1" not in str(refusal.value)


def test_leaves_of_unequal_batch_size(pipe, variables):
    match = says("differ in batch size", "x: 4", "targets: 3")
    with pytest.raises(ValueError, match=match):
        pipe.value_and_grad(mse)(variables, X, TARGETS[:3])
    tree = jpipe.pipeline([lambda inputs: inputs["a"]], 2)
    match = says("differ in batch size", "x['a']: 4", "x['b'][0]: 2")
    with pytest.raises(ValueError, match=match):
        tree.apply(({},), {"a": X, "b": [X[:2]]})


def test_targets_that_are_no_arrays(pipe, variables):
    with pytest.raises(TypeError, match=says("convert with jnp.asarray", "targets is")):
        pipe.value_and_grad(mse)(variables, X, "targets")


@pytest.mark.parametrize(
    ("in_axes", "parts"),
    [
        ("batch", ["in_axes: 'batch' is neither an axis nor None"]),
        (True, ["in_axes: True is neither an axis nor None"]),
        (2, ["x of shape (4, 3) has no axis 2"]),
        (-3, ["x of shape (4, 3) has no axis -3"]),
        ((0, 0), ["in_axes=(0, 0)", "prefix", "x"]),
        (None, ["no leaf has a batch axis", "in_axes"]),
    ],
    ids=str,
)
def test_bad_in_axes(in_axes, parts):
    pipe = jpipe.pipeline([nn.relu], 2, in_axes=in_axes)
    with pytest.raises(ValueError, match=says(*parts)):
        pipe.apply(({},), X)


def test_bad_target_axes(variables):
    pipe = jpipe.pipeline(two_stages(), 2, balance=[2, 1], target_axes=3)
    with pytest.raises(ValueError, match=says("targets of shape (4, 2) has no axis 3")):
        pipe.value_and_grad(mse)(variables, X, TARGETS)


@pytest.mark.parametrize("out_axes", ["batch", None, 0.5], ids=str)
def test_out_axes_that_is_no_axis(out_axes):
    with pytest.raises((TypeError, ValueError), match=says(f"out_axes={out_axes!r}")):
        jpipe.pipeline([nn.relu], 2, out_axes=out_axes).apply(({},), X)


# ---------------------------------------------------------------------- the loss


@pytest.mark.parametrize(
    ("loss_fn", "options", "parts"),
    [
        pytest.param(
            lambda y, t: y - t,
            {},
            ["must return a scalar loss", "float32[2,2]"],
            id="array",
        ),
        pytest.param(
            lambda y, t: jnp.sum(y > t),
            {},
            ["scalar loss of a floating dtype", "int32[]"],
            id="integer",
        ),
        pytest.param(
            lambda y, t: None, {}, ["must return a scalar loss", "None"], id="nothing"
        ),
        pytest.param(
            lambda y, t: (mse(y, t), y),
            {},
            ["must return a scalar loss", "(float32[], float32[2,2])"],
            id="pair without has_aux",
        ),
        pytest.param(
            mse,
            {"has_aux": True},
            ["has_aux=True", "must return (loss, aux)", "float32[]"],
            id="has_aux without pair",
        ),
        pytest.param(
            lambda y, t: (mse(y, t), y, t),
            {"has_aux": True},
            ["has_aux=True", "must return (loss, aux)", "float32[2,2]"],
            id="has_aux with three",
        ),
        pytest.param(
            mse,
            {"reduction": "weighted"},
            ["reduction='weighted'", "(total, weight)", "float32[]"],
            id="weighted without pair",
        ),
        pytest.param(
            lambda y, t: (mse(y, t), jnp.ones(2)),
            {"reduction": "weighted"},
            ["the weight must be a scalar", "float32[2]"],
            id="weights",
        ),
        pytest.param(
            lambda y, t: (y, jnp.float32(2)),
            {"reduction": "weighted"},
            ["the total must be a scalar", "float32[2,2]"],
            id="totals",
        ),
    ],
)
def test_loss_function_that_returns_something_else(
    pipe, variables, loss_fn, options, parts
):
    with pytest.raises(TypeError, match=says(*parts)):
        pipe.value_and_grad(loss_fn, **options)(variables, X, TARGETS)


def test_loss_object_that_cannot_be_hashed(pipe, variables):
    # As any dataclass that is not frozen. `jax.value_and_grad` takes it too.
    @dataclasses.dataclass
    class Scaled:
        scale: float

        def __call__(self, outputs, targets):
            return self.scale * mse(outputs, targets)

    loss, _ = pipe.value_and_grad(Scaled(2.0))(variables, X, TARGETS)
    assert loss == 2 * pipe.value_and_grad(mse)(variables, X, TARGETS)[0]


def test_aux_that_cannot_be_stacked(pipe, variables):
    # Three examples in two micro-batches: aux per example is of two shapes.
    value_and_grad = pipe.value_and_grad(lambda y, t: (mse(y, t), y), has_aux=True)
    with pytest.raises(ValueError, match=says("(2, 1)", "aux: (2, 2) and (1, 2)")):
        value_and_grad(variables, X[:3], TARGETS[:3])


def test_outputs_and_targets_that_do_not_fit(pipe, variables):
    with pytest.raises(TypeError, match="incompatible shapes") as refusal:
        pipe.value_and_grad(mse)(variables, X, np.ones((4, 7), np.float32))
    assert (
        "raised by loss_fn on outputs float32[2,2] and targets float32[2,7]"
        in refusal.value.__notes__
    )


@pytest.mark.parametrize("method", ["value_and_grad", "train_step"])
def test_reduction_and_loss_function_that_are_neither(pipe, method):
    def make(loss_fn, **options):
        rest = (optax.sgd(0.1),) if method == "train_step" else ()
        return getattr(pipe, method)(loss_fn, *rest, **options)

    match = says("unknown reduction 'max'", "'mean', 'sum', 'weighted'")
    with pytest.raises(ValueError, match=match):
        make(mse, reduction="max")
    with pytest.raises(TypeError, match=says("loss_fn=0.5", "(outputs, targets)")):
        make(0.5)


# ----------------------------------------------------------------- the variables


def test_variables_of_another_model_are_compared_leaf_by_leaf(pipe):
    other = jpipe.pipeline(
        [nn.Dense(6), nn.LayerNorm(use_scale=False), nn.Dense(2, use_bias=False)],
        2,
        balance=[2, 1],
    )
    strange = other.init(KEY, X)
    with pytest.raises(ValueError, match="not those of this model") as refusal:
        pipe.apply(strange, X)
    assert str(refusal.value).splitlines()[1:] == [
        "  * missing: variables[2]['params']['bias'] (2,)",
        "  * surplus: variables[1]['params']['bias'] (6,)",
        "  * variables[0]['params']['bias'] has shape (6,), the model needs (5,)",
        "  * variables[0]['params']['kernel'] has shape (3, 6), the model needs (3, 5)",
        "  * variables[2]['params']['kernel'] has shape (6, 2), the model needs (5, 2)",
    ]
    with pytest.raises(ValueError, match="not those of this model"):
        pipe.value_and_grad(mse)(strange, X, TARGETS)


def test_batch_of_another_width_than_the_variables(pipe, variables):
    match = says("variables[0]['params']['kernel'] has shape (3, 5)", "(7, 5)")
    with pytest.raises(ValueError, match=match):
        pipe.apply(variables, np.ones((4, 7), np.float32))


def test_variables_of_the_wrong_length(pipe, variables):
    match = says("2 entries", "3 layers", "one entry per layer", "Pipeline.init")
    for use in (lambda v: pipe.apply(v, X), pipe.place):
        with pytest.raises(ValueError, match=match):
            use(variables[:2])


def test_variables_that_are_no_tuple_of_mappings(pipe, variables):
    with pytest.raises(ValueError, match=says("dict", "3 layers", "Pipeline.init")):
        pipe.apply(variables[0], X)
    with pytest.raises(ValueError, match=says("variables[0] is", "[2] is a list")):
        pipe.apply((3, {}, []), X)


def test_variables_with_a_leaf_that_is_no_array(pipe, variables):
    strange = {"params": {"kernel": "text", "bias": 0.5}}
    with pytest.raises(
        (TypeError, ValueError),
        match=says(
            "variables[2]['params']['bias']", "variables[2]['params']['kernel']"
        ),
    ):
        pipe.apply((*variables[:2], strange), X)


def test_variables_on_other_devices_are_refused_until_they_are_placed(pipe, variables):
    elsewhere = jax.device_put(variables, jax.devices()[7])
    match = says(
        "pipe.place(variables)",
        "stage 0 (layers 0 to 1) runs on",
        f"its variables are on {jax.devices()[7]}",
        "stage 1 (layers 2 to 2) runs on",
    )
    with pytest.raises(ValueError, match=match):
        pipe.apply(elsewhere, X)
    with pytest.raises(ValueError, match=match):
        pipe.value_and_grad(mse)(elsewhere, X, TARGETS)
    expected = pipe.apply(variables, X)
    np.testing.assert_array_equal(pipe.apply(pipe.place(elsewhere), X), expected)


def test_variables_on_the_host_are_refused_until_they_are_placed(pipe, variables):
    on_host = jax.tree.map(np.asarray, variables)
    with pytest.raises(ValueError, match=says("pipe.place(variables)", "stage 0")):
        pipe.apply(on_host, X)
    expected = pipe.apply(variables, X)
    np.testing.assert_array_equal(pipe.apply(pipe.place(on_host), X), expected)


# ---------------------------------------------------------- an exception in a layer


class Unlucky(Exception):
    """An exception that neither JAX nor Flax knows."""


class Fragile(nn.Module):
    """Raises where its test asks it to."""

    when: str

    @nn.compact
    def __call__(self, x, train: bool = False):
        if self.when == "always" or (self.when == "training" and train):
            raise Unlucky("no luck today")
        if self.when == "small" and len(x) == 2:
            raise Unlucky("no luck in small numbers")
        return nn.Dense(2)(x)


def fragile(when: str) -> jpipe.Pipeline:
    layers = [nn.Dense(3), nn.relu, nn.tanh, Fragile(when)]
    return jpipe.pipeline(layers, 2, balance=[1, 1, 2])


def notes_of(call) -> list[str]:
    """The notes of an exception that kept its type."""
    with pytest.raises(Unlucky, match="no luck") as raised:
        call()
    assert type(raised.value) is Unlucky
    return raised.value.__notes__


def test_exception_in_init_names_the_layer():
    notes = notes_of(lambda: fragile("always").init(KEY, X))
    note = "raised by layer 3 (Fragile) of stage 2, whose input was float32[4,3]"
    assert note in notes


def test_exception_in_a_function_and_in_a_stage_names_the_layer():
    def broken(x):
        raise Unlucky("no luck in functions")

    def apply(variables, x):
        raise Unlucky("no luck in stages")

    stage = jpipe.Stage(init=lambda key, x: {}, apply=apply, name="Own")
    for layer, name in ((broken, "broken"), (stage, "Own")):
        notes = notes_of(
            lambda layer=layer: jpipe.pipeline([nn.relu, layer], 2).init(KEY, X)
        )
        assert any(f"layer 1 ({name}) of stage 1" in note for note in notes)


def test_exception_in_apply_and_value_and_grad_names_the_layer():
    # Only micro-batches are small: the whole batch went through.
    pipe = fragile("small")
    variables = pipe.init(KEY, X)
    note = "raised by layer 3 (Fragile) of stage 2, whose input was float32[2,3]"
    assert note in notes_of(lambda: pipe.apply(variables, X))
    run = pipe.value_and_grad(mse)
    assert note in notes_of(lambda: run(variables, X, TARGETS))


def test_exception_in_training_names_the_layer():
    pipe = fragile("training")
    state = pipe.init_train_state(KEY, X, optax.sgd(0.1))
    note = "raised by layer 3 (Fragile) of stage 2, whose input was float32[2,3]"
    run = pipe.value_and_grad(mse)
    assert note in notes_of(lambda: run(state.variables, X, TARGETS))
    step = pipe.train_step(mse, optax.sgd(0.1))
    assert note in notes_of(lambda: step(state, X, TARGETS))


def test_inputs_of_a_layer_are_described_as_a_tree():
    def broken(x):
        raise Unlucky("no luck with trees")

    pipe = jpipe.pipeline([lambda x: {"a": x, "n": x[:, 0] > 0}, broken], 2)
    notes = notes_of(lambda: pipe.init(KEY, X))
    assert any("whose input was {'a': float32[4,3], 'n': bool[4]}" in n for n in notes)


# --------------------------------------------------------------- optimizer and state


@pytest.mark.parametrize("tx", [0.1, "adam", optax.sgd, None])
def test_optimizer_that_is_no_optimizer(pipe, tx):
    match = says(f"is a {type(tx).__name__}", "optax optimizer", "optax.adamw(1e-3)")
    with pytest.raises(TypeError, match=match):
        pipe.train_step(mse, tx)
    with pytest.raises(TypeError, match=match):
        pipe.init_train_state(KEY, X, tx)


ADAM = optax.adam(0.1)


@pytest.fixture(scope="module")
def step(pipe):
    return pipe.train_step(mse, ADAM)


@pytest.fixture(scope="module")
def first_state(pipe):
    """The state at step 0. A step donates what it is given: it gets a `copy`."""
    return pipe.init_train_state(KEY, X, ADAM)


@pytest.fixture(scope="module")
def second_state(step, first_state):
    """What one step makes of it."""
    return on_host(step(copy(first_state), X, TARGETS)[0])


def on_host(state: jpipe.TrainState) -> jpipe.TrainState:
    readable = dataclasses.replace(state, rng=jax.random.key_data(state.rng))
    return jax.tree.map(np.asarray, readable)


def copy(state: jpipe.TrainState) -> jpipe.TrainState:
    return jax.tree.map(jnp.copy, state)


def assert_same(state: jpipe.TrainState, expected: jpipe.TrainState) -> None:
    """The same bits in every leaf."""
    actual = on_host(state)
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(a, e, strict=True)


@pytest.mark.parametrize("state", [None, {"params": ()}, (1, 2)], ids=str)
def test_state_that_is_no_state(step, state):
    match = says(f"state is a {type(state).__name__}", "init_train_state")
    with pytest.raises(TypeError, match=match):
        step(state, X, TARGETS)


@pytest.mark.parametrize(
    "tx",
    [
        pytest.param(optax.sgd(0.1), id="sgd"),
        pytest.param(optax.sgd(0.1, momentum=0.9), id="momentum"),
        pytest.param(ADAM, id="adam"),
        pytest.param(
            optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.1)), id="clip"
        ),
    ],
)
def test_donated_state_cannot_be_used_again(pipe, tx):
    step = pipe.train_step(mse, tx)
    state = pipe.init_train_state(KEY, X, tx)
    step(state, X, TARGETS)
    match = says("earlier step", "the state that it returned", "donate=False")
    with pytest.raises(ValueError, match=match):
        step(state, X, TARGETS)


def test_state_that_was_not_donated_can_be_used_again(pipe, first_state, second_state):
    step = pipe.train_step(mse, ADAM, donate=False)
    state = copy(first_state)
    for _ in range(2):
        assert_same(step(state, X, TARGETS)[0], second_state)


def with_bias(state: jpipe.TrainState, bias: Any) -> jpipe.TrainState:
    first = {**state.params[0], "bias": bias}
    return dataclasses.replace(state, params=(first, *state.params[1:]))


def with_optimizer_state(
    pipe: jpipe.Pipeline, state: jpipe.TrainState, tx: optax.GradientTransformation
) -> jpipe.TrainState:
    other = pipe.init_train_state(KEY, X, tx).opt_state
    return dataclasses.replace(state, opt_state=other)


def unlucky_loss(outputs, targets):
    raise Unlucky("no luck in losses")


# What each call must raise, and the call: of a pipe, its compiled step and a state.
BAD_CALLS = {
    "no state": (TypeError, lambda pipe, step, state: step(state.params, X, TARGETS)),
    "too few examples": (
        ValueError,
        lambda pipe, step, state: step(state, X[:1], TARGETS[:1]),
    ),
    "unequal sizes": (
        ValueError,
        lambda pipe, step, state: step(state, X, TARGETS[:3]),
    ),
    "no array": (TypeError, lambda pipe, step, state: step(state, "x", TARGETS)),
    "another width": (
        ValueError,
        lambda pipe, step, state: step(state, X[:, :2], TARGETS),
    ),
    "targets that do not fit": (
        TypeError,
        lambda pipe, step, state: step(state, X, X),
    ),
    "parameters of another shape": (
        ValueError,
        lambda pipe, step, state: step(with_bias(state, jnp.zeros(4)), X, TARGETS),
    ),
    "parameters on the host": (
        ValueError,
        lambda pipe, step, state: step(
            with_bias(state, np.zeros(5, np.float32)), X, TARGETS
        ),
    ),
    "parameters on another device": (
        ValueError,
        lambda pipe, step, state: step(
            with_bias(state, jax.device_put(jnp.zeros(5), jax.devices()[7])),
            X,
            TARGETS,
        ),
    ),
    "optimizer state with fewer leaves": (
        ValueError,
        lambda pipe, step, state: step(
            with_optimizer_state(pipe, state, optax.sgd(0.1)), X, TARGETS
        ),
    ),
    "optimizer state of another kind": (
        ValueError,
        lambda pipe, step, state: step(
            with_optimizer_state(pipe, state, optax.adabelief(0.1)), X, TARGETS
        ),
    ),
    "step of another optimizer": (
        ValueError,
        lambda pipe, step, state: pipe.train_step(mse, optax.sgd(0.1))(
            state, X, TARGETS
        ),
    ),
    "loss that raises": (
        Unlucky,
        lambda pipe, step, state: pipe.train_step(unlucky_loss, ADAM)(
            state, X, TARGETS
        ),
    ),
    "layer that raises": (
        Unlucky,
        lambda pipe, step, state: fragile("always").train_step(mse, ADAM)(
            state, X, TARGETS
        ),
    ),
}


@pytest.mark.parametrize(("error", "bad_call"), BAD_CALLS.values(), ids=BAD_CALLS)
def test_bad_call_leaves_the_state_as_it_was(
    pipe, step, first_state, second_state, error, bad_call
):
    state = copy(first_state)
    with pytest.raises(error):
        bad_call(pipe, step, state)
    assert_same(step(state, X, TARGETS)[0], second_state)


@pytest.mark.parametrize(
    "tx",
    [
        pytest.param(optax.sgd(0.1), id="fewer leaves"),
        pytest.param(optax.sgd(0.1, momentum=0.9), id="other leaves"),
        # The leaves are as many and of the same shapes: only their meaning differs.
        pytest.param(optax.adabelief(0.1), id="another kind"),
    ],
)
def test_state_of_another_optimizer(pipe, step, first_state, tx):
    other = pipe.init_train_state(KEY, X, tx)
    match = says("opt_state", "init_train_state")
    with pytest.raises(ValueError, match=match):
        step(other, X, TARGETS)
    with pytest.raises(ValueError, match=match):
        pipe.train_step(mse, tx)(copy(first_state), X, TARGETS)


def test_state_of_another_balance_is_refused_until_it_is_placed(
    pipe, step, second_state
):
    other = jpipe.pipeline(two_stages(), 2)
    state = other.init_train_state(KEY, X, ADAM)
    with pytest.raises(ValueError, match=says("not in place", "pipe.place(")):
        step(state, X, TARGETS)
    assert_same(step(pipe.place(state), X, TARGETS)[0], second_state)


def test_optimizer_state_on_another_device_is_refused(pipe, step, first_state):
    # As after placing the parameters of a checkpoint, but not the rest of it.
    moved = jax.device_put(first_state.opt_state, jax.devices()[7])
    state = dataclasses.replace(copy(first_state), opt_state=moved)
    with pytest.raises(ValueError, match=says("not in place", "pipe.place(")):
        step(state, X, TARGETS)
