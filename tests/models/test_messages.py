"""What errors and warnings of a pipeline of one model say."""

import re
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import errors, nnx
from flax import linen as nn
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jpipe

from .. import reference as ref

KEY = jax.random.key(0)
RNG = np.random.default_rng(2)
X, TARGETS = (RNG.normal(size=(8, n)).astype(np.float32) for n in (6, 3))


def told(pattern: str, says: str) -> str:
    """What an error or a warning tells to type."""
    found = re.search(pattern, says)
    assert found
    return found[1]


class Normed(nn.Module):
    """Two layers, and a norm with running statistics."""

    @nn.compact
    def __call__(self, x, train=False):
        x = nn.BatchNorm(use_running_average=not train)(nn.Dense(8)(x))
        return nn.Dense(3)(nn.relu(x))


class Sum(nn.Module):
    """A model of several inputs."""

    @nn.compact
    def __call__(self, first, second, *, mask=None):
        x = first["x"] + second
        return nn.Dense(3)(nn.Dense(8)(x if mask is None else x * mask))


# What does not fit, and what is said of it.
INPUTS = {
    "too few": (
        lambda: jpipe.inputs({"x": X}, X[:4], mask=X),
        r"batch size:\n  \* input 0\['x'\]: 8, .*\n  \* input 1: 4, .*\n  \* mask: 8,",
    ),
    "a scalar": (
        lambda: jpipe.inputs({"x": X}, X, mask=np.ones(())),
        r"\n  \* mask of shape \(\) has no axis 0",
    ),
    "text": (
        lambda: jpipe.inputs({"x": np.array(["a"])}, X),
        r"\n  \* input 0\['x'\] is an ndarray of dtype <U1",
    ),
}


@pytest.mark.parametrize("name", INPUTS)
def test_inputs_are_named_as_in_the_call(name):
    make, says = INPUTS[name]
    with pytest.raises((TypeError, ValueError), match=says):
        jpipe.pipeline(Sum(), 2, num_stages=2).init(KEY, make())


