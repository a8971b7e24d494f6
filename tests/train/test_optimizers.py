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


def then_descend(*transforms):
    return optax.chain(*transforms, optax.sgd(RATE))


# Optimizers that need nothing but a learning rate.
PLAIN = [
    *("adafactor", "adam", "lamb", "sgd", "contrib.dadapt_adamw", "contrib.dog"),
    *("contrib.dowg", "contrib.muon", "contrib.prodigy"),
    *("contrib.schedule_free_adamw", "contrib.schedule_free_sgd"),
]


# Keyed by the name that is run, with a word on how where it runs several times.
OTHERS = {
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
    "contrib.normalize": lambda: then_descend(contrib.normalize()),
    "add_noise": lambda: then_descend(optax.add_noise(0.1, 0.5, jax.random.key(3))),
    "apply_if_finite": lambda: optax.apply_if_finite(optax.adam(RATE), 3),
    "chain": lambda: optax.chain(
        optax.zero_nans(),
        optax.clip_by_global_norm(0.05),
        optax.masked(optax.add_decayed_weights(0.1), of_rank(2)),
        optax.scale_by_adam(),
        optax.scale_by_schedule(warm_up()),
        optax.scale(-1.0),
    ),
    "clip_by_global_norm": lambda: optax.chain(
        optax.clip_by_global_norm(0.05), optax.adam(RATE)
    ),
    "conditionally_mask": lambda: optax.conditionally_mask(
        optax.adam(RATE), every_other_step
    ),
    "conditionally_transform": lambda: optax.conditionally_transform(
        optax.adam(RATE), every_other_step
    ),
    "flatten": lambda: optax.flatten(optax.adam(RATE)),
    "freeze": lambda: then_descend(optax.freeze(of_rank(2)(model().params))),
    "inject_hyperparams": lambda: optax.inject_hyperparams(optax.adamw)(warm_up()),
    "masked": lambda: optax.masked(optax.adam(RATE), of_rank(1)),
    "multi_transform": lambda: optax.multi_transform(
        {True: optax.adam(RATE), False: optax.sgd(RATE, momentum=0.9)}, of_rank(2)
    ),
    "partition": lambda: optax.partition(
        {True: optax.lamb(RATE), False: optax.set_to_zero()}, of_rank(1)
    ),
    "MultiSteps": lambda: optax.MultiSteps(
        # Its accumulator is of single precision unless told otherwise.
        optax.adam(RATE),
        2,
        accumulator_dtype=jnp.float64,
    ),
    "normalize_by_update_norm": lambda: then_descend(optax.normalize_by_update_norm()),
    "selective_transform": lambda: optax.selective_transform(
        optax.adam(RATE), freeze_mask=of_rank(2)(model().params)
    ),
    "snapshot": lambda: then_descend(optax.snapshot("norm", optax.tree.norm)),
    "zero_nans": lambda: optax.chain(optax.zero_nans(), optax.adam(RATE)),
}


# What looks at one leaf at a time, which are most: five to a row, each has one leaf.
# In the order of the leaves: of bias, kernel, scale, bias and kernel.
EACH_LEAF = [
    *("adabelief", "adadelta", "adamax", "adagrad", "adamw"),
    *("adamaxw", "adan", "nadam", "amsgrad", "nadamw"),
    *("optimistic_adam_v2", "radam", "optimistic_gradient_descent", "rmsprop", "rprop"),
    *("lion", "sign_sgd", "contrib.acprop", "signum", "yogi"),
    *("contrib.ademamix", "contrib.madgrad", "contrib.adopt", "contrib.cocob"),
    "contrib.simplified_ademamix",
    *("fromage", "lars", "clip_by_block_rms", "novograd", "adaptive_grad_clip"),
    *("add_decayed_weights", "centralize", "apply_every", "clip", "ema"),
    *("identity", "keep_params_nonnegative", "scale", "set_to_zero", "trace"),
    *("contrib.split_real_and_imaginary", "named_chain", "stateless"),
    *("stateless_with_tree_map", "with_extra_args_support"),
]


