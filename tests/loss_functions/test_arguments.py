"""What `jpipe.value_and_grad` takes besides parameters, and what is not split."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

import jpipe

from .. import reference as ref
from ..slow import slow
from .small_losses import (
    RNG,
    TARGETS,
    WIDE,
    X,
    matrices,
    perceptron,
    plain,
    run,
    squares,
)

KEY = jax.random.key(3)
SENDERS, RECEIVERS = RNG.integers(0, len(X), (2, 30), np.int32)


def graph(params, nodes, edges):
    """Two rounds of messages along more edges than there are nodes."""
    senders, receivers = edges
    for w in params:
        messages = jax.ops.segment_sum(nodes[senders], receivers, len(nodes))
        nodes = jnp.tanh((nodes + messages) @ w)
    return (nodes**2).mean()


def with_boundary(params, inner, boundary, width):
    inside, outside = (perceptron(params, points) for points in (inner, boundary))
    return (inside**2).mean() + width * ((outside - 1) ** 2).mean()


def closing_over_all(params):
    return plain(params, jnp.asarray(X), jnp.asarray(TARGETS))


# A loss, its arguments after the parameters, and options.
WHOLE = {
    "leaves of other lengths": (graph, (X, (SENDERS, RECEIVERS)), {}),
    "two batches": (with_boundary, (X, X[:3], 0.5), {"in_axes": (0, 0, None)}),
    "None for all": (plain, (X, TARGETS), {"in_axes": None}),
    "a scalar": (with_boundary, (X, X, np.float64(0.5)), {}),
    "no argument": (closing_over_all, (), {}),
}


@pytest.mark.parametrize("name", WHOLE)
def test_one_micro_batch_splits_nothing(double, name):
    loss, args, options = WHOLE[name]
    params = matrices(6, 6, 6)
    if loss in (plain, closing_over_all):
        params = matrices(6, 8, 3)
    expected = jax.value_and_grad(loss)(params, *args)
    grad_fn = jpipe.value_and_grad(loss, 1, num_stages=2, **options)
    ref.assert_close(run(grad_fn, params, *args), expected, ref.FLOAT64)
    assert [stage.num_params for stage in grad_fn.plan.stages] != [0, 0]
    assert grad_fn.plan.stages[0].sent_bytes


def test_a_key_may_be_all_that_is_given(double):
    def noisy(params, key):
        x = jnp.asarray(X)
        noise = jax.random.normal(key, x.shape, x.dtype)
        return squares(perceptron(params, x + noise), jnp.asarray(TARGETS))

    params = matrices(6, 8, 3)
    own = jpipe.microbatch_key(KEY, 0)
    expected = jax.value_and_grad(noisy)(params, own)
    grad_fn = jpipe.value_and_grad(noisy, 1, num_stages=2)
    ref.assert_close(run(grad_fn, params, KEY), expected, ref.FLOAT64)
    # Of two micro-batches both would be the whole.
    says = r"no leaf has a batch axis(.|\n)*num_microbatches=1 splits nothing"
    with pytest.raises(ValueError, match=says):
        jpipe.value_and_grad(noisy, 2, num_stages=2).place(params, KEY)
    with pytest.raises(ValueError, match="splits no array: give examples"):
        grad_fn.check(params, KEY)


def pooled(x):
    return jnp.stack([x["few"].sum(0), x["many"].sum(0)])


@pytest.mark.parametrize("is_list", [True, False])
@pytest.mark.parametrize("axes", [0, None])
def test_one_micro_batch_of_a_pipeline_splits_nothing(double, is_list, axes):
    x, targets = {"few": X[:3], "many": X}, RNG.normal(size=5)
    layers = [pooled, nn.Dense(4, **WIDE), jnp.tanh]

    def distance(y, targets):
        return (y.mean() - targets.mean()) ** 2

    stages = layers if is_list else nn.Sequential(layers)
    options = {"in_axes": axes, "target_axes": axes}
    count = {} if is_list else {"num_stages": 1}
    pipe = jpipe.pipeline(stages, 1, **options, **count)
    model = nn.Sequential(layers)
    variables = pipe.init(KEY, x)
    loss, grads = pipe.value_and_grad(distance)(variables, x, targets)
    dense = variables[1] if is_list else variables["params"]["layers_1"]
    dense = ref.on_host(dense["params"] if is_list else dense)
    whole = {"params": {"layers_1": dense}}
    output = model.apply(whole, x)
    ref.assert_close(pipe.apply(variables, x), output, ref.FLOAT64)
    value, expected = jax.value_and_grad(
        lambda variables: distance(model.apply(variables, x), targets)
    )(whole)
    found = grads[1] if is_list else grads["layers_1"]
    expected = expected["params"]["layers_1"]
    ref.assert_close((loss, found), (value, expected), ref.FLOAT64)


def test_a_batch_that_is_not_split_is_not_checked():
    grad_fn = jpipe.value_and_grad(graph, 1, num_stages=1)
    with pytest.raises(ValueError, match="leaves differ in batch size"):
        grad_fn.check(matrices(6, 6), X, (SENDERS, RECEIVERS))
    assert jpipe.value_and_grad(plain, 1, num_stages=1).check(
        matrices(6, 3), X, TARGETS
    )


def scaled(params, x, targets, *, mask=None, scale=1.0, train=False, activation=None):
    """A loss that asks for what it is given by name."""
    x = x if mask is None else x * mask
    y = perceptron(params, x)
    y = activation(y) if activation else y
    return scale * squares(y, targets) * (2 if train else 1)


MASK = RNG.normal(size=X.shape)
# Arguments by name, and options.
NAMED = {
    "an array": ({"mask": MASK}, {}),
    "with an axis for each": ({"mask": MASK}, {"in_axes": (0, 0)}),
    "with axes by name": (
        {"mask": MASK[0], "scale": np.float64(3)},
        {"in_axes": jpipe.inputs(0, 0, mask=None, scale=None)},
    ),
    "fixed": ({"train": True, "activation": jnp.sin, "scale": 3.0, "mask": None}, {}),
    "of one micro-batch": ({"mask": MASK[:1], "scale": np.float64(3)}, {"number": 1}),
}


@pytest.mark.parametrize("name", NAMED)
def test_arguments_are_given_by_name(double, name):
    keywords, options = NAMED[name]
    params, number = matrices(6, 8, 3), options.get("number", 2)
    options = {k: v for k, v in options.items() if k != "number"}
    expected = jax.value_and_grad(scaled)(params, X, TARGETS, **keywords)
    grad_fn = jpipe.value_and_grad(scaled, number, num_stages=2, **options)
    placed = grad_fn.place(params, X, TARGETS, **keywords)
    grad_fn.compile(placed, X, TARGETS, **keywords)
    found = grad_fn(placed, X, TARGETS, **keywords)
    ref.assert_close(found, expected, ref.FLOAT64)
    if number > 1:
        assert grad_fn.check(params, X, TARGETS, **keywords)


def test_a_number_without_an_axis_is_traced_and_another_is_fixed(double):
    traces = []

    def loss(params, x, targets, scale):
        traces.append(type(scale))
        return plain(params, x, targets) * scale

    params, args = matrices(6, 8, 3), (X, TARGETS)
    expected = jax.value_and_grad(plain)(params, *args)
    for axes, number, count in (((0, 0, None), 1, 1), (0, 2, 3)):
        traces.clear()
        grad_fn = jpipe.value_and_grad(loss, number, num_stages=2, in_axes=axes)
        placed = grad_fn.place(params, *args, 2.0)
        for scale in (1.0, 2.0, 4):
            found = grad_fn(placed, *args, scale)
            scaled = jax.tree.map(lambda leaf, by=scale: leaf * by, expected)
            ref.assert_close(found, scaled, ref.FLOAT64)
        # Of an int and a float two programs, as of jax.jit.
        assert len(traces) == count + (axes != 0)
        assert all(issubclass(kind, float | int) for kind in traces) == (axes == 0)


def test_a_fixed_number_that_changes_is_warned_of_once():
    """A VAE whose weight of the KL divergence grows: each step would compile."""

    def loss(params, x, targets, *, scale):
        return plain(params, x, targets) * scale

    grad_fn = jpipe.value_and_grad(loss, 2, num_stages=1)
    params = grad_fn.place(matrices(6, 8, 3), X, TARGETS, scale=1.0)
    for scale in (1.0, 2.0, 3.0):
        grad_fn(params, X, TARGETS, scale=scale)
    with pytest.warns(UserWarning, match="scale was 4 different numbers.*once, type"):
        grad_fn(params, X, TARGETS, scale=4.0)
    grad_fn(params, X, TARGETS, scale=5.0)  # without a word


def blended(encoder, x, decoder, targets):
    return squares(perceptron(decoder, perceptron(encoder, x)), targets)


@pytest.mark.parametrize("argnums", [slow(0), slow(2), slow((0, 2)), (2, 0), [2]])
def test_parameters_may_be_any_arguments(double, argnums):
    args = [matrices(6, 8), X, matrices(8, 3), TARGETS]
    expected = jax.value_and_grad(blended, argnums)(*args)
    # What is no parameter and no example is the same for all micro-batches.
    several = argnums if isinstance(argnums, tuple | list) else [argnums]
    axes = [0 if i in (1, 3) else None for i in range(4) if i not in several]
    grad_fn = jpipe.value_and_grad(
        blended, 2, num_stages=2, argnums=argnums, in_axes=tuple(axes)
    )
    placed = grad_fn.place(*args)
    for i, tree in zip(several, [placed] if argnums in (0, 2) else placed, strict=True):
        args[i] = tree
    ref.assert_close(grad_fn(*args), expected, ref.FLOAT64)
    tx = grad_fn.optimizer(optax.sgd(0.1))
    tx.init(placed)


def test_paths_of_several_parameters_start_with_their_number(double):
    args = [matrices(6, 8), X, matrices(8, 3), TARGETS]
    (_, expected) = jax.value_and_grad(blended, 2)(*args)
    grad_fn = jpipe.value_and_grad(
        blended, 2, num_stages=2, argnums=(0, 2), trainable="1/*"
    )
    args[0], args[2] = grad_fn.place(*args)
    _, (frozen, trained) = grad_fn(*args)
    assert frozen == [None]
    ref.assert_close(trained, expected, ref.FLOAT64)


REFUSED_ARGUMENTS = {
    "k: 2, .*is k a raw key\\? give jax.random.key": (
        lambda p, k, x: plain(p, x, jax.random.normal(k, (len(x), 3))),
        (jax.random.PRNGKey(0), X),
        {},
    ),
    "has 2 examples, fewer.*is k a raw key": (
        lambda p, x, k: plain(p, x, jax.random.normal(k, (len(x), 3))),
        (X, jax.random.PRNGKey(0)),
        {"in_axes": (None, 0), "num_microbatches": 4},
    ),
    "in_axes names maks, and the arguments by name are: mask": (
        scaled,
        (X, TARGETS, {"mask": MASK}),
        {"in_axes": jpipe.inputs(0, 0, maks=None)},
    ),
    "batch\\['text'\\] is a str": (
        lambda p, batch: plain(p, batch["x"], TARGETS),
        ({"x": X, "text": "ten"},),
        {},
    ),
    "argnums=2 is argument 2 of the function, by position, and 2 are given": (
        scaled,
        (X,),
        {"argnums": 2},
    ),
    "keywords\\['mask'\\]: 4, along axis 0": (
        scaled,
        (X, TARGETS, {"mask": MASK[:4]}),
        {},
    ),
}


@pytest.mark.parametrize("says", REFUSED_ARGUMENTS)
def test_arguments_that_do_not_fit_are_refused_with_what_to_type(says):
    loss, args, options = REFUSED_ARGUMENTS[says]
    grad_fn = jpipe.value_and_grad(loss, **{"num_microbatches": 2, **options})
    keywords = args[-1] if loss is scaled and isinstance(args[-1], dict) else {}
    args = args[:-1] if keywords else args
    with pytest.raises((TypeError, ValueError), match=f"(?s){says}") as caught:
        grad_fn.place(matrices(6, 6), *args, **keywords)
    assert "target_axes" not in str(caught.value)


def test_a_raw_key_among_two_examples_is_noted():
    def noisy(params, key, x):
        return perceptron(params, x + jax.random.normal(key, x.shape)).mean()

    grad_fn, params = jpipe.value_and_grad(noisy, 2, num_stages=1), matrices(6, 3)
    with pytest.raises(TypeError, match="invalid PRNG key") as caught:
        grad_fn.place(params, jax.random.PRNGKey(0), X[:2])
    assert any("raw key? give jax.random.key(0)" in n for n in caught.value.__notes__)


def test_arrays_that_are_no_keys_are_not_folded():
    says = r"microbatch_key\(key, microbatch\): key is 0; needs a random key"
    with pytest.raises(TypeError, match=says):
        jpipe.microbatch_key(0, KEY)


def test_a_check_of_what_is_not_split_says_that_there_is_nothing_to_compare():
    def loss(params, nodes, edges):
        return jnp.mean((nodes @ params) ** 2) + jnp.sum(edges)

    grad_fn = jpipe.value_and_grad(loss, 1, num_stages=1)
    with pytest.raises(ValueError, match="leaves differ in batch size") as refusal:
        grad_fn.check(jnp.ones((3, 2)), jnp.ones((10, 3)), jnp.ones(23))
    assert any("nothing that check could compare" in n for n in refusal.value.__notes__)


def in_order(params, x, *, counts):
    """A chain that reads each parameter as often as the counts say."""
    for w, count in zip(params, counts, strict=True):
        for _ in range(count):
            x = jnp.tanh(x @ w)
    return (x**2).mean()


def test_a_call_that_is_cut_elsewhere_says_to_place_its_parameters_anew(double):
    x = RNG.normal(size=(8, 6))
    params = [RNG.normal(size=(6, 6)) for _ in range(3)]
    grad_fn = jpipe.value_and_grad(
        in_order, num_microbatches=2, num_stages=2, devices=jax.devices()[:2]
    )
    for counts, stages in (((6, 1, 1), [0, 1, 1]), ((1, 1, 6), [0, 0, 0])):
        with pytest.raises(
            ValueError, match=r"params = grad_fn\.place\(params, \*args"
        ):
            grad_fn(params, x, counts=counts)
        params = grad_fn.place(params, x, counts=counts)
        assert [w.device for w in params] == [jax.devices()[s] for s in stages]
        on_one = jax.device_get(params)
        expected = jax.value_and_grad(in_order)(on_one, x, counts=counts)
        ref.assert_close(grad_fn(params, x, counts=counts), expected, ref.FLOAT64)
