"""What a loss function returns beside the loss, joined over micro-batches."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jpipe

from .. import reference as ref

X, TARGETS = ref.regression(8)


def loss_fn(y, targets):
    """With aux per example, whose axes of examples differ, and of a micro-batch."""
    errors = (y - targets) ** 2
    aux = {
        "logits": y,
        "outer": {"turned": jnp.moveaxis(y[None], 1, 2), "each": errors.mean(-1)},
        "worst": errors.max(),
    }
    return errors.mean(), aux


AXES = {"logits": 0, "outer": {"turned": -1, "each": 0}, "worst": None}


def model():
    layers = [ref.dense(6), jnp.tanh, ref.dense(4)]
    return layers, jpipe.pipeline(layers, 3, balance=[1, 2])


def aux_of(pipe, x, targets, axes, loss=loss_fn, **options):
    variables = pipe.init(jax.random.key(0), x)
    gradient = pipe.value_and_grad(loss, has_aux=True, aux_axes=axes, **options)
    return variables, gradient(variables, x, targets)


@pytest.mark.parametrize("count", [9, 7], ids=["even", "ragged"])
def test_aux_is_that_of_the_mini_batch(count):
    layers, pipe = model()
    x, targets = ref.regression(count)
    variables, ((loss, aux), grads) = aux_of(pipe, x, targets, AXES)
    y = ref.compose(layers, ref.params_of(variables), x)
    expected, whole = loss_fn(y, targets)
    parts = np.array_split(np.asarray((y - targets) ** 2), 3)
    whole["worst"] = np.array([part.max() for part in parts])
    ref.assert_close((loss, aux), (expected, whole), ref.FLOAT32)
    alone = pipe.value_and_grad(ref.mse)(variables, x, targets)
    ref.assert_close((loss, grads), alone, ref.FLOAT32)


def test_a_prefix_stands_for_all_below():
    _, pipe = model()
    x, targets = ref.regression(9)
    _, ((_, aux), _) = aux_of(pipe, x, targets, {**AXES, "outer": -1})
    _, ((_, same), _) = aux_of(pipe, x, targets, AXES)
    ref.assert_equal(aux, same)

    def only_arrays(y, targets):
        return ref.mse(y, targets), (y, [2 * y])

    _, ((_, (y, (twice,))), _) = aux_of(pipe, x, targets, 0, only_arrays)
    assert y.shape == twice.shape == (9, 4)
    _, ((_, (y, (twice,))), _) = aux_of(pipe, x, targets, (1, None), only_arrays)
    assert y.shape == (3, 12)
    assert twice.shape == (3, 3, 4)


def test_left_out_it_is_stacked_as_before():
    _, pipe = model()
    x, targets = ref.regression(9)
    _, ((_, aux), _) = aux_of(pipe, x, targets, None)
    shapes = jax.tree.map(jnp.shape, aux)
    assert shapes == {
        "logits": (3, 3, 4),
        "outer": {"turned": (3, 1, 4, 3), "each": (3, 3)},
        "worst": (3,),
    }


def test_with_one_micro_batch_only_what_is_stacked_gets_an_axis():
    pipe = jpipe.sequential([ref.dense(4)])
    _, ((_, aux), _) = aux_of(pipe, X, TARGETS, AXES)
    shapes = jax.tree.map(jnp.shape, aux)
    assert shapes["logits"] == (8, 4)
    assert shapes["worst"] == (1,)


def test_a_train_step_gives_the_same():
    _, pipe = model()
    x, targets = ref.regression(7)
    tx = optax.sgd(0.1)
    state = pipe.init_train_state(jax.random.key(0), x, tx)
    step = pipe.train_step(loss_fn, tx, has_aux=True, aux_axes=AXES)
    _, metrics = step(state, x, targets)
    _, ((_, aux), _) = aux_of(pipe, x, targets, AXES)
    ref.assert_close(metrics["aux"], aux, ref.FLOAT32)


def test_one_loss_with_two_settings_gives_each_its_own():
    _, pipe = model()
    x, targets = ref.regression(9)
    shapes = []
    for axes in (AXES, None, {**AXES, "logits": 1}, AXES):
        _, ((_, aux), _) = aux_of(pipe, x, targets, axes)
        shapes.append(aux["logits"].shape)
    assert shapes == [(9, 4), (3, 3, 4), (3, 12), (9, 4)]


@pytest.mark.parametrize(
    ("axes", "says"),
    [
        (0, "aux['worst'] of shape () has no axis 0"),
        (
            {**AXES, "outer": {"turned": 3, "each": -2}},
            "aux['outer']['each'] of shape (3,) has no axis -2; "
            "aux['outer']['turned'] of shape (1, 4, 3) has no axis 3",
        ),
        ({**AXES, "worst": "0"}, "aux_axes: '0' is neither an axis nor None"),
        ({**AXES, "worst": True}, "aux_axes: True is neither an axis nor None"),
        ([0], "aux_axes=[0] is not a prefix of aux, whose structure is"),
    ],
)
def test_axes_that_do_not_fit(axes, says):
    _, pipe = model()
    x, targets = ref.regression(9)
    with pytest.raises(ValueError, match=re.escape(says)):
        aux_of(pipe, x, targets, axes)


@pytest.mark.parametrize(
    ("axes", "says"),
    [
        (None, "aux['logits']: (3, 4) and (2, 4); "),
        (
            {**AXES, "logits": 1},
            "aux['logits'], joined on axis 1: (3, 4) and (2, 4); "
            "return sums or means, name in aux_axes= the axis of the examples",
        ),
        (
            {**AXES, "outer": {"turned": 1, "each": 0}},
            "aux['outer']['turned'], joined on axis 1: (1, 4, 3) and (1, 4, 2)",
        ),
    ],
)
def test_ragged_aux_joins_where_the_examples_are_only(axes, says):
    _, pipe = model()
    x, targets = ref.regression(7)
    with pytest.raises(ValueError, match=re.escape(says)):
        aux_of(pipe, x, targets, axes)


def test_axes_without_aux_are_refused():
    _, pipe = model()
    with pytest.raises(ValueError, match="aux_axes=0 needs has_aux=True"):
        pipe.value_and_grad(ref.mse, aux_axes=0)
    with pytest.raises(ValueError, match="aux_axes=0 needs has_aux=True"):
        pipe.train_step(ref.mse, optax.sgd(0.1), aux_axes=0)