# How those are made that need more than a learning rate.
MADE = {
    "contrib.split_real_and_imaginary": lambda: contrib.split_real_and_imaginary(
        optax.adam(RATE)
    ),
    "adaptive_grad_clip": lambda: then_descend(optax.adaptive_grad_clip(0.01)),
    "add_decayed_weights": lambda: then_descend(optax.add_decayed_weights(0.1)),
    "apply_every": lambda: optax.chain(optax.sgd(RATE), optax.apply_every(2)),
    "centralize": lambda: then_descend(optax.centralize()),
    "clip": lambda: then_descend(optax.clip(0.01)),
    "clip_by_block_rms": lambda: then_descend(optax.clip_by_block_rms(0.01)),
    "ema": lambda: then_descend(optax.ema(0.9)),
    "identity": optax.identity,
    "keep_params_nonnegative": lambda: optax.chain(
        optax.sgd(RATE), optax.keep_params_nonnegative()
    ),
    "named_chain": lambda: optax.named_chain(
        ("moments", optax.scale_by_adam()), ("rate", optax.scale(-RATE))
    ),
    "scale": lambda: optax.scale(-RATE),
    "set_to_zero": optax.set_to_zero,
    "stateless": lambda: optax.stateless(
        lambda updates, params: jax.tree.map(
            lambda g, p: -RATE * g * p, updates, params
        )
    ),
    "stateless_with_tree_map": lambda: optax.stateless_with_tree_map(
        lambda g, p: -RATE * g * jnp.abs(p)
    ),
    "trace": lambda: optax.chain(optax.trace(0.9), optax.scale(-RATE)),
    "with_extra_args_support": lambda: optax.with_extra_args_support(optax.adam(RATE)),
}


def of_each_leaf(names):
    """For each leaf a transformation of its own."""

    def labels(params):
        leaves, treedef = jax.tree.flatten(params)
        assert len(leaves) == len(names)
        return jax.tree.unflatten(treedef, names)

    return optax.partition({name: made(name) for name in names}, labels)


def made(name):
    """A transformation by its name."""
    return MADE[name]() if name in MADE else find(name)(RATE)


# What needs more than gradients, state and parameters, and what optax says.
REFUSED = {
    "lbfgs, with line search": (lambda: optax.lbfgs(RATE), "'value_fn'"),
    "polyak_sgd": (lambda: optax.polyak_sgd(RATE), "'value'"),
    "contrib.momo": (lambda: contrib.momo(RATE), "'value'"),
    "contrib.momo_adam": (lambda: contrib.momo_adam(RATE), "'value'"),
    "contrib.reduce_on_plateau": (contrib.reduce_on_plateau, "'value'"),
    "contrib.sophia": (lambda: contrib.sophia(RATE), "obj_fn must be provided"),
    "contrib.hutchinson_estimator_diag_hessian": (
        contrib.hutchinson_estimator_diag_hessian,
        "obj_fn must be provided",
    ),
    # They clip the gradient of each example; a pipeline adds those up.
    "contrib.differentially_private_aggregate": (
        lambda: contrib.differentially_private_aggregate(1.0, 0.1, jax.random.key(0)),
        "batch dimension",
    ),
    "lookahead": (lambda: optax.lookahead(optax.sgd(RATE), 2, 0.5), "'fast'"),
}


EXCLUDED = {
    "monitor": "refused, in a test of its own",
    "optimistic_adam": "deprecated for optimistic_adam_v2, which runs",
    "contrib.dpsgd": "warns of its own argument; its aggregation is refused",
    "measure_with_ema": "its update is a measurement: a part of monitor",
    "inject_stateful_hyperparams": "deprecated for inject_hyperparams, which runs",
}