class Affine(nnx.Module):
    """A model of nnx with an activation, as those of Equinox have one."""

    def __init__(self):
        self.linear = nnx.Linear(6, 3, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return self.linear(x)


@pytest.mark.parametrize(
    "call", ["apply", "value_and_grad", "check", "check_loss", "modules", "init"]
)
def test_a_state_in_the_place_of_variables_is_answered_with_its_variables(call):
    pipe, tx = jpipe.pipeline(nn.Dense(3), 2, num_stages=1), optax.sgd(0.1)
    state = pipe.init_train_state(KEY, X, tx)
    calls = {
        "apply": lambda given: pipe.apply(given, X),
        "value_and_grad": lambda given: pipe.value_and_grad(ref.mse)(given, X, TARGETS),
        "check": lambda given: pipe.check(given, X),
        "check_loss": lambda given: pipe.value_and_grad(ref.mse).check(
            given, X, TARGETS
        ),
        "modules": pipe.modules,
        "init": lambda given: pipe.init_train_state(KEY, X, tx, variables=given),
    }
    with pytest.raises(
        ValueError, match=r"is a TrainState.*of a train state give (.*)"
    ) as refusal:
        calls[call](state)
    calls[call](eval(told(r"of a train state give (.*)", str(refusal.value))))


def test_a_module_of_nnx_in_the_place_of_variables_is_answered_with_its_values():
    module = Affine()
    pipe = jpipe.pipeline(module, 2, num_stages=1)
    with pytest.raises(ValueError, match="variables is an Affine") as refusal:
        pipe.apply(module, X)
    line = told(r"its values: variables = (.*)", str(refusal.value))
    variables = eval(line, {"pipe": pipe, "x": X})
    ref.assert_close(pipe.apply(variables, X), module(X), ref.FLOAT32)


def test_a_state_or_functions_among_the_parameters_of_a_loss_are_answered():
    model: Any = Normed()
    variables = model.init(KEY, X)
    pipe = jpipe.pipeline(model, 2, num_stages=1, devices=jax.devices()[:1])
    state = pipe.init_train_state(KEY, X, optax.sgd(0.1))

    def loss(params, x):
        return jnp.mean(model.apply({**variables, "params": params}, x) ** 2)

    grad_fn = jpipe.value_and_grad(loss, 2, num_stages=1, devices=jax.devices()[:1])
    with pytest.raises(ValueError, match=r"params is a TrainState.*give state"):
        grad_fn(state, X)
    grad_fn(state.params, X)
    with pytest.raises(
        TypeError, match=r"(?s)eqx.partition.*params\['act'\] is a PjitF"
    ):
        grad_fn({**state.params, "act": jax.jit(jnp.sin)}, X)
    layer = jpipe.Layer(lambda key, x: {"params": {"act": jnp.sin}}, lambda v, x: x)
    says = r"(?s)eqx.partition.*\['params'\]\['act'\] is"
    with pytest.raises(TypeError, match=says):
        jpipe.pipeline([layer], 2).init(KEY, X)


@pytest.mark.parametrize(
    "given", [X, (X, X), jpipe.inputs(X)], ids=["one", "tuple", "x"]
)
def test_an_input_that_is_missing_is_answered_with_inputs(given):
    def apply(x, y, scale=1.0):
        return x + scale * y

    class Two(nn.Module):
        @nn.compact
        def __call__(self, x, y):
            return nn.Dense(3)(x) + y

    for model in (Two(), apply):
        pipe = jpipe.pipeline(model, 2, num_stages=1)
        with pytest.raises(TypeError, match="missing 1 required") as refusal:
            pipe.init(KEY, given)
        (note,) = (n for n in refusal.value.__notes__ if "all of them as one" in n)
        line = told(r"all of them as one: x = (.*)$", note)
        x = eval(line, {"jpipe": jpipe, "x": TARGETS, "y": TARGETS})
        pipe.apply(pipe.init(KEY, x), x)


def test_an_argument_that_is_missing_inside_a_model_is_no_input_of_it():
    class Inside(nn.Module):
        @nn.compact
        def __call__(self, x):
            call: Any = Sum()
            return call({"x": x})

    with pytest.raises(TypeError, match="missing 1 required") as refusal:
        jpipe.pipeline(Inside(), 2, num_stages=1).init(KEY, X)
    assert not any("jpipe.inputs" in note for note in refusal.value.__notes__)


@pytest.mark.parametrize("is_whole", ["params", "state"])
def test_an_optimizer_explains_gradients_that_are_none(is_whole):
    """Parameters, or the state, are of all leaves, the gradients of a few."""
    pipe = jpipe.pipeline(Normed(), 2, num_stages=2)
    variables: Any = pipe.init(KEY, X)
    params = variables["params"]
    find = pipe.value_and_grad(ref.mse, has_state=True, trainable="*Dense_1*")
    _, grads = find(variables, X, TARGETS)
    adam = pipe.optimizer(optax.adamw(1e-2))
    given = [params] if is_whole == "params" else []
    opt_state = adam.init(params)
    with pytest.raises(ValueError, match="gradients are None") as caught:
        adam.update(grads, opt_state, *given)
    says = str(caught.value)
    assert says.startswith("4 gradients are None")
    assert "grads['BatchNorm_0']['bias'] is the first" in says
    # What the error tells to type is what runs.
    make = told(r"free = (jax\.tree\.map\(.*\)), opt_state", says)
    names = {"jax": jax, "grads": grads, "params": params}
    free = eval(make, names)
    found, _ = adam.update(grads, adam.init(free), free)
    plain, host = optax.adamw(1e-2), ref.on_host((grads, free))
    expected, _ = plain.update(host[0], plain.init(host[1]), host[1])
    ref.assert_close(found, expected, ref.FLOAT32)


BIAS = "variables['params']['Dense_1']['bias']"
# A name in the last layer, what it is given, and what is said of that.
MISFITS = {
    "missing": ("bias", None, f"missing: {BIAS} (3,)"),
    "surplus": (
        "scale",
        np.ones(3, np.float32),
        f"surplus: {BIAS.replace('bias', 'scale')} (3,)",
    ),
    "another shape": (
        "bias",
        np.ones(4, np.float32),
        f"{BIAS} has shape (4,), the model needs (3,)",
    ),
    "integers": (
        "bias",
        np.ones(3, np.int32),
        f"{BIAS} has shape (3,) of int32, the model needs (3,)",
    ),
}


@pytest.mark.parametrize("row", MISFITS)
def test_given_variables_that_do_not_fit_are_named(row):
    name, value, says = MISFITS[row]
    flat = flatten_dict(Normed().init(KEY, X))
    flat["params", "Dense_1", name] = value
    given = unflatten_dict({k: leaf for k, leaf in flat.items() if leaf is not None})
    pipe = jpipe.pipeline(Normed(), 2, num_stages=2)
    says = f"for x of float32[8,6]; one of the two is wrong:\n  * {says}"
    with pytest.raises(ValueError, match=f"{re.escape(says)}$"):
        pipe.init_train_state(KEY, X, optax.sgd(0.1), variables=given)


def test_an_input_that_does_not_fit_the_variables_of_a_model_is_named():
    pipe = jpipe.pipeline(Normed(), 2, num_stages=2)
    variables = pipe.init(KEY, X)
    says = (
        r"x is float32\[8,5\], and the variables fit float32\[8,6\], with which they "
        r"were made or used before.*\['Dense_0'\]\['kernel'\] has shape \(6, \d+\), "
        r"the model needs \(5, \d+\)"
    )
    with pytest.raises(ValueError, match=f"(?s){says}"):
        pipe.apply(variables, X[:, :5])


class Standardized(nn.Module):
    """It holds the mean of the data that it was made with."""

    @nn.compact
    def __call__(self, x):
        mean = self.param("mean", lambda _: x.mean(0))
        return nn.Dense(3)(nn.Dense(8)(x - mean))


def test_given_variables_that_are_made_of_data_are_taken():
    given = Standardized().init(KEY, X)
    pipe = jpipe.pipeline(Standardized(), 2, num_stages=2)
    state = pipe.init_train_state(KEY, X, optax.sgd(0.1), variables=given)
    ref.assert_equal(ref.on_host(state.variables), ref.on_host(given))


def test_state_that_apply_leaves_is_warned_of():
    """A ResNet: its running statistics would stay what init made them."""
    pipe = jpipe.pipeline(Normed(), 2, num_stages=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        variables = pipe.init(KEY, X)
        pipe.apply(variables, X)
    says = r"apply leaves variables\['batch_stats'\] as given.*has_state=True"
    with pytest.warns(UserWarning, match=says) as caught:
        found = pipe.apply(variables, X, train=True)
    assert caught[0].filename == __file__
    parts = [
        Normed().apply(ref.on_host(variables), x, train=True, mutable=["batch_stats"])
        for x in np.split(X, 2)
    ]
    ref.assert_close(found, np.concatenate([y for y, _ in parts]), ref.FLOAT32)


MESH = Mesh(np.array(jax.devices()[:2]), "rows")
ROWS = NamedSharding(MESH, P("rows"))
OVER = {
    "shard_map": lambda x: jax.shard_map(
        jnp.tanh, mesh=MESH, in_specs=P("rows"), out_specs=P("rows")
    )(x),
    "device_put": lambda x: jax.device_put(x, ROWS),
    "device_put in a loop": lambda x: jax.lax.fori_loop(
        0, 2, lambda _, y: jax.device_put(y, ROWS), x
    ),
}


class Over(nn.Module):
    """Two layers, and an operation over devices of its own between them."""

    operation: Any

    @nn.compact
    def __call__(self, x):
        return nn.Dense(3)(self.operation(nn.Dense(8)(x)))


@pytest.mark.parametrize("name", OVER)
def test_a_mesh_of_devices_in_a_program_is_refused(name):
    operation, model = OVER[name], Over(OVER[name])
    says = rf"{name.split()[0]} over 2 devices, {{'rows': 2}}"
    with pytest.raises(ValueError, match=says):
        jpipe.pipeline(model, 2, num_stages=2).init(KEY, X)
    pipe = jpipe.pipeline([nn.Dense(8), operation, nn.Dense(3)], 2)
    with pytest.raises(ValueError, match=says):
        pipe.apply(pipe.init(KEY, X), X)

    def loss(y, targets):
        return ref.mse(operation(y), targets)

    params = nn.Dense(3).init(KEY, X)
    grad_fn = jpipe.value_and_grad(
        lambda params, x, t: loss(nn.Dense(3).apply(params, x), t), 2, num_stages=1
    )
    with pytest.raises(ValueError, match=f"mesh of devices.*(\n.*)*{says}"):
        grad_fn.place(params, X, TARGETS)
    pipe = jpipe.pipeline(Over(jnp.tanh), 2, num_stages=2)
    find, variables = pipe.value_and_grad(loss), pipe.init(KEY, X)
    with pytest.raises(ValueError, match=says):
        find(variables, X, TARGETS)


def test_a_mesh_of_the_one_device_of_all_stages_is_no_fault():
    mesh = Mesh(np.array(jax.devices()[:1]), "rows")
    model = Over(
        lambda x: jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P()))
    )
    pipe = jpipe.sequential(model, 2)
    variables: Any = pipe.init(KEY, X)
    expected = Over(lambda x: x).apply(variables, X)
    ref.assert_close(pipe.apply(variables, X), expected, ref.FLOAT32)


