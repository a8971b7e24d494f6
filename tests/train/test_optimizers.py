"""Any optax transformation gives the update that it gives on one device.

The catalogue names every public transformation of optax: what it runs, what a train
step refuses, and what is left out for a reason. A new one in optax fails a test here
until it has its place.
"""

import inspect
import re
from functools import cache
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from optax import contrib

import jpipe

from .. import reference as ref
from ..slow import slow_except

RATE = 1e-2
STEPS = 3


class Scale(nn.Module):
    """A parameter that is a scalar."""

    @nn.compact
    def __call__(self, x):
        return x * self.param("scale", nn.initializers.constant(1.5), (), x.dtype)


def of_rank(rank):
    """A mask of the parameters that have at least so many axes."""
    return lambda params: jax.tree.map(lambda leaf: leaf.ndim >= rank, params)


def every_other_step(step):
    return step % 2 == 0


def warm_up():
    return optax.warmup_cosine_decay_schedule(0.0, RATE, 2, 5)


def around(name, *args, **options):
    """A transformation of Adam."""
    return lambda: find(name)(optax.adam(RATE), *args, **options)


def jitted_adam():
    """Adam whose update is one call of `jax.jit`, on all parameters."""
    adam = optax.adam(RATE)
    return optax.GradientTransformation(adam.init, jax.jit(adam.update))


def before(name, *args):
    """A transformation of gradients, which SGD descends."""
    return lambda: optax.chain(find(name)(*args), optax.sgd(RATE))


# Keyed by the name that is run, with a word on how where it runs several times. Those
# that are not here need nothing but a learning rate.
MADE = {
    "adafactor, factored": lambda: optax.adafactor(RATE, min_dim_size_to_factor=4),
    "sgd, momentum": lambda: optax.sgd(RATE, momentum=0.9, nesterov=True),
    "noisy_sgd": lambda: optax.noisy_sgd(RATE, key=jax.random.key(0)),
    # Its rule for scalars is missing, on one device too.
    "sm3": lambda: optax.masked(optax.sm3(RATE), of_rank(1)),
    "lbfgs": lambda: optax.lbfgs(RATE, memory_size=2, linesearch=None),
    # A projection to the full rank would project to directions without any gradient,
    # whose rounding errors adam scales up.
    "contrib.galore": lambda: contrib.galore(RATE, rank=2),
    "contrib.mechanize": lambda: contrib.mechanize(optax.sgd(RATE)),
    "contrib.sam": lambda: contrib.sam(optax.sgd(RATE), optax.sgd(RATE)),
    "contrib.schedule_free": lambda: contrib.schedule_free(optax.sgd(RATE), RATE),
    "contrib.normalize": before("contrib.normalize"),
    "add_noise": before("add_noise", 0.1, 0.5, jax.random.key(3)),
    "apply_if_finite": around("apply_if_finite", 3),
    "apply_if_finite, jitted": lambda: optax.apply_if_finite(jitted_adam(), 3),
    "chain": lambda: optax.chain(
        optax.zero_nans(),
        optax.clip_by_global_norm(0.05),
        optax.masked(optax.add_decayed_weights(0.1), of_rank(2)),
        optax.scale_by_adam(),
        optax.scale_by_schedule(warm_up()),
        optax.scale(-1.0),
    ),
    "clip_by_global_norm": before("clip_by_global_norm", 0.05),
    "conditionally_mask": around("conditionally_mask", every_other_step),
    "conditionally_transform": around("conditionally_transform", every_other_step),
    "flatten": around("flatten"),
    "freeze": lambda: before("freeze", of_rank(2)(model().params))(),
    "inject_hyperparams": lambda: optax.inject_hyperparams(optax.adamw)(warm_up()),
    "masked": around("masked", of_rank(1)),
    "multi_transform": lambda: optax.multi_transform(
        {True: optax.adam(RATE), False: optax.sgd(RATE, momentum=0.9)}, of_rank(2)
    ),
    "partition": lambda: optax.partition(
        {True: optax.lamb(RATE), False: optax.set_to_zero()}, of_rank(1)
    ),
    # Its accumulator is of single precision unless told otherwise.
    "MultiSteps": around("MultiSteps", 2, accumulator_dtype=jnp.float64),
    "normalize_by_update_norm": before("normalize_by_update_norm"),
    "selective_transform": lambda: optax.selective_transform(
        optax.adam(RATE), freeze_mask=of_rank(2)(model().params)
    ),
    "snapshot": before("snapshot", "norm", optax.tree.norm),
    "zero_nans": before("zero_nans"),
}
RATE_ALONE = """
    adafactor adam lamb sgd contrib.dadapt_adamw contrib.dog contrib.dowg contrib.muon
    contrib.prodigy contrib.schedule_free_adamw contrib.schedule_free_sgd
"""


