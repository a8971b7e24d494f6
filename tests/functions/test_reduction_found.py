"""Losses as people write them, of which some were other ones without a word."""

import warnings
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jpipe

BATCH, WIDTH, PARTS = 12, 5, 3
cross_entropy = optax.softmax_cross_entropy_with_integer_labels


def by_class(y, t):
    """Examples weighed by how many of their class are in the batch."""
    return (cross_entropy(y, t) * (len(t) / jnp.bincount(t, length=WIDTH))[t]).mean()


def centres(y, t):
    count = jax.ops.segment_sum(jnp.ones(len(t)), t, WIDTH)[:, None]
    centre = jax.ops.segment_sum(y, t, WIDTH) / jnp.maximum(count, 1)
    return ((y - centre[t]) ** 2).mean()


def balanced(y, t):
    """The rarer answer weighs more."""
    positive = t > 2
    share = positive.mean()
    losses = optax.sigmoid_binary_cross_entropy(y[:, 0], positive.astype(y.dtype))
    return (jnp.where(positive, 1 - share, share) * losses).mean()


def pairwise(y, t):
    difference = y[:, 0][:, None] - y[:, 0][None]
    return (jax.nn.softplus(-difference) * (t[:, None] > t[None])).mean()


def relativistic(y, t):
    return jax.nn.relu(1 - (y[:, 0] - y[:, 1].mean())).mean()


def proportional_hazards(y, t):
    risk = y[:, 0][jnp.argsort(-t)]
    return -(risk - jax.lax.cumlogsumexp(risk)).mean()


def spread_out(y, t):
    likeness = y @ y.T - 9 * jnp.eye(len(y))
    return -jnp.log(jnp.linalg.norm(y - y[likeness.argmax(1)], axis=-1)).mean()


def mixed_labels(y, t):
    other = t[jax.random.permutation(jax.random.key(3), len(t))]
    return 0.7 * cross_entropy(y, t).mean() + 0.3 * cross_entropy(y, other).mean()