def test_an_object_in_place_of_variables_is_named():
    pipe = jpipe.pipeline(nn.Dense(3), 2, num_stages=1)
    params = pipe.init(KEY, X)["params"]
    says = r"variables has no entry 'params'; wrap parameters as {'params': params}"
    for call in (pipe.apply, jpipe.pipeline(nn.Dense(3), 2, num_stages=1).place):
        with pytest.raises(ValueError, match=says):
            call(params, X)
    with pytest.raises(ValueError, match="is a tuple; a model takes a mapping such as"):
        pipe.apply((params,), X)


def test_packed_inputs_are_shown_by_their_shapes():
    pipe = jpipe.pipeline(nn.Dense(3), 2, num_stages=1)
    packed = jpipe.inputs(X[:, :2], mask=None)
    with pytest.raises(TypeError, match="unexpected keyword argument 'mask'") as caught:
        pipe.apply(pipe.init(KEY, X), packed)
    (note,) = (text for text in caught.value.__notes__ if "by the model" in text)
    assert "whose input was jpipe.inputs(float32[4,2], mask=None); x comes" in note
    assert repr(jpipe.inputs(0, mask=None)) == "jpipe.inputs(0, mask=None)"


class Wider(nn.Module):
    """`Normed`, but for the width of a layer."""

    @nn.compact
    def __call__(self, x, train=False):
        x = nn.BatchNorm(use_running_average=not train)(nn.Dense(9)(x))
        return nn.Dense(3)(nn.relu(x))


