"""Errors of what a pipeline is given: batches, axes, keys, losses, variables."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import errors, nnx
from flax import linen as nn
from flax.training import train_state

import jpipe

from .model import KEY, TARGETS, X, mse, rows, says, two_stages

LINEAR = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
RNGS = "rngs is 0; needs a random key, such as jax.random.key(0)"


def apply(x=X, **options):
    return lambda pipe, variables: pipe.apply(variables, x, **options)


def gradient(x=X, targets=TARGETS, loss_fn=mse, **options):
    def call(pipe, variables):
        return pipe.value_and_grad(loss_fn)(variables, x, targets, **options)

    return call


def given(change):
    """A forward pass with other variables."""
    return lambda pipe, variables: pipe.apply(change(variables), X)


def state(call):
    """A call that is given a train state in place of variables."""
    return lambda pipe, _: call(pipe, pipe.init_train_state(KEY, X, optax.sgd(0.1)))


def axes(x=X, layers=(nn.relu,), **options):
    """A forward pass through another pipeline, of one function."""
    return lambda *_: jpipe.pipeline(layers, 2, **options).apply(({},), x)


def target_axes(pipe, variables):
    other = jpipe.pipeline(two_stages(), 2, balance=[2, 1], target_axes=3)
    other.value_and_grad(mse)(variables, X, TARGETS)


def profile(pipe, variables):
    pipe.train_step(mse, optax.sgd(0.1)).profile(variables, X, TARGETS)


def under_jit(pipe, variables):
    jax.jit(pipe.value_and_grad(mse))(variables, X, TARGETS)


def init(key):
    return lambda pipe, _: pipe.init(key, X)


CALLS = {
    TypeError: {
        "jnp.asarray ... x['a'] is ... x['b'] is": apply({"a": 3, "b": "text", "c": X}),
        "jnp.asarray, text to numbers first ... targets is a str": (
            gradient(targets="targets")
        ),
        "text to numbers ... targets is an ndarray of dtype <U1": (
            gradient(targets=np.array(["a"] * 4))
        ),
        "rngs is an nnx.Rngs ... rngs.dropout()": apply(rngs=nnx.Rngs(0)),
        RNGS: gradient(rngs=0),
        "rngs['dropout'] is 1 ... jax.random.key(1)": apply(rngs={"dropout": 1}),
        "key is 7 ... such as jax.random.key(7)": init(7),
        "key is None": init(None),
        "key is an nnx.Rngs; needs a random key": init(nnx.Rngs(0)),
        "key is a key<fry>[2]": init(jax.random.split(KEY)),
        "state is a tuple ... init_train_state": profile,
        "outside of jax.jit": under_jit,
    },
    ValueError: {
        "x has 1 examples ... or take fewer micro-batches": gradient(
            X[:1], TARGETS[:1]
        ),
        "x has 0 examples": apply(X[:0]),
        "targets: 3, along axis 0 ... target_axes": gradient(targets=TARGETS[:3]),
        "x['a']: 4 ... x['b'][0]: 2": axes({"a": X, "b": [X[:2]]}),
        "in_axes: 'batch' is neither an axis nor None": axes(in_axes="batch"),
        "x of shape (4, 3) has no axis 2": axes(in_axes=2),
        "in_axes=(0, 0) ... prefix ... x": axes(in_axes=(0, 0)),
        "no leaf has a batch axis ... in_axes": axes(in_axes=None),
        "targets of shape (4, 2) has no axis 3": target_axes,
        "out_axes=(0, None) is not a prefix of outputs": axes(out_axes=(0, None)),
        "out_axes=2": axes(out_axes=2),
        "num_microbatches=1 ... outputs has shape (6,)": axes(layers=[jnp.ravel]),
        "dict ... 3 layers ... Pipeline.init": given(lambda v: v[0]),
        "is a Linear ... give its values: variables = pipe.init(None, x)": given(
            lambda v: LINEAR
        ),
        "of a module of nnx give its values ... variables[1] is a Linear": given(
            lambda v: (v[0], LINEAR, v[2])
        ),
        "is a TrainState ... of a train state give state.variables": state(
            lambda pipe, state: pipe.apply(state, X)
        ),
        "variables is a TrainState ... 3 layers ... give state.variables": state(
            lambda pipe, state: pipe.check(state, X)
        ),
        "of a train state of Flax give {'params': state.params}": given(
            lambda v: train_state.TrainState.create(
                apply_fn=mse, params={}, tx=optax.sgd(0.1)
            )
        ),
        "2 entries ... 3 layers ... one entry per layer": given(lambda v: v[:2]),
        "variables[0] is ... [2] is a list": given(lambda v: (3, {}, [])),
        "x is float32[4,2] ... fit float32[4,3] ... x before the targets": gradient(
            TARGETS, X
        ),
        "variables[0] has no entry 'params'; wrap ... or give state.variables": given(
            lambda v: [own.get("params", {}) for own in v]
        ),
        "pipe.place(variables) ... stage 1 (layers 2 to 2 ... is on cpu:7": given(
            lambda v: jax.device_put(v, jax.devices()[7])
        ),
    },
}


@pytest.mark.parametrize(("call", "error", "match"), rows(CALLS))
def test_calls_with_unusable_arguments_are_refused_each_time(
    pipe, variables, call, error, match
):
    for _ in range(2):  # the second time too
        with pytest.raises(error, match=match):
            call(pipe, variables)


PAIR = "(float32[], float32[2,2])"
AUX, WEIGHTED = {"has_aux": True}, {"reduction": "weighted"}
# What a loss returns, its options, and what the message names.
LOSSES = {
    TypeError: {
        "must return a scalar loss ... float32[2,2]": (lambda y, t: y - t, {}),
        "returned float32[2] ... type .mean(), or .sum() with reduction='sum'": (
            lambda y, t: (y - t).mean(-1),
            {},
        ),
        "of a floating dtype ... int32[]": (lambda y, t: jnp.sum(y > t), {}),
        "must return a scalar loss ... None": (lambda y, t: None, {}),
        f"scalar loss ... {PAIR}": (lambda y, t: (mse(y, t), y), {}),
        "has_aux=True ... must return (loss, aux) ... float32[]": (mse, AUX),
        "aux['at'] is 'end', a str; needs arrays or numbers": (
            lambda y, t: (mse(y, t), {"at": "end"}),
            AUX,
        ),
        "reduction='weighted' ... (total, weight) ... float32[]": (mse, WEIGHTED),
        "the weight must be a scalar ... float32[2]": (
            lambda y, t: (mse(y, t), jnp.ones(2)),
            WEIGHTED,
        ),
    },
}


@pytest.mark.parametrize(("loss", "error", "match"), rows(LOSSES))
def test_losses_that_return_no_scalar_or_no_pair_are_refused(
    pipe, variables, loss, error, match
):
    loss_fn, options = loss
    with pytest.raises(error, match=match):
        pipe.value_and_grad(loss_fn, **options)(variables, X, TARGETS)


def test_unknown_reductions_and_numbers_in_place_of_losses_are_refused(pipe):
    match = says("unknown reduction 'max'", "'mean', 'sum', 'weighted'")
    with pytest.raises(ValueError, match=match):
        pipe.value_and_grad(mse, reduction="max")
    with pytest.raises(TypeError, match=says("loss_fn=0.5", "(outputs, targets)")):
        pipe.train_step(0.5, optax.sgd(0.1))


def test_targets_of_another_shape_are_described(pipe, variables):
    with pytest.raises(TypeError, match="incompatible shapes") as refusal:
        pipe.value_and_grad(mse)(variables, X, np.ones((4, 7), np.float32))
    (note,) = (text for text in refusal.value.__notes__ if "loss_fn" in text)
    line = mse.__code__.co_firstlineno
    assert note == (
        f"raised by loss_fn, mse at {mse.__code__.co_filename}:{line}, on outputs "
        f"float32[2,2] and targets float32[2,7], those of a micro-batch"
    )


@pytest.mark.parametrize(
    "loss_fn", [lambda params, batch: params["w"], lambda y: y.mean()]
)
def test_losses_of_other_arguments_are_answered(pipe, variables, loss_fn):
    with pytest.raises(TypeError) as refusal:
        pipe.value_and_grad(loss_fn)(variables, X, TARGETS)
    (note,) = (text for text in refusal.value.__notes__ if "loss_fn" in text)
    assert re.search(r"; it takes \((params, batch|y)\), and a pipeline calls ", note)
    assert "calls loss_fn(outputs, targets); a loss of parameters and a batch" in note
    assert note.endswith("is for jpipe.value_and_grad")


INPUTS = "several inputs of one model are one argument, x = jpipe.inputs(x, "
STEP = "type step(state, x, targets); it was given (a TrainState, "


def step(*args, **kwargs):
    def call(pipe, variables):
        tx = optax.sgd(0.1)
        state = pipe.init_train_state(KEY, X, tx)
        pipe.train_step(mse, tx)(state, *args, **kwargs)

    return call


class Masked(nn.Module):
    @nn.compact
    def __call__(self, x, mask=None):
        return nn.Dense(2)(x)


PIPELINE = "jpipe.pipeline(layers, num_microbatches=4)"
SGD = optax.sgd(0.1)
# Calls with more, fewer or other arguments than the function has.
MISUSES = {
    TypeError: {
        f"type pipe.train_step(loss_fn, tx) ... num_microbatches= is of {PIPELINE}": (
            lambda pipe, variables: pipe.train_step(mse, SGD, num_microbatches=4)
        ),
        f"'microbatches'; num_microbatches= is of {PIPELINE}": (
            lambda pipe, variables: pipe.value_and_grad(mse, microbatches=4)
        ),
        "loss_fn= is of pipe.value_and_grad(loss_fn) and of pipe.train_step(loss_fn,": (
            lambda pipe, variables: jpipe.pipeline([nn.relu], 2, loss_fn=mse)
        ),
        "'chunks'; type num_microbatches= for chunks=": (
            lambda pipe, variables: jpipe.sequential([nn.relu], chunks=2)
        ),
        "tx= is of pipe.init_train_state(key, x, tx) and of pipe.train_step(": (
            lambda pipe, variables: pipe.value_and_grad(mse, tx=SGD)
        ),
        "type pipe.train_step(loss_fn, tx) ... missing a required argument: 'tx'": (
            lambda pipe, variables: pipe.train_step(mse)
        ),
        "'rtol'; type tolerance= for rtol=": (
            lambda pipe, variables: pipe.check(variables, X, rtol=1e-3)
        ),
        "'microbatch_size'; type microbatch_sizes= for": (
            lambda pipe, variables: pipe.check(variables, X, microbatch_size=(2, 2))
        ),
        "'rng'; type rngs= for rng=": (
            lambda pipe, variables: pipe.apply(variables, X, rng=KEY)
        ),
        "'rng'; the keys of a step follow from state.rng": step(X, TARGETS, rng=KEY),
        "'params'; type variables={'params': params}, of a list": (
            lambda pipe, variables: pipe.init_train_state(KEY, X, SGD, params=variables)
        ),
        "tx is float32[4,3]; needs ... type pipe.init_train_state(key, x, tx)": (
            lambda pipe, variables: pipe.init_train_state(KEY, SGD, X)
        ),
        "tx is <function mse ... type pipe.train_step(loss_fn, tx)": (
            lambda pipe, variables: pipe.train_step(SGD, mse)
        ),
        "state is float32[4,3]; needs ... type step(state, x, targets)": (
            lambda pipe, variables: pipe.train_step(mse, SGD)(X, TARGETS, variables)
        ),
        "fun is <jpipe.Pipeline ... type pipe.value_and_grad(loss_fn)": (
            lambda pipe, variables: jpipe.value_and_grad(pipe, 2)
        ),
        "has_aux is 'yes'; needs True or False": (
            lambda pipe, variables: pipe.train_step(mse, SGD, has_aux="yes")
        ),
        "has_state is 1; needs True or False": (
            lambda pipe, variables: pipe.value_and_grad(mse, has_state=1)
        ),
        "donate is 'no'; needs True or False": (
            lambda pipe, variables: pipe.train_step(mse, SGD, donate="no")
        ),
        "argnums is 'params'; needs the position of an argument": (
            lambda pipe, variables: jpipe.value_and_grad(regress, 2, argnums="params")
        ),
        "microbatch_sizes is 2; needs ... such as (2, 2)": (
            lambda pipe, variables: pipe.check(variables, X, microbatch_sizes=2)
        ),
        "tolerance is '1e-3'; needs a number": (
            lambda pipe, variables: pipe.check(variables, X, tolerance="1e-3")
        ),
        "x is a list of 12 numbers": (
            lambda pipe, variables: pipe.apply(variables, X.tolist())
        ),
        "type grad_fn(params, *args, **kwargs), parameters by position; it was": (
            lambda pipe, variables: jpipe.value_and_grad(regress, 2)()
        ),
        "'targets'; of a batch (x, targets) type step(state, *batch)": (
            step((X, TARGETS))
        ),
        f"{STEP}{{'x': float32[4,3]}}): missing": step({"x": X}),
        f"{STEP}float32[4,3], float32[4,3], float32[4,2]): too many ... {INPUTS}mask": (
            step(X, X, TARGETS)
        ),
        "argument 'rngs'; the keys of a step follow from state.rng": (
            step(X, TARGETS, rngs=KEY)
        ),
        "argument 'train'; a step trains; pipe.apply(": step(X, TARGETS, train=True),
        f"type pipe.apply(variables, x); it was given (a tuple, ... {INPUTS}mask)": (
            lambda pipe, variables: pipe.apply(variables, X, X)
        ),
        f"mask=float32[4,3]): got an ... 'mask'; {INPUTS}mask=mask)": (
            lambda pipe, variables: jpipe.pipeline(Masked(), 2).apply({}, X, mask=X)
        ),
        "'scale'; it takes variables, x, rngs, train": (
            lambda pipe, variables: jpipe.pipeline(Masked(), 2).apply({}, X, scale=X)
        ),
        "'mask'; it takes variables, x, rngs, train": (
            lambda pipe, variables: pipe.apply(variables, X, mask=X)
        ),
        f"type pipe.init(key, x); it was given (key<fry>[], ... {INPUTS}mask)": (
            lambda pipe, variables: pipe.init(KEY, X, X)
        ),
        "type pipe.init(key, x); it was given (key<fry>[]): missing ... 'x'": (
            lambda pipe, variables: pipe.init(KEY)
        ),
        "type pipe.init_train_state(key, x, tx) ... missing ... 'tx'": (
            lambda pipe, variables: pipe.init_train_state(KEY, X)
        ),
        "type f(variables, x, targets) of f = pipe.value_and_grad(loss_fn) ... miss": (
            lambda pipe, variables: pipe.value_and_grad(mse)(variables, X)
        ),
    },
}


MISUSES[ValueError] = {
    "out_axes: 'mean' is neither an axis nor None nor jpipe.MEAN nor": (
        lambda pipe, variables: jpipe.pipeline([nn.relu], 2, out_axes="mean")
    ),
    "target_axes: 'labels' is neither an axis nor None": (
        lambda pipe, variables: jpipe.pipeline([nn.relu], 2, target_axes="labels")
    ),
    "in_axes: 'batch' is neither an axis nor None": (
        lambda pipe, variables: jpipe.value_and_grad(
            regress, 2, in_axes=jpipe.inputs(0, targets="batch")
        )
    ),
    "aux_axes: 'last' is neither an axis nor None": (
        lambda pipe, variables: pipe.train_step(
            mse, SGD, has_aux=True, aux_axes=("last", 0)
        )
    ),
    "aux_axes=0 needs has_aux=True": (
        lambda pipe, variables: jpipe.value_and_grad(regress, 2, aux_axes=0)
    ),
    "a check compares two micro-batches: give at least 2 examples": (
        lambda pipe, variables: pipe.check(variables, X[:1])
    ),
    "compares two micro-batches: give at least 2 examples; the batch has 1": (
        lambda pipe, variables: jpipe.value_and_grad(regress, 2).check(
            jnp.ones((3, 2)), X[:1], TARGETS[:1]
        )
    ),
    "* x: 4, along axis 0 ... * targets: 2, along axis 0": (
        lambda pipe, variables: jpipe.value_and_grad(regress, 2)(
            jnp.ones((3, 2)), X, TARGETS[:2]
        )
    ),
}


@pytest.mark.parametrize(("call", "error", "match"), rows(MISUSES))
def test_calls_with_other_arguments_are_answered_with_the_call(
    pipe, variables, call, error, match
):
    with pytest.raises(error, match=match):
        call(pipe, variables)


def test_an_error_of_a_loss_function_says_with_what_it_was_called():
    def named(params, img, *, mask):
        return mse(img @ params["w"], mask)

    with pytest.raises(TypeError) as refusal:
        jpipe.value_and_grad(named, 2)(jnp.ones((3, 2)), X, mask=TARGETS)
    (note,) = (text for text in refusal.value.__notes__ if "fun" in text)
    line = named.__code__.co_firstlineno
    assert note == (
        f"raised by fun, named at {__file__}:{line}, on params "
        f"float32[3,2] and img float32[2,3] and mask float32[2,2], those of a "
        f"micro-batch"
    )


def test_parameters_that_are_not_wrapped_are_the_only_fault(pipe, variables):
    with pytest.raises(ValueError, match="not those of this model") as refusal:
        pipe.apply([own.get("params", {}) for own in variables], X)
    assert str(refusal.value).splitlines()[1:] == [
        "  * variables[0] has no entry 'params'; wrap parameters as "
        "{'params': params}, or give state.variables"
    ]


def test_an_error_inside_of_a_call_is_not_one_of_its_arguments(pipe, variables):
    def loss_fn(y, targets):
        return mse(y)

    with pytest.raises(TypeError, match=r"^mse\(\) missing 1 required") as refusal:
        pipe.value_and_grad(loss_fn)(variables, X, TARGETS)
    assert not any("it takes" in note for note in refusal.value.__notes__)


def regress(params, x, targets):
    return mse(x @ params, targets)


@pytest.mark.parametrize(
    ("function", "args", "match"),
    [
        (regress, (), "(params, x, targets); it was given (float32[3,2]): missing"),
        (
            regress,
            (X,),
            "missing a required argument: 'targets'; type grad_fn(params, ",
        ),
        (regress, ((X, TARGETS),), "(float32[3,2], (float32[4,3], float32[4,2]))"),
        (mse, (X, TARGETS), "too many ... (params, *args); a loss of (outputs, targ"),
    ],
)
def test_arguments_that_a_loss_function_does_not_take_are_named(function, args, match):
    grad_fn = jpipe.value_and_grad(function, 2, num_stages=1)
    params = jnp.ones((3, 2))
    source = f"fun, {function.__name__} at {function.__code__.co_filename}:"
    for call in (grad_fn, grad_fn.place):
        with pytest.raises(TypeError, match=says(source, match)):
            call(params, *args)


def test_a_function_behind_a_decorator_is_judged_by_what_it_takes_itself():
    def scaled(scale, params, x, targets):
        return regress(params * scale, x, targets)

    @functools.wraps(scaled)
    def wrapped(params, x, targets):
        return scaled("two", params, x, targets)

    grad_fn = jpipe.value_and_grad(wrapped, 2, num_stages=1)
    with pytest.raises(TypeError) as refusal:
        grad_fn(jnp.ones((3, 2)), X, TARGETS)
    assert "it was given" not in str(refusal.value)


def test_examples_in_a_list_are_answered_with_one_array(pipe, variables):
    match = says("leaves differ", "x is a list of 4 arrays", "np.stack(x) is one array")
    with pytest.raises(ValueError, match=match) as refusal:
        pipe.value_and_grad(mse)(variables, list(X), TARGETS)
    assert "reshape" not in str(refusal.value)
    pipe.value_and_grad(mse)(variables, np.stack(list(X)), TARGETS)


TRACED = jax.errors.TracerBoolConversionError


@pytest.mark.parametrize("how", ["loss", "value_and_grad", "jit"])
def test_an_error_of_a_trace_names_the_function_of_the_user(pipe, variables, how):
    def branching(a, *rest):
        return a.mean() if jnp.all(a > 0) else a.sum()

    calls = {
        "loss": lambda: pipe.value_and_grad(branching)(variables, X, TARGETS),
        "value_and_grad": lambda: jpipe.value_and_grad(branching, 2)(X, X),
        "jit": lambda: pipe.jit(branching)(X),
    }
    line = branching.__code__.co_firstlineno
    match = f"while tracing the function branching at {__file__}:{line} for jit"
    with pytest.raises(TRACED, match=re.escape(match)):
        calls[how]()


def test_a_function_that_returns_text_is_named(pipe):
    def text(a):
        return "x"

    with pytest.raises(TypeError, match=says(f"function text at {__file__}:")):
        pipe.jit(text)(X)


WEIGHT = jnp.ones((3, 3))
ALL = jnp.asarray(np.concatenate([X] * 3))


def carried(w, x, num_rows):
    def body(h, _):
        return jnp.tanh(h @ w + x), None

    h, _ = jax.lax.scan(body, jnp.zeros((num_rows, 3)), None, length=2)
    return jnp.mean(h)


def sizes_of(loss_fn, *args):
    """The notes on the sizes of micro-batches: of 3 of 12 examples."""
    grad_fn = jpipe.value_and_grad(loss_fn, 4, num_stages=1)
    with pytest.raises((TypeError, KeyError, ValueError)) as refusal:
        grad_fn(WEIGHT, *args)
    notes = getattr(refusal.value, "__notes__", [])
    return [note for note in notes if note.startswith("micro-batches have 3 of the 12")]


@pytest.mark.parametrize(
    ("loss_fn", "instead"),
    [
        (lambda w, x: jnp.mean(x @ w - ALL), lambda w, x, t: jnp.mean(x @ w - t)),
        (lambda w, x: carried(w, x, 12), lambda w, x, t: carried(w, x, x.shape[0])),
        (
            lambda w, x: jnp.mean(w @ x.reshape(3, 12)),
            lambda w, x, t: jnp.mean(w @ x.reshape(3, x.shape[0])),
        ),
    ],
)
def test_array_of_the_whole_batch_is_answered_with_what_to_type(loss_fn, instead):
    (note,) = sizes_of(loss_fn, ALL)
    assert "is not split; give it as an argument" in note
    assert note.endswith("type x.shape[0] in place of 12")
    # What it says works.
    jpipe.value_and_grad(instead, 4, num_stages=1)(WEIGHT, ALL, ALL)


@pytest.mark.parametrize(
    "loss_fn",
    [
        lambda w, x: w["missing"],
        lambda w: jnp.mean(w),  # is given an argument too many
        lambda w, x: x @ w[0],  # no scalar: float32[3]
        lambda w, x: float(jnp.mean(x @ w)),  # a number of a traced float32[3,3]
        lambda w, x: jnp.mean(x[:, :2] @ jnp.ones((5, 5))),
    ],
)
def test_errors_of_any_size_say_nothing_of_micro_batches(loss_fn):
    assert not sizes_of(loss_fn, ALL)


def test_aux_of_two_shapes_cannot_be_stacked(pipe, variables):
    value_and_grad = pipe.value_and_grad(lambda y, t: (mse(y, t), y), has_aux=True)
    with pytest.raises(ValueError, match=says("(2, 1)", "aux: (2, 2) and (1, 2)")):
        value_and_grad(variables, X[:3], TARGETS[:3])


class OfDict(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        return nn.Dropout(0.5)(x["a"], deterministic=not train)


def test_stream_without_a_key_is_named():
    with pytest.raises(errors.InvalidRngError) as refusal:
        jpipe.pipeline([OfDict()], 2).value_and_grad(mse)(({},), {"a": X}, X)
    notes = refusal.value.__notes__
    assert any("rngs={'dropout': jax" in note for note in notes)
    assert any("type train=False where nothing is to be drawn" in n for n in notes)
    # No matter of the dict that the layer is given.
    assert not any("jpipe.layer(" in note for note in notes)


def test_variables_of_another_model_are_compared_leaf_by_leaf(pipe):
    other = jpipe.pipeline(
        [nn.Dense(6), nn.LayerNorm(use_scale=False), nn.Dense(2, use_bias=False)], 2
    )
    with pytest.raises(ValueError, match="not those of this model") as refusal:
        pipe.apply(other.init(KEY, X), X)
    assert str(refusal.value).splitlines()[1:] == [
        "  * missing: variables[2]['params']['bias'] (2,)",
        "  * surplus: variables[1]['params']['bias'] (6,)",
        "  * variables[0]['params']['bias'] has shape (6,), the model needs (5,)",
        "  * variables[0]['params']['kernel'] has shape (3, 6), the model needs (3, 5)",
        "  * variables[2]['params']['kernel'] has shape (6, 2), the model needs (5, 2)",
    ]


FORMER = {
    "step.profile(state, x, targets) of step = pipe.train_step(loss_fn, tx)": (
        lambda pipe, step, args: pipe.profile_step
    ),
    "step.check(state, x, targets) ... f.check(variables, x, targets)": (
        lambda pipe, step, args: pipe.check(*args, TARGETS, mse)
    ),
    "it was given ... loss_fn=<function ... step.check(state, x, targets)": (
        lambda pipe, step, args: pipe.check(*args, loss_fn=mse, reduction="sum")
    ),
    "step.compile(state, x, targets) ... pipe.compile(variables, x)": (
        lambda pipe, step, args: pipe.compile(step, *args, TARGETS)
    ),
    "variables is a method, a function ... step.compile(state, x, targets)": (
        lambda pipe, step, args: pipe.compile(pipe.apply, args)
    ),
    "variables is <jpipe.TrainStep: mse ... a function ... step.compile(state, x, t": (
        lambda pipe, step, args: pipe.compile(step, args)
    ),
    "type compile, with the arguments of a call": (
        lambda pipe, step, args: jpipe.value_and_grad(mse, 2).program
    ),
    "'TrainStep' object has no attribute 'program'; type compile": (
        lambda pipe, step, args: step.program
    ),
    "'TrainStep' object has no attribute 'lower'; type compile": (
        lambda pipe, step, args: step.lower
    ),
    "'TrainStep' object has no attribute 'schedule'; type .plan.schedule": (
        lambda pipe, step, args: step.schedule
    ),
    "'ValueAndGrad' ... 'num_stages'; type .plan.schedule.num_stages": (
        lambda pipe, step, args: pipe.value_and_grad(mse).num_stages
    ),
    "'Pipeline' ... 'profile'; ... type step.profile(state, x, targets) of": (
        lambda pipe, step, args: pipe.profile
    ),
    "'Pipeline' object has no attribute 'fit'": lambda pipe, step, args: pipe.fit,
}


@pytest.mark.parametrize(("text", "call"), FORMER.items())
def test_a_former_name_is_answered_with_what_to_type(pipe, variables, text, call):
    step = pipe.train_step(mse, optax.sgd(0.1))
    with pytest.raises((AttributeError, TypeError), match=says(text)):
        call(pipe, step, (variables, X))


def test_an_attribute_that_fails_inside_of_a_property_is_named():
    class Titled(jpipe.Pipeline):
        @property
        def title(self):
            return KEY.title

    pipe = Titled.__new__(Titled)
    with pytest.raises(AttributeError, match=says("'PRNGKeyArray' ... 'title'")):
        pipe.title  # noqa: B018