def hard_ones(y, t):
    losses = cross_entropy(y, t)
    chosen = losses >= jnp.sort(losses)[len(t) // 2]
    return (losses * chosen).sum() / chosen.sum()


def discounted(y, t):
    def add(after, reward):
        after = reward + 0.9 * after
        return after, after

    returns = jax.lax.scan(add, 0.0, t.astype(y.dtype), reverse=True)[1]
    return (returns * y[:, 0]).mean()


def same_choice(y, t):
    return (y[jnp.array([0, 3, 5])] ** 2).mean()


def real_or_not(y, t):
    """As a loss makes labels of a batch that is one half real and one half made."""
    half = len(y) // 2
    labels = jnp.concatenate([jnp.ones(half), jnp.zeros(len(y) - half)])
    return optax.sigmoid_binary_cross_entropy(y[:, 0], labels).mean()


def not_padded(y, t):
    return jnp.where(jnp.arange(len(y)) < 10, cross_entropy(y, t), 0).mean()


def later_ones_less(y, t):
    return jnp.linspace(1, 0, len(y)) @ cross_entropy(y, t) / len(y)


def places_as_labels(y, t):
    return cross_entropy(y, jnp.arange(len(y)) % WIDTH).mean()


def sample(y, t):
    some = jax.random.permutation(jax.random.key(3), len(y))[: len(y) // 2]
    return cross_entropy(y, t)[some].mean()


def by_rank(y, t):
    ranks = jnp.argsort(jnp.argsort(y[:, 1]))
    return (cross_entropy(y, t) * ranks).mean() / len(y)


def hardest_half(y, t):
    losses = cross_entropy(y, t)
    return losses[jnp.argsort(-losses)[: len(y) // 2]].mean()


def added_up(y, t):
    def add(i, total):
        return total + jnp.sum(y[i] ** 2)

    return jax.lax.fori_loop(0, len(y), add, 0.0) / len(y)


BY_PLACE = "tells examples apart by their place in the batch"
# Between the means of micro-batches.
ABOUT = 0.0
REFUSED = {
    lambda y, t: jax.lax.approx_max_k(cross_entropy(y, t), len(y) // 2)[0].mean(): (
        "takes the largest or the smallest of all examples"
    ),
    real_or_not: BY_PLACE,
    not_padded: BY_PLACE,
    later_ones_less: BY_PLACE,
    places_as_labels: BY_PLACE,
    lambda y, t: jnp.prod(y[:, 0] + 2): "multiplies all examples",
    same_choice: "takes some of the examples, and not the others",
    by_class: "divides by what is made of all examples",
    centres: "divides by what is made of all examples",
    balanced: "is, for some examples, what is made of all",
    pairwise: "compares examples with one another",
    relativistic: "cuts off, of each example, by what is made of all",
    proportional_hazards: "goes along the examples, one after the other",
    spread_out: "compares examples with one another",
    mixed_labels: "compares examples with one another",
    hard_ones: "divides by what is made of all examples",
    discounted: "goes along the examples, one after the other",
}
FOLLOWS = "computes with what is made of all examples"
# They are those of the mini-batch as long as nothing is cut off, say.
DOUBTFUL = {
    "weighed by a bound, once it counts": (
        lambda y, t: (
            jnp.where((y.mean() > ABOUT) & jnp.array(True), 2.0, 1.0)
            * cross_entropy(y, t).mean()
        ),
        FOLLOWS,
    ),
    "weighed by what is not": (
        lambda y, t: (
            jnp.where(~(y.mean() > ABOUT), 2.0, 1.0) * cross_entropy(y, t).mean()
        ),
        FOLLOWS,
    ),
    "free bits": (lambda y, t: jnp.maximum((y**2).mean(0), 1.2).sum(), FOLLOWS),
    "flooding": (lambda y, t: jnp.abs(cross_entropy(y, t).mean() - 2) + 2, FOLLOWS),
    "volume": (
        lambda y, t: jnp.linalg.slogdet(jnp.eye(WIDTH) + y.T @ y / len(y))[1],
        FOLLOWS,
    ),
    "unbiased": (
        lambda y, t: (y**2).sum() / (len(y) - 1),
        "returns a mean times what the number of examples makes",
    ),
    "weights beside the largest": (
        lambda y, t: (jnp.exp(y[:, 0] - y[:, 0].max()) * cross_entropy(y, t)).mean(),
        "shifts by the largest or the smallest of all examples",
    ),
    "partners": (
        lambda y, t: ((y - y[t]) ** 2).mean(),
        "takes or writes examples at places that are given",
    ),
    "sample": (sample, "chooses some of the examples"),
    "hardest half": (hardest_half, "chooses some of the examples"),
    "by rank": (by_rank, "ranks the examples among one another"),
    "noise": (
        lambda y, t: ((y + jax.random.normal(jax.random.key(2), y.shape)) ** 2).mean(),
        "draws random numbers by a key that is not of this step .*",
    ),
}
ALIKE = {
    "groups of a micro-batch": lambda y, t: (
        (y[:, 0].reshape(-1, 4) - y[:, 0].reshape(-1, 4).mean(1, keepdims=True)) ** 2
    ).mean(),
    "all but the first of each group": lambda y, t: jnp.mean(
        y.reshape(-1, 4, WIDTH)[:, 1:] ** 2
    ),
    "each with the first of its group": lambda y, t: jax.nn.relu(
        1 + y[:, 0].reshape(-1, 4)[:, 1:] - y[:, 0].reshape(-1, 4)[:, :1]
    ).mean(),
    "steps in each group": lambda y, t: jnp.mean(
        jnp.diff(y.reshape(-1, 4, WIDTH), axis=1) ** 2
    ),
    "pairs": lambda y, t: jax.nn.softplus(y[1::2, 0] - y[::2, 0]).mean(),
    "in chunks": lambda y, t: jax.lax.map(
        lambda one: cross_entropy(*one), (y, t), batch_size=3
    ).mean(),
    "added up": added_up,
    "weights that are alike": lambda y, t: (
        jnp.full(len(y), 1 / len(y)) @ cross_entropy(y, t)
    ),
    "weights that are rounded": lambda y, t: (
        jnp.linspace(0.7, 0.7, len(y)) @ cross_entropy(y, t) / len(y)
    ),
    "signs by turns": lambda y, t: ((-1) ** jnp.arange(len(y)) @ y).sum() / len(y),
    "by a count of the shape": lambda y, t: y.sum() / jnp.array(y.shape).prod(),
}


def data():
    y = jax.random.normal(jax.random.key(0), (BATCH, WIDTH))
    return y, jax.random.randint(jax.random.key(1), (BATCH,), 0, WIDTH)


def loss_of(loss_fn, num_microbatches=PARTS, **options):
    y, t = data()
    pipe = jpipe.sequential([lambda y: y], num_microbatches)
    find = pipe.value_and_grad(loss_fn, **options)
    return find(pipe.init(jax.random.key(0), y), y, t)[0]


def by_parts(loss_fn):
    cut = zip(*(jnp.split(a, PARTS) for a in data()), strict=True)
    return np.mean([loss_fn(*part) for part in cut])


@pytest.mark.parametrize("loss_fn", REFUSED)
def test_what_is_another_loss_is_refused(loss_fn):
    assert not np.isclose(by_parts(loss_fn), loss_fn(*data()), rtol=1e-3)
    with pytest.raises(ValueError, match=f"loss_fn {REFUSED[loss_fn]}; with"):
        loss_of(loss_fn)
    np.testing.assert_allclose(loss_of(loss_fn, 1), loss_fn(*data()), rtol=1e-5)


@pytest.mark.parametrize("name", DOUBTFUL)
def test_what_may_be_another_is_told(name):
    loss_fn, why = DOUBTFUL[name]
    assert not np.isclose(by_parts(loss_fn), loss_fn(*data()), rtol=1e-3)
    with pytest.warns(UserWarning, match=rf"itself: (.|\n)*\* loss_fn {why}\n"):
        loss_of(loss_fn)


@pytest.mark.parametrize("name", ALIKE)
def test_what_is_the_same_loss_is_left_alone(name):
    np.testing.assert_allclose(loss_of(ALIKE[name]), ALIKE[name](*data()), rtol=1e-5)


def test_pairs_need_micro_batches_that_hold_whole_ones():
    def odd_and_even(y, t):
        return jnp.mean(y[::2] * y[1::2])

    with pytest.raises(ValueError, match="compares examples"):
        loss_of(odd_and_even, 4)


def test_every_second_needs_micro_batches_of_pairs():
    def every_second(y, t):
        return (y[::2] ** 2).mean() - y[1::2].mean()

    loss_of(every_second)
    with pytest.raises(ValueError, match="takes some of the examples, and not the oth"):
        loss_of(every_second, 4)


def test_a_weight_that_is_at_least_something_is_told():
    """A micro-batch of which all is masked would count as one example."""

    def masked(y, t):
        mask = t > 2
        return (cross_entropy(y, t) * mask).sum(), jnp.maximum(mask.sum(), 1)

    with pytest.warns(UserWarning, match="loss_fn returns a weight that is at least"):
        loss_of(masked, reduction="weighted")


def test_a_number_beside_a_sum_is_told_if_it_counts():
    """Each micro-batch would add it."""

    def masked(y, t, more=0.0, penalty=0.0):
        mask = t > 2
        total = (cross_entropy(y, t) * mask).sum()
        return total + penalty * jnp.ones(()), mask.sum() + more

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loss_of(partial(masked, more=1e-8), reduction="weighted")
    for beside in ({"more": 1.0}, {"penalty": 1.0}):
        with pytest.warns(UserWarning, match="loss_fn adds what grows"):
            loss_of(partial(masked, **beside), reduction="weighted")


def test_a_constant_weight_needs_micro_batches_of_one_size():
    def constant(y, t):
        return cross_entropy(y, t).mean(), 1.0

    loss_of(constant, reduction="weighted")
    with pytest.raises(ValueError, match=r"weight a constant, of micro-batches of sev"):
        loss_of(constant, 5, reduction="weighted")


def test_how_many_are_not_padded_may_be_given():
    """It is of no example, and known when the loss runs."""
    y, t = data()

    def not_padded(y, targets):
        labels, count = targets
        return jnp.where(jnp.arange(len(y)) < count, cross_entropy(y, labels), 0).mean()

    pipe = jpipe.sequential([lambda y: y], PARTS, target_axes=(0, None))
    find = pipe.value_and_grad(not_padded)
    with pytest.raises(ValueError, match=BY_PLACE):
        find(pipe.init(jax.random.key(0), y), y, (t, jnp.array(10)))
