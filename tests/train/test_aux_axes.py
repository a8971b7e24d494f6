"""``aux_axes=``: what a loss returns beside the loss, joined over micro-batches."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jpipe

from .. import reference as ref

# Its programs are tried once: XLA need not optimize them.
pytestmark = pytest.mark.usefixtures("quick")

LAYERS = [ref.dense(6), jnp.tanh, ref.dense(4)]
X, TARGETS = ref.regression(7)  # in parts of three, two and two
AXES = {"logits": 0, "outer": {"turned": -1, "each": 0}, "worst": None}
AXES |= {"mean": jpipe.MEAN, "large": jpipe.SUM, "of no example": 0}


def loss_fn(y, targets):
    """With aux per example, whose axes of examples differ, and of a micro-batch."""
    errors = (y - targets) ** 2
    aux = {
        "logits": y,
        "outer": {"turned": jnp.moveaxis(y[None], 1, 2), "each": errors.mean(-1)},
        "worst": errors.max(),
        "mean": errors.mean(),
        "large": (errors > 1).sum(),
        "of no example": {  # the first has as many rows as a micro-batch, by chance
            "table": jnp.eye(3),
            "ones": jnp.ones((len(y), 2)),
            "numbers": jnp.arange(len(y)),
            "scale": jnp.float32(2),
        },
    }
    return errors.mean(), aux


@pytest.fixture(scope="module")
def model():
    pipe = jpipe.pipeline(LAYERS, 3, balance=[1, 2])
    return pipe, pipe.init(jax.random.key(0), X)


def test_joined_aux_is_that_of_the_mini_batch(model):
    """In a gradient and in a train step; the loss stays that without aux."""
    pipe, variables = model
    y = ref.compose(LAYERS, ref.params_of(variables), X)
    loss, aux = loss_fn(y, TARGETS)
    parts = np.array_split(np.asarray((y - TARGETS) ** 2), 3)
    aux["worst"] = np.array([part.max() for part in parts])
    find = pipe.value_and_grad(loss_fn, has_aux=True, aux_axes=AXES)
    found, grads = find(variables, X, TARGETS)
    ref.assert_close(found, (loss, aux), ref.FLOAT32)
    expected = pipe.value_and_grad(ref.mse)(variables, X, TARGETS)
    ref.assert_close((loss, grads), expected, ref.FLOAT32)
    tx = optax.sgd(0.1)
    state = pipe.init_train_state(jax.random.key(0), X, tx, variables=variables)
    step = pipe.train_step(loss_fn, tx, has_aux=True, aux_axes=AXES)
    _, metrics = step(state, X, TARGETS)
    ref.assert_close(metrics, {"loss": loss, "aux": aux}, ref.FLOAT32)


@pytest.mark.parametrize(
    ("count", "axes", "says"),
    [
        (
            9,
            {**AXES, "outer": {"turned": 3, "each": -2}},
            "aux['outer']['each'] of shape (3,) has no axis -2; "
            "aux['outer']['turned'] of shape (1, 4, 3) has no axis 3",
        ),
        (9, {**AXES, "worst": "0"}, "aux_axes: '0' is neither an axis nor None"),
        (9, [0], "aux_axes=[0] is not a prefix of aux, whose structure is"),
        # Parts of three and of two examples join where the examples are only.
        (
            7,
            {**AXES, "logits": 1},
            "aux['logits'], joined on axis 1: (3, 4) and (2, 4); "
            "return sums or means, name in aux_axes= the axis of the examples",
        ),
    ],
)
def test_axes_that_do_not_fit_are_refused(model, count, axes, says):
    pipe, variables = model
    batch = ref.regression(count)
    with pytest.raises(ValueError, match=re.escape(says)) as error:
        pipe.value_and_grad(loss_fn, has_aux=True, aux_axes=axes)(variables, *batch)
    # Micro-batches of other sizes would not do either.
    assert not hasattr(error.value, "__notes__")


def test_other_aux_of_smaller_micro_batches_is_refused(model):
    pipe, variables = model

    def each(y, targets):
        return ref.mse(y, targets), [*y]

    find = pipe.value_and_grad(each, has_aux=True)
    with pytest.raises(ValueError, match=r"sizes \(3, 2, 2\).*what is in aux: "):
        find(variables, X, TARGETS)


def test_axes_without_aux_are_refused(model):
    pipe, _ = model
    with pytest.raises(ValueError, match="aux_axes=0 needs has_aux=True"):
        pipe.train_step(ref.mse, optax.sgd(0.1), aux_axes=0)