# What looks at one leaf at a time, which are most: five to a row, each has one leaf.
# In the order of the leaves: of bias, kernel, scale, bias and kernel.
EACH_LEAF = """
    adabelief, adadelta, adamax, adagrad, adamw
    adamaxw, adan, nadam, amsgrad, nadamw
    optimistic_adam_v2, radam, optimistic_gradient_descent, rmsprop, rprop
    lion, sign_sgd, contrib.acprop, signum, yogi
    contrib.ademamix, contrib.madgrad, contrib.adopt, contrib.cocob, fromage
    contrib.simplified_ademamix, lars, clip_by_block_rms, novograd, adaptive_grad_clip
    add_decayed_weights, centralize, apply_every, clip, ema
    identity, stateless_with_tree_map, scale, named_chain, trace
    contrib.split_real_and_imaginary, stateless, keep_params_nonnegative, sgd, adam
    set_to_zero, with_extra_args_support, sgd, adam, sgd
"""
MADE_FOR_LEAVES = {
    "contrib.split_real_and_imaginary": around("contrib.split_real_and_imaginary"),
    "adaptive_grad_clip": before("adaptive_grad_clip", 0.01),
    "add_decayed_weights": before("add_decayed_weights", 0.1),
    "apply_every": before("apply_every", 2),
    "centralize": before("centralize"),
    "clip": before("clip", 0.01),
    "clip_by_block_rms": before("clip_by_block_rms", 0.01),
    "ema": before("ema", 0.9),
    "identity": before("identity"),
    "keep_params_nonnegative": lambda: optax.chain(
        optax.sgd(RATE), optax.keep_params_nonnegative()
    ),
    "named_chain": lambda: optax.named_chain(
        ("moments", optax.scale_by_adam()), ("rate", optax.scale(-RATE))
    ),
    "scale": lambda: optax.scale(-RATE),
    "set_to_zero": optax.set_to_zero,
    "stateless": before("stateless", lambda g, p: optax.tree.mul(g, p)),
    "stateless_with_tree_map": before("stateless_with_tree_map", lambda g, p: g * p),
    "trace": before("trace", 0.9),
    "with_extra_args_support": around("with_extra_args_support"),
}


def of_each_leaf(names):
    """For each leaf a transformation of its own."""

    def labels(params):
        return jax.tree.unflatten(jax.tree.structure(params), names)

    return optax.partition({name: made(name) for name in names}, labels)


def made(name):
    """A transformation by its name."""
    make = {**MADE, **MADE_FOR_LEAVES}.get(name)
    return make() if make else find(name)(RATE)


# What needs more than gradients, state and parameters, and what optax says.
REFUSED = {
    "lbfgs, with line search": ((RATE,), "'value_fn'"),
    "polyak_sgd": ((RATE,), "'value'"),
    "contrib.momo": ((RATE,), "'value'"),
    "contrib.momo_adam": ((RATE,), "'value'"),
    "contrib.reduce_on_plateau": ((), "'value'"),
    "contrib.sophia": ((RATE,), "obj_fn must be provided"),
    "contrib.hutchinson_estimator_diag_hessian": (
        (),
        "obj_fn must be provided",
    ),
    # They clip the gradient of each example; a pipeline adds those up.
    "contrib.differentially_private_aggregate": (
        (1.0, 0.1, jax.random.key(0)),
        "batch dimension",
    ),
    "lookahead": ((optax.sgd(RATE), 2, 0.5), "'fast'"),
}


EXCLUDED = {
    "monitor": "refused, in a test of its own",
    "optimistic_adam": "deprecated for optimistic_adam_v2, which runs",
    "contrib.dpsgd": "warns of its own argument; its aggregation is refused",
    "measure_with_ema": "its update is a measurement: a part of monitor",
    "inject_stateful_hyperparams": "deprecated for inject_hyperparams, which runs",
}


CATALOGUE = {
    **{name: lambda name=name: made(name) for name in [*RATE_ALONE.split(), *MADE]},
    **{
        row.strip(): lambda row=row: of_each_leaf(row.strip().split(", "))
        for row in EACH_LEAF.strip().splitlines()
    },
}


# What moves whole parameters between devices, and why.
MOVING = {
    "flatten": "it asks for one vector of all parameters",
    "lbfgs": "its loop over what it remembers is one equation for all parameters",
}


def find(name):
    module = contrib if name.startswith("contrib.") else optax
    return getattr(module, name.removeprefix("contrib."))


def transformations():
    """The names of all that optax offers; its parts ``scale_by_*`` are in these."""
    for prefix, module in (("", optax), ("contrib.", contrib)):
        for name, value in vars(module).items():
            if name.startswith(("_", "scale_by_")) or not inspect.isfunction(value):
                continue
            signature = inspect.signature(value)
            if (
                "GradientTransformation" in str(signature.return_annotation)
                or "learning_rate" in signature.parameters
            ):
                yield prefix + name