@pytest.mark.parametrize("call", ["step", "value_and_grad", "apply", "place"])
def test_a_state_of_another_model_is_compared_leaf_by_leaf(call):
    tx = optax.sgd(0.1)
    other = jpipe.pipeline(Wider(), 2, num_stages=1).init_train_state(KEY, X, tx)
    pipe = jpipe.pipeline(Normed(), 2, num_stages=1)
    calls = {
        "step": lambda: pipe.train_step(ref.mse, tx)(other, X, TARGETS),
        "value_and_grad": lambda: pipe.value_and_grad(ref.mse)(
            other.variables, X, TARGETS
        ),
        "apply": lambda: pipe.apply(other.variables, X),
        "place": lambda: pipe.place(other, X),
    }
    with pytest.raises(ValueError, match="not those of this model") as refusal:
        calls[call]()
    lines = str(refusal.value).splitlines()[1:]
    assert len(lines) >= 3
    kernel = (
        "variables['params']['Dense_0']['kernel'] has shape (6, 9), the model needs"
    )
    assert f"  * {kernel} (6, 8)" in lines


def test_an_error_of_a_model_whose_variables_fit_is_left_as_it_is():
    """Collections that the model does not make may be the user's."""

    class Odd(nn.Module):
        @nn.compact
        def __call__(self, x, train=False):
            if train:
                raise ArithmeticError("odd")
            return nn.Dense(3)(x)

    pipe = jpipe.pipeline(Odd(), 2, num_stages=1)
    variables = {**Odd().init(KEY, X), "notes": {"count": jnp.zeros(3)}}
    with pytest.raises(ArithmeticError, match="odd"):
        pipe.value_and_grad(ref.mse)(variables, X, TARGETS)


