"""A loss is checked with what layers return beside what is of the examples."""

import functools

import jax
import jax.numpy as jnp
import optax
import pytest

import jpipe
from jpipe._layers._followed import Outputs
from jpipe._mixing._made import EACH, SAME, Made
from jpipe._mixing._pairs import Numbers

from .. import reference as ref
from .test_reduction import BATCH, PARTS, TOKENS, WORDS, check, cross_entropy, merged

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
