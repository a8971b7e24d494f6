"""What a check prints and raises, and the check of the first mini-batch."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import errors
from flax import linen as nn

import jpipe

from .. import reference as ref

KEY = jax.random.key(0)


def centred(x):
    return x - jnp.array([1.0, 2.0]) * x.mean(0)


def data():
    x = jnp.arange(24.0).reshape(12, 2)
    return x, x**2


def mse(y, targets):
    return jnp.mean((y - targets) ** 2)


class Dropped(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        return nn.Dropout(0.1, deterministic=not train)(x)


def made(layers, make=jpipe.sequential, number=3, **options):
    x, targets = data()
    pipe = make(layers, number, **options)
    return pipe, pipe.init(KEY, x), x, targets


def test_report_is_printed_as_a_table():
    pipe, variables, x, targets = made([nn.Dense(2), jnp.sin, centred])
    report = pipe.value_and_grad(mse).check(variables, x, targets)
    header, titles, *rows, loss = str(report).splitlines()
    assert header == "12 examples at once, and in micro-batches of 4 and 8:"
    assert titles.split() == ["outputs", "state", "gradients"]
    assert [row.split()[:6] for row in rows] == [
        ["layer", "0", "(Dense)", "same", "-", "same"],
        ["layer", "1", "(sin)", "same", "-", "same"],
        ["layer", "2", "(centred)", "DIFFER", "-", "DIFFER"],
    ]
    assert "outputs differ, most in example " in rows[2]
    assert loss.startswith("loss_fn with reduction='mean'  same")
    assert not report
    assert not report.is_same
    report = pipe.check(variables, x)
    assert report.loss is None
    assert "loss_fn" not in str(report)


def test_first_difference_is_raised_with_what_to_type():
    pipe, variables, x, _ = made([jnp.sqrt, centred, lambda x: x / x.max()])
    report = pipe.check(variables, x)
    root, weights = np.sqrt(np.asarray(x)), np.array([1.0, 2.0])
    whole = root - weights * root.mean(0)
    with pytest.raises(
        ValueError, match=r"^layer 1 \(centred\): outputs differ"
    ) as raised:
        report.raise_if_different()
    said = re.fullmatch(
        r"layer 1 \(centred\): outputs differ, most in example (\d+): (\S+) at once, "
        r"(\S+) in micro-batches \(12 examples at once, and in micro-batches of 4 and "
        r"8\); where all examples should count take num_microbatches=1; where those "
        r"of each micro-batch should, say so: report\.raise_if_different\(accept=\[1\]"
        r"\)",
        str(raised.value),
    )
    example = int(said[1])
    assert np.isclose(whole[example], float(said[2]), rtol=1e-4).any()
    parts = np.concatenate([p - weights * p.mean(0) for p in (root[:4], root[4:])])
    assert np.isclose(parts[example], float(said[3]), rtol=1e-4).any()
    with pytest.raises(ValueError, match=r"^layer 2 \(<lambda>\): "):
        report.raise_if_different(accept=[1])
    report.raise_if_different(accept=[1, 2])


def weighted(y, targets):
    mask = targets > 20
    return jnp.sum((y - targets) ** 2 * mask), jnp.sum(mask)


def test_loss_is_reported_with_both_values():
    pipe, variables, x, targets = made([jnp.sin])

    def quotient(y, targets):
        total, weight = weighted(y, targets)
        return total / weight

    report = pipe.value_and_grad(quotient).check(variables, x, targets)
    y = jnp.sin(x)
    parts = [float(quotient(y[a], targets[a])) for a in (slice(0, 4), slice(4, 12))]
    combined = (4 * parts[0] + 8 * parts[1]) / 12
    whole = float(quotient(y, targets))
    with pytest.raises(ValueError, match=r"^loss_fn with reduction='mean'") as raised:
        report.raise_if_different(accept=[0])
    said = str(raised.value)
    given = re.search(r"differ: (\S+) at once, (\S+) in micro-batches", said)
    np.testing.assert_allclose([*map(float, given.groups())], [whole, combined], 1e-5)
    assert "return (total, weight) and type reduction='weighted'" in said
    for find in (
        pipe.value_and_grad(weighted, reduction="weighted"),
        pipe.value_and_grad(lambda *a: (mse(*a), 1), has_aux=True),
    ):
        assert find.check(variables, x, targets)


def test_loss_for_one_number_of_examples_is_not_compared():
    pipe, variables, x, targets = made([jnp.sin])
    find = pipe.value_and_grad(lambda y, t: (y.reshape(12, 2) ** 2).sum())
    report = find.check(variables, x, targets)
    assert report.loss.notes[0].startswith("not compared: TypeError: cannot reshape")
    with pytest.raises(TypeError, match="must return a scalar loss"):
        pipe.value_and_grad(lambda y, t: y).check(variables, x, targets)


def test_a_layer_that_cannot_run_on_any_examples_raises_its_error():
    pipe, _, x, targets = made([nn.Dense(2), Dropped()])
    variables = pipe.init(KEY, x)
    find = pipe.value_and_grad(mse)
    with pytest.raises(errors.InvalidRngError) as raised:
        find.check(variables, x, targets)
    notes = "\n".join(raised.value.__notes__)
    assert "raised by layer 1 (Dropped)" in notes
    assert "rngs=jax.random.key(0)" in notes
    report = find.check(variables, x, targets, rngs=KEY)
    assert report
    assert report.layers[1].compared == ("outputs", "gradients")


def test_micro_batches_of_sizes_that_are_asked_for_are_compared():
    pipe, variables, x, _ = made([lambda x: x.reshape(-1, 6, 2).sum(1)], number=2)
    assert pipe.check(variables, x).layers[0].notes[0].startswith("not compared: TypeE")
    report = pipe.check(variables, x, microbatch_sizes=(6, 6))
    assert report
    assert report.layers[0].compared == ("outputs", "gradients")
    assert str(report).startswith(
        "12 examples at once, and in micro-batches of 6 and 6:"
    )
    for sizes in ((6, 5), (12,), (12, 0)):
        says = rf"microbatch_sizes={re.escape(str(sizes))}: needs"
        with pytest.raises(ValueError, match=says):
            pipe.check(variables, x, microbatch_sizes=sizes)
    with pytest.raises(ValueError, match="give at least 2 examples; the batch has 1"):
        pipe.check(variables, x[:1])


@pytest.mark.parametrize(
    ("count", "number", "sizes"),
    [
        (2, 1, (1, 1)),
        (5, 2, (2, 3)),
        (12, 3, (4, 8)),
        (32, 2, (10, 22)),
    ],
)
def test_micro_batches_are_of_two_sizes_and_even(count, number, sizes):
    pipe = jpipe.sequential([jnp.sin], number)
    assert pipe.check(({},), jnp.ones((count, 1))).microbatch_sizes == sizes


def test_stages_on_several_devices_are_checked_and_left_as_they_are():
    layers = [*ref.mlp(), nn.BatchNorm(False)]
    pipe, variables, x, _ = made(layers, jpipe.pipeline)
    before = jax.tree.map(np.array, variables)
    report = pipe.check(variables, x)
    assert report
    assert len(report.layers) == 7
    jax.tree.map(np.testing.assert_array_equal, variables, before)


@jax.custom_vjp
def scaled(w, x):
    return w * x


def scaled_backward(residuals, cotangents):
    """The gradient by the weight is that of an example, however many there are."""
    w, x = residuals
    grad = (cotangents * x).sum(0)
    return grad / jnp.linalg.norm(grad), cotangents * w


scaled.defvjp(lambda w, x: (w * x, (w, x)), scaled_backward)


class Scaled(nn.Module):
    @nn.compact
    def __call__(self, x):
        return scaled(self.param("w", nn.initializers.ones, (2,)), x)


def test_a_step_checks_with_all_that_it_was_told():
    """Its keys, its reduction, its aux, and the gradients of what it trains."""
    pipe, _, x, targets = made([nn.Dense(2), Dropped(), Scaled()])
    tx = optax.sgd(0.1)

    def check(loss_fn, trainable, **options):
        state = pipe.init_train_state(KEY, x, tx, trainable=trainable)
        step = pipe.train_step(loss_fn, tx, trainable=trainable, **options)
        return step.check(state, x, targets, microbatch_sizes=(5, 7))

    def total(y, targets):
        return 12 * mse(y, targets) * len(y) / 12, len(y)

    options = {"reduction": "sum", "has_aux": True}
    report = check(total, "0/*", **options)
    assert report, report
    assert report.microbatch_sizes == (5, 7)
    assert report.loss.name == "loss_fn with reduction='sum'"
    assert report.layers[1].compared == ("outputs", "gradients")
    assert not check(mse, "0/*", reduction="sum").loss.is_same
    # What is wrong is the gradient of a parameter that was frozen.
    (difference,) = check(total, None, **options).layers[2].differences
    assert str(difference).startswith("gradients by parameters differ")


def test_a_tolerance_is_taken_by_each_check():
    pipe, variables, x, targets = made([centred])
    find = pipe.value_and_grad(mse)
    assert not find.check(variables, x, targets)
    assert find.check(variables, x, targets, tolerance=1e3)
    assert pipe.check(variables, x, tolerance=1e3)


def test_a_check_refuses_a_state_that_is_none():
    pipe, variables, x, targets = made([nn.Dense(2)])
    step = pipe.train_step(mse, optax.sgd(0.1))
    with pytest.raises(TypeError, match=r"state is \(\{'params'.*init_train_state"):
        step.check(variables, x, targets)
    with pytest.raises(
        TypeError, match=r"type step\.check\(state, x, targets\); it was"
    ):
        step.check(variables, (x, targets))
