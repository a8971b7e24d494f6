"""A loss that micro-batches would make another of is refused, and no other."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jpipe
from jpipe._functions import _reduction
from jpipe._functions._batch import Batch
from jpipe._functions._objective import Objective
from jpipe._jaxprs._made import EACH, SAME, Made
from jpipe._jaxprs._reduced import Numbers
from jpipe._layers._followed import Outputs

from .. import reference as ref

BATCH, PARTS, TOKENS, WORDS = 12, 3, 2, 5
cross_entropy = optax.softmax_cross_entropy_with_integer_labels


@functools.cache
def data():
    """Logits [12, 2, 5] and tokens [12, 2]."""
    rng = np.random.default_rng(3)
    logits = rng.normal(size=(BATCH, TOKENS, WORDS))
    tokens = rng.integers(0, WORDS, (BATCH, TOKENS))
    return jnp.asarray(logits), jnp.asarray(tokens)


def one_hot(t):
    return jax.nn.one_hot(t, WORDS)


def merged(y, t):
    return cross_entropy(y.reshape(-1, WORDS), t.reshape(-1))


def masked(y, t):
    return jnp.sum(cross_entropy(y, t) * (t > 0)), jnp.sum(t > 0)


def along_time(y, t):
    def add(total, place):
        return total + cross_entropy(y[:, place], t[:, place]).sum(), None

    return jax.lax.scan(add, 0.0, jnp.arange(TOKENS))[0]


def as_long_as_needed(y, t):
    def add(carried):
        place, total = carried
        return place + 1, total + cross_entropy(y[:, place], t[:, place]).mean()

    start = 0, jnp.zeros((), y.dtype)
    return jax.lax.while_loop(lambda carried: carried[0] < TOKENS, add, start)[1]


def in_groups(y, t):
    """Recomputed in the backward, group by group."""
    grouped = y.reshape(2, -1, TOKENS, WORDS), t.reshape(2, -1, TOKENS)
    of_group = jax.checkpoint(lambda group: cross_entropy(*group).sum())
    return jax.lax.map(of_group, grouped).sum() / t.size


def indexed(y, t):
    return -jax.nn.log_softmax(y[:, 0])[jnp.arange(len(t)), t[:, 0]]


def embedded(y):
    return y.reshape(len(y), -1)


MEANS = {
    "mean": lambda y, t: cross_entropy(y, t).mean(),
    "by the size": lambda y, t: cross_entropy(y, t).sum() / t.size,
    "by a count of ones": lambda y, t: (
        cross_entropy(y, t).sum() / jnp.ones(t.shape).sum()
    ),
    "of sums": lambda y, t: cross_entropy(y, t).sum(-1).mean(),
    "merged": lambda y, t: merged(y, t).mean(),
    "vmap": lambda y, t: jax.vmap(cross_entropy)(y, t).mean(),
    "squares": lambda y, t: jnp.mean(optax.l2_loss(y, one_hot(t))),
    "norms of each": lambda y, t: jnp.linalg.norm(y - one_hot(t), axis=-1).mean(),
    "of the masked mean of each": lambda y, t: (
        (jnp.sum(cross_entropy(y, t) * (t > 0), -1))
        / jnp.maximum(jnp.sum(t > 0, -1), 1)
    ).mean(),
    "and another mean": lambda y, t: (
        merged(y, t).mean() + 1e-2 * jnp.mean(jax.nn.logsumexp(y, -1) ** 2)
    ),
    "and a constant": lambda y, t: 3 * cross_entropy(y, t).mean() + 7,
    "of those of each pair": lambda y, t: jnp.maximum(
        0, 1 - jnp.sum((y[::2] - y[1::2]) ** 2, (1, 2))
    ).mean(),
    "clipped, as of a policy": lambda y, t: jnp.mean(
        jnp.minimum(jnp.exp(y[:, 0, 0]), jnp.clip(jnp.exp(y[:, 0, 0]), 0.8, 1.2))
        * (t[:, 0] - 1.0)
    ),
    "distilled": lambda y, t: (
        optax.losses.kl_divergence(
            jax.nn.log_softmax(y / 2), jax.nn.softmax(one_hot(t) / 2)
        ).mean()
        * 2**2
    ),
    "penalty of gradients": lambda y, t: jnp.mean(
        jax.vmap(jax.grad(lambda one: jnp.sum(jnp.tanh(one) ** 3)))(y) ** 2
    ),
    "per pixel and per image": lambda y, t: (
        1 - jnp.sum(y * one_hot(t), (1, 2)) / jnp.sum(y**2 + 1, (1, 2))
    ).mean(),
    "of a sorted row": lambda y, t: jnp.mean(jnp.cumsum(jnp.sort(y), -1) ** 2),
    "einsum": lambda y, t: -jnp.einsum("btv,btv->", y, one_hot(t)) / len(y),
    "product with ones": lambda y, t: jnp.ones(len(y)) @ y[:, 0, 0] / len(y),
    "bfloat16": lambda y, t: cross_entropy(y.astype(jnp.bfloat16), t).sum() / t.size,
    "scan": lambda y, t: along_time(y, t) / t.size,
    "while": as_long_as_needed,
    "in groups": in_groups,
    "a branch": lambda y, t: jax.lax.cond(
        WORDS > 2, lambda: y.mean(), lambda: (y**2).mean()
    ),
    "best word": lambda y, t: -jax.lax.top_k(jax.nn.log_softmax(y), 1)[0].mean(),
    "median of each": lambda y, t: jnp.median(y, -1).mean(),
    "ctc": lambda y, t: optax.ctc_loss(
        y, jnp.zeros(t.shape), jnp.clip(t, 1), jnp.zeros(t.shape).at[:, 1].set(1)
    ).mean(),
    "centred, and linear": lambda y, t: jnp.mean(y - y.mean(0)) + y.mean(),
    "indexed": lambda y, t: indexed(y, t).mean(),
    "and nothing of a root": lambda y, t: (
        y.mean() + 0.0 * jnp.sqrt(jnp.mean((y - one_hot(t)) ** 2))
    ),
    "none of the examples": lambda y, t: jnp.float32(2),
}
SUMS = {
    "sum": lambda y, t: cross_entropy(y, t).sum(),
    "by a number": lambda y, t: cross_entropy(y, t).sum() / BATCH,
    "of means": lambda y, t: cross_entropy(y, t).mean(-1).sum(),
    "vdot": lambda y, t: -jnp.vdot(one_hot(t), jax.nn.log_softmax(y)),
    "scan": along_time,
    "merged": lambda y, t: merged(y, t).sum(),
    "indexed": lambda y, t: indexed(y, t).sum(),
    "where": lambda y, t: jnp.sum(cross_entropy(y, t), where=t > 0),
}
OTHERS = {
    "masked": (lambda y, t: masked(y, t)[0] / masked(y, t)[1], "divides"),
    "masked, clamped": (
        lambda y, t: masked(y, t)[0] / jnp.maximum(masked(y, t)[1], 1),
        "divides",
    ),
    "masked, and a little": (
        lambda y, t: masked(y, t)[0] / (masked(y, t)[1] + 1e-6),
        "divides",
    ),
    "mean where": (lambda y, t: cross_entropy(y, t).mean(where=t > 0), "divides"),
    "weighted average": (
        lambda y, t: jnp.average(cross_entropy(y, t), weights=t + 1),
        "divides",
    ),
    "masked, indexed": (
        lambda y, t: jnp.sum(indexed(y, t) * t[:, 0]) / jnp.sum(t[:, 0]),
        "divides",
    ),
    "root": (lambda y, t: jnp.sqrt(jnp.mean((y - one_hot(t)) ** 2)), "takes the root"),
    "norm": (lambda y, t: jnp.linalg.norm(y - one_hot(t)), "takes the root"),
    "perplexity": (
        lambda y, t: jnp.exp(cross_entropy(y, t).mean()),
        "takes the exponential",
    ),
    "product of means": (lambda y, t: y.mean() * t.mean(), "multiplies"),
    "variance": (lambda y, t: jnp.mean((y - y.mean(0)) ** 2), "takes a power"),
    "standardized": (
        lambda y, t: jnp.mean((t - t.mean()) / t.std() * y[..., 0]),
        "takes the square",
    ),
    "contrastive": (
        lambda y, t: cross_entropy(
            embedded(y) @ embedded(y + one_hot(t)).T, jnp.arange(len(y))
        ).mean(),
        "takes the logarithm",
    ),
    "of a policy, with advantages standardized": (
        lambda y, t: (
            -jnp.mean(
                jnp.minimum(jnp.exp(y[..., 0]), jnp.clip(jnp.exp(y[..., 0]), 0.8, 1.2))
                * (y[..., 1] - y[..., 1].mean())
                / (y[..., 1].std() + 1e-8)
            )
        ),
        "takes the square|multiplies",
    ),
    "one after the other": (
        lambda y, t: jnp.mean(jnp.cumsum(y[:, 0, 0])),
        "goes along the examples",
    ),
    "pairs": (
        lambda y, t: jnp.mean((embedded(y)[:, None] - embedded(y)[None]) ** 2),
        "compares",
    ),
    "an expected error": (lambda y, t: (y.mean() - t.mean()) ** 2, "takes a power"),
}
# Of these nothing is certain: they may be means.
UNCERTAIN = {
    "finite": lambda y, t: jnp.nan_to_num(cross_entropy(y, t).mean()),
    "at most": lambda y, t: jnp.minimum(cross_entropy(y, t).mean(), 9.0),
    "one by one": lambda y, t: (
        sum(cross_entropy(*one).mean() for one in zip(y, t, strict=True)) / len(y)
    ),
    "of one number": lambda y, t: cross_entropy(
        y.reshape(BATCH // PARTS, TOKENS, WORDS), t
    ).sum(),
    "another one where there are many": lambda y, t: (
        cross_entropy(y, t).sum() if len(y) > 5 else y[0, 0, 0] + jnp.zeros(3).sum()
    ),
    "of another rank where there are many": lambda y, t: jnp.sum(
        y if len(y) > 5 else y[None]
    ),
    "the first": lambda y, t: y[jnp.argmax(y[:, 0, 0])].sum(),
    "some": lambda y, t: y[jax.random.permutation(jax.random.key(0), len(y))[:2]].sum(),
    "sum and mean": lambda y, t: y.sum() + y.mean(),
}


def check(loss_fn, reduction="mean", outputs=None, size=BATCH // PARTS):
    """What a pipeline checks before it compiles a loss.

    Outputs are known with more examples too, or are specs of one array.
    """
    y, t = data()
    like = jax.ShapeDtypeStruct
    specs = like(y.shape, y.dtype), like(t.shape, t.dtype)
    batch = Batch(specs[0], [0], specs[1], [0], None, (size,) * (BATCH // size))
    specs, followed = batch.part(size)[0] if outputs is None else outputs, None
    if isinstance(outputs, Outputs):
        specs, followed = outputs.few, outputs
    objective = Objective(loss_fn, reduction=reduction)
    _reduction.check(objective, _reduction.Given(specs, 0, followed), batch)


def parts(loss_fn):
    """The loss of each micro-batch, and of the mini-batch."""
    y, t = data()
    cut = zip(jnp.split(y, PARTS), jnp.split(t, PARTS), strict=True)
    return jnp.stack([loss_fn(*part) for part in cut]), loss_fn(y, t)


@pytest.mark.parametrize("name", MEANS)
def test_means_are_taken_for_means(double, name):
    each, whole = parts(MEANS[name])
    # In bfloat16 sums have eight bits.
    rtol = 1e-2 if name == "bfloat16" else 1e-6
    np.testing.assert_allclose(jnp.mean(each), whole, rtol=rtol)
    check(MEANS[name])
    if name != "none of the examples":
        with pytest.raises(ValueError, match="returns a mean over the examples; with"):
            check(MEANS[name], "sum")


@pytest.mark.parametrize("name", SUMS)
def test_sums_are_taken_for_sums(double, name):
    each, whole = parts(SUMS[name])
    np.testing.assert_allclose(jnp.sum(each), whole, rtol=1e-6)
    check(SUMS[name], "sum")
    with pytest.raises(ValueError, match=r"a sum .* 3 micro-.* reduction='sum'"):
        check(SUMS[name])


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_neither_is_refused(double, name):
    loss_fn, why = OTHERS[name]
    each, whole = parts(loss_fn)
    assert not np.isclose(jnp.mean(each), whole, rtol=1e-4)
    assert not np.isclose(jnp.sum(each), whole, rtol=1e-4)
    for reduction in ("mean", "sum"):
        with pytest.raises(ValueError, match=f"loss_fn .*{why}.*'weighted', and ret"):
            check(loss_fn, reduction)
    check(lambda y, t: (len(y) * loss_fn(y, t), len(y)), "weighted")


@pytest.mark.parametrize("name", UNCERTAIN)
def test_what_is_not_certain_is_not_refused(double, name):
    check(UNCERTAIN[name])
    check(UNCERTAIN[name], "sum")


@pytest.mark.parametrize(
    ("loss_fn", "says"),
    [
        (lambda y, t: (masked(y, t)[0], 1.0), "a sum .* as its weight a constant"),
        (lambda y, t: (y.mean(), len(y)), "a mean .* weight the number of examples"),
        (lambda y, t: (y.sum(), len(y) ** 2), "to the power 2"),
        (
            lambda y, t: (masked(y, t)[0] / masked(y, t)[1], masked(y, t)[1]),
            "does not grow .* as its weight a sum",
        ),
        (
            lambda y, t: (jnp.sqrt(jnp.mean((y - one_hot(t)) ** 2)), len(y)),
            "does not grow .* as its weight the number of examples",
        ),
    ],
)
def test_a_total_and_a_weight_of_different_growth_are_refused(double, loss_fn, says):
    with pytest.raises(ValueError, match=says):
        check(loss_fn, "weighted")


@pytest.mark.parametrize(
    "loss_fn",
    [
        masked,
        lambda y, t: (cross_entropy(y, t).mean(), 1.0),
        lambda y, t: (merged(y, t).sum(), t.size),
        lambda y, t: (cross_entropy(y, t).sum(), jnp.maximum(jnp.sum(t > 0), 1)),
        lambda y, t: (jnp.linalg.norm(y - one_hot(t)) * len(y), len(y)),
    ],
)
def test_totals_with_their_weights_are_not(double, loss_fn):
    check(loss_fn, "weighted")


# Of what a layer returns beside its output: a table of words, a load of experts.
WITH_A_TABLE = {
    "scaled": lambda y, t, w: cross_entropy(y * jnp.exp(w[0, 0]), t).mean(),
    "words": lambda y, t, w: cross_entropy(y @ w.T, t).mean(),
    "orthogonal": lambda y, t, w: y.mean() + jnp.sum((w @ w.T - 1) ** 2),
    "balanced": lambda y, t, w: y.mean() + (jnp.std(w) / jnp.mean(w)) ** 2,
}


@pytest.mark.parametrize("name", WITH_A_TABLE)
@pytest.mark.parametrize("length", [1, 4, 7, 8])
@pytest.mark.parametrize("size", [1, 4])
def test_what_does_not_go_along_the_examples_is_a_constant(double, name, length, size):
    numbers = Numbers(3, max(size, 4))
    like = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    few, many = (
        (like((count, TOKENS, WORDS)), like((length, WORDS)))
        for count in (numbers.size, 3 * numbers.size)
    )
    outputs = Outputs(few, many, [Made(EACH), Made(SAME)], numbers)

    def loss_fn(outputs, t):
        return WITH_A_TABLE[name](outputs[0], t, outputs[1])

    check(loss_fn, outputs=outputs, size=size)
    with pytest.raises(ValueError, match="returns a mean over the examples; with"):
        check(loss_fn, "sum", outputs=outputs, size=size)


def test_of_layers_that_take_no_other_number_of_examples_nothing_is_known(double):
    like = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    outputs = like((BATCH // PARTS, TOKENS, WORDS)), like((8, WORDS))
    check(lambda outputs, t: cross_entropy(outputs[0], t).sum(), outputs=outputs)


def test_tokens_that_a_layer_merged_with_the_examples_are_of_them(double):
    outputs = jax.ShapeDtypeStruct((BATCH // PARTS * TOKENS, WORDS), jnp.float32)
    check(lambda y, t: merged(y, t).mean(), outputs=outputs)
    with pytest.raises(ValueError, match="a sum over the examples"):
        check(lambda y, t: merged(y, t).sum(), outputs=outputs)


@pytest.mark.parametrize("of", ["value_and_grad", "train_step", "sequential"])
def test_a_pipeline_refuses_before_it_compiles(of):
    x, targets = ref.regression(8)
    make = jpipe.sequential if of == "sequential" else jpipe.pipeline
    layers = [ref.dense(4)]

    def total(y, t):
        return jnp.sum((y - t) ** 2)

    def run(num_microbatches):
        pipe = make(layers, num_microbatches)
        if of == "train_step":
            tx = optax.sgd(0.1)
            state = pipe.init_train_state(jax.random.key(0), x, tx)
            return pipe.train_step(total, tx)(state, x, targets)
        variables = pipe.init(jax.random.key(0), x)
        return pipe.value_and_grad(total)(variables, x, targets)

    run(1)
    with pytest.raises(ValueError, match="its 2 micro-batches would make another loss"):
        run(2)


def test_a_table_that_a_layer_returns_is_not_of_the_examples(double):
    x, _ = ref.regression(8)
    layers = [ref.dense(4), lambda y: (y, jnp.ones((8, 4)))]
    pipe = jpipe.sequential(layers, 2)
    variables = pipe.init(jax.random.key(0), x)

    def loss_fn(outputs, t):
        y, table = outputs
        return cross_entropy(y @ table.T, t).mean()

    pipe.value_and_grad(loss_fn)(variables, x, jnp.arange(8))
    with pytest.raises(ValueError, match="returns a mean over the examples; with"):
        pipe.value_and_grad(loss_fn, reduction="sum")(variables, x, jnp.arange(8))
