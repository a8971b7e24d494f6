"""What a check prints and raises, and the check of the first mini-batch."""

import re

import jax
import jax.numpy as jnp
import numpy as np
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
    report = pipe.check(variables, x, targets, mse)
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

    report = pipe.check(variables, x, targets, quotient)
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
    assert pipe.check(variables, x, targets, weighted, reduction="weighted")
    assert pipe.check(variables, x, targets, lambda *a: (mse(*a), 1), has_aux=True)


def test_loss_for_one_number_of_examples_is_not_compared():
    pipe, variables, x, targets = made([jnp.sin])
    report = pipe.check(
        variables, x, targets, lambda y, t: (y.reshape(12, 2) ** 2).sum()
    )
    assert report.loss.notes[0].startswith("not compared: TypeError: cannot reshape")
    with pytest.raises(TypeError, match="must return a scalar loss"):
        pipe.check(variables, x, targets, lambda y, t: y)


def test_a_layer_that_cannot_run_on_any_examples_raises_its_error():
    pipe, _, x, targets = made([nn.Dense(2), Dropped()])
    variables = pipe.init(KEY, x)
    with pytest.raises(errors.InvalidRngError) as raised:
        pipe.check(variables, x, targets, mse)
    notes = "\n".join(raised.value.__notes__)
    assert "raised by layer 1 (Dropped)" in notes
    assert "rngs=jax.random.key(0)" in notes
    report = pipe.check(variables, x, targets, mse, rngs=KEY)
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
    with pytest.raises(ValueError, match="1 example"):
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