def test_modules_of_one_model_can_be_called_wherever_its_variables_are():
    model: Any = Normed()
    devices = jax.devices()[:2]
    pipe = jpipe.pipeline(model, 2, num_stages=2, devices=devices)
    variables = pipe.init(KEY, X)
    spread = {leaf.device for leaf in jax.tree.leaves(variables)}
    assert spread == set(devices)
    expected = model.apply(ref.on_host(variables), X)
    ref.assert_close(pipe.modules(variables)(X), expected, ref.FLOAT32)
    # They are those of the pipeline, which stay.
    assert {leaf.device for leaf in jax.tree.leaves(variables)} == spread


class Named(nn.Module):
    """As those of flax's examples, whose steps are under `jax.pmap`."""

    @nn.compact
    def __call__(self, x, train=False):
        x = nn.BatchNorm(use_running_average=not train, axis_name="batch")(x)
        return nn.Dense(3)(x)


def notes_of(error, call):
    with pytest.raises(error) as refusal:
        call()
    return "\n".join(refusal.value.__notes__)


def test_an_axis_that_a_pipeline_does_not_map_is_answered():
    pipe = jpipe.pipeline(Named(), 2, num_stages=1)
    step = pipe.train_step(ref.mse, optax.sgd(0.1))
    state = pipe.init_train_state(KEY, X, optax.sgd(0.1))
    with pytest.raises(NameError, match="Found an unbound axis name") as refusal:
        step(state, X, TARGETS)
    assert any("drop axis_name=, and" in note for note in refusal.value.__notes__)


class Dropped(nn.Module):
    """A model with a dropout."""

    @nn.compact
    def __call__(self, x, train=False):
        return nn.Dense(3)(nn.Dropout(0.5, deterministic=not train)(x))


def test_a_model_whose_dropout_has_no_key_is_answered():
    pipe = jpipe.pipeline(Dropped(), 2, num_stages=1)
    variables, find = pipe.init(KEY, X), pipe.value_and_grad(ref.mse)
    call = lambda **options: find(variables, X, TARGETS, **options)  # noqa: E731
    notes = notes_of(errors.InvalidRngError, call)
    line = told(r"pipeline: rngs=(jax\.random\.key\(0\)),", notes)
    call(rngs=eval(line))


def test_training_that_the_input_names_is_answered_with_leaving_it_out():
    """``model.apply(variables, x, train=True)`` of the Flax examples, packed as it is.

    Flax would speak of a collection that is not mutable, or of a key.
    """
    x = jpipe.inputs(X, train=True)
    says = r"jpipe\.inputs\(\.\.\., train=True\) holds in evaluation, and where"
    for model in (Normed(), Dropped()):
        pipe = jpipe.pipeline(model, 2, num_stages=2)
        with pytest.raises(errors.FlaxError) as refusal:
            pipe.apply(pipe.init(KEY, X), x)
        texts = [str(refusal.value), *getattr(refusal.value, "__notes__", ())]
        assert any(re.match(says, text) for text in texts)
        assert not any("decode=True" in text for text in texts)
        # What it says to type works.
        state = pipe.init_train_state(KEY, X, optax.sgd(0.1))
        pipe.train_step(ref.mse, optax.sgd(0.1))(state, X, TARGETS)