CATALOGUE = {
    **{name: lambda name=name: made(name) for name in PLAIN},
    **OTHERS,
    **{
        ", ".join(names): lambda names=names: of_each_leaf(names)
        for names in zip(*[iter(EACH_LEAF)] * 5, strict=True)
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
    layers = [wide[0], Scale(), jnp.tanh, wide[1]]
    pipe = jpipe.pipeline(layers, 2, balance=[1, 2, 1])
    rng = np.random.default_rng(0)
    x, targets = np.split(rng.normal(size=(8, 21)), [11], axis=1)
    params = ref.params_of(pipe.init(jax.random.key(0), x))
    grads = [
        jax.tree.map(lambda leaf: 0.1 * rng.normal(size=leaf.shape), params)
        for _ in range(STEPS)
    ]
    return SimpleNamespace(
        pipe=pipe,
        params=params,
        x=x,
        targets=targets,
        grads=grads,
        gradient=ref.gradient(layers),
    )


def apart(tx, params, grads):
    """Parameters and state after an update for each gradient."""
    state, update = tx.init(params), jax.jit(tx.update)
    for own in grads:
        updates, state = update(own, state, params)
        params = optax.apply_updates(params, updates)
    return params, state


@pytest.mark.parametrize("name", CATALOGUE)
def test_updates_equal_those_on_one_device_and_move_no_parameter(double, name, moved):
    tx, pipe = CATALOGUE[name](), model().pipe
    in_place = pipe.optimizer(tx)
    params, grads = pipe.place(model().params), [*map(pipe.place, model().grads)]
    state = in_place.init(params)
    moved.clear()
    for own in grads:
        updates, state = in_place.update(own, state, params)
        params = optax.apply_updates(params, updates)
    # Ten is the smallest vector of parameters; some optimizers have shorter ones.
    largest = max((size for size, *_ in moved), default=0)
    assert (largest >= 10) == (name in MOVING)
    expected = apart(tx, model().params, model().grads)
    ref.assert_close((params, state), expected, ref.FLOAT64)


def on_one_device(tx, batches):
    """Parameters and state after a step per batch, with plain optax."""
    params, state, update = model().params, tx.init(model().params), jax.jit(tx.update)
    for x in batches:
        _, grads = model().gradient(params, x, model().targets)
        updates, state = update(grads, state, params)
        params = optax.apply_updates(params, updates)
    return params, state


def in_the_pipeline(tx, batches):
    """The same from train steps."""
    pipe = model().pipe
    state = pipe.init_train_state(jax.random.key(0), model().x, tx)
    step = pipe.train_step(ref.mse, tx)
    for x in batches:
        state, _ = step(state, x, model().targets)
    return state.params, state.opt_state


@pytest.mark.parametrize(
    "name", ["adam", "lamb", "MultiSteps", "conditionally_transform", "masked"]
)
def test_whole_steps_equal_those_on_one_device(double, name):
    tx, batches = CATALOGUE[name](), [model().x] * STEPS
    expected = on_one_device(tx, batches)
    ref.assert_close(in_the_pipeline(tx, batches), expected, ref.FLOAT64)


@pytest.mark.parametrize("name", ["apply_if_finite", "zero_nans", "chain"])
def test_a_batch_without_a_finite_loss_does_what_it_does_on_one_device(double, name):
    tx = CATALOGUE[name]()
    x = model().x
    batches = [x, np.where(x == x[0, 0], np.nan, x), x]
    actual = in_the_pipeline(tx, batches)
    expected = on_one_device(tx, batches)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(expected[0]))
    ref.assert_close(actual, expected, ref.FLOAT64)
    if name == "apply_if_finite":
        assert int(actual[1].total_notfinite) == 1
        # As if there had been no such batch.
        ref.assert_close(actual[0], on_one_device(tx, [x, x])[0], ref.FLOAT64)


@pytest.mark.parametrize(
    ("name", "count"), [("sgd, momentum", 0), ("adam", 2), ("clip_by_global_norm", 12)]
)
def test_an_update_moves_a_handful_of_scalars(double, moved, name, count):
    """Nothing; the count to two other devices; the norm there and back."""
    pipe, tx = model().pipe, model().pipe.optimizer(CATALOGUE[name]())
    params, grads = pipe.place(model().params), pipe.place(model().grads[0])
    state = tx.init(params)
    moved.clear()
    tx.update(grads, state, params)
    assert {size for size, *_ in moved} <= {1}
    assert len(moved) <= count
    assert bool(moved) == bool(count)


@pytest.mark.parametrize("name", REFUSED)
def test_what_needs_more_than_gradients_is_refused_with_what_to_type(double, name):
    make, says = REFUSED[name]
    with pytest.raises((TypeError, ValueError, AttributeError), match=says) as refusal:
        model().pipe.init_train_state(jax.random.key(0), model().x, make())
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