# A release of optax may have others.
@pytest.mark.slow
def test_the_catalogue_names_all_transformations_of_optax():
    keys = {*CATALOGUE, *REFUSED, *EXCLUDED}
    named = {name for key in keys for name in key.split(", ")}
    found = set(transformations())
    assert len(found) > 80, "the search itself finds too little"
    assert found <= named, "neither run, refused nor excluded"


@cache
def model():
    """One pipeline, its parameters, and gradients for some steps: compiled once."""
    wide = [ref.dense(size, jnp.float64) for size in (12, 10)]
    pipe = jpipe.pipeline([wide[0], Scale(), jnp.tanh, wide[1]], 2, balance=[1, 2, 1])
    rng = np.random.default_rng(0)
    x = rng.normal(size=(8, 11))
    params = ref.params_of(pipe.init(jax.random.key(0), x))
    grads = [
        jax.tree.map(lambda leaf: 0.1 * rng.normal(size=leaf.shape), params)
        for _ in range(STEPS)
    ]
    return SimpleNamespace(pipe=pipe, params=params, x=x, grads=grads)


def updated(update, state, params, grads):
    """Parameters and state after an update for each gradient."""
    for own in grads:
        updates, state = update(own, state, params)
        params = optax.apply_updates(params, updates)
    return params, state


def on_one_device(tx, grads):
    params = model().params
    return updated(jax.jit(tx.update), tx.init(params), params, grads)


def in_the_pipeline(tx, grads, moved):
    pipe = model().pipe
    tx, params, grads = (
        pipe.optimizer(tx),
        pipe.place(model().params),
        [*map(pipe.place, grads)],
    )
    state = tx.init(params)
    moved.clear()
    return updated(tx.update, state, params, grads)


# Of the rows of a single rule, those of several leaves, of the norm of all, of other
# dtypes, of keys, and of updates that come now and then.
QUICK = {
    "adafactor",
    "adafactor, factored",
    "apply_if_finite",
    "apply_if_finite, jitted",
    "chain",
    "clip_by_global_norm",
    "contrib.dog",
    "contrib.muon",
    "contrib.prodigy",
    "contrib.schedule_free",
    "flatten",
    "inject_hyperparams",
    "lamb",
    "lbfgs",
    "masked",
    "multi_transform",
    "MultiSteps",
    "noisy_sgd",
    "normalize_by_update_norm",
    "partition",
    "adabelief, adadelta, adamax, adagrad, adamw",
    "add_decayed_weights, centralize, apply_every, clip, ema",
}


@pytest.mark.parametrize("name", slow_except(QUICK, CATALOGUE))
def test_updates_equal_those_on_one_device_and_move_no_parameter(double, name, moved):
    found = in_the_pipeline(CATALOGUE[name](), model().grads, moved)
    # Ten is the smallest vector of parameters; some optimizers have shorter ones.
    largest = max((size for size, *_ in moved), default=0)
    assert (largest >= 10) == (name in MOVING)
    expected = on_one_device(CATALOGUE[name](), model().grads)
    ref.assert_close(found, expected, ref.FLOAT64)


def test_gradients_that_are_not_finite_are_left_out_as_on_one_device(double, moved):
    tx, (first, second, third) = CATALOGUE["apply_if_finite"](), model().grads
    nan = jax.tree.map(
        lambda leaf: leaf * np.where(leaf == leaf.max(), np.nan, 1), second
    )
    found = in_the_pipeline(tx, [first, nan, third], moved)
    ref.assert_close(found, on_one_device(tx, [first, nan, third]), ref.FLOAT64)
    assert int(found[1].total_notfinite) == 1
    ref.assert_close(found[0], on_one_device(tx, [first, third])[0], ref.FLOAT64)


@pytest.mark.parametrize("name", REFUSED)
def test_optimizers_that_need_more_than_gradients_are_refused_with_advice(double, name):
    (args, says), own = REFUSED[name], find(name.partition(",")[0])
    with pytest.raises((TypeError, ValueError, AttributeError), match=says) as refusal:
        model().pipe.init_train_state(jax.random.key(0), model().x, own(*args))
    lacks_an_argument = says.startswith("'value") or "provided" in says
    note = refusal.value.__notes__[0]
    assert lacks_an_argument == ("type pipe.value_and_grad and tx = pipe.opt" in note)


def test_a_state_that_changes_its_structure_is_refused_with_both(double):
    tx = optax.monitor({"norm": optax.tree.norm})
    match = re.escape("measurements={'norm': float64[]}") + ".*tx.init made one"
    with pytest.raises(ValueError, match=match) as refusal:
        model().pipe.init_train_state(jax.random.key(0), model().x, tx)
    assert "measurements={}" in str(refusal.value)
    assert "type pipe.value_and_grad" in str(refusal.value)
