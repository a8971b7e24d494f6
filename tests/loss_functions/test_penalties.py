"""A term of the loss that follows from no example counts once, wherever it is added."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback

import jpipe

from .. import reference as ref
from .small_losses import RNG, X, run

WEIGHTS = RNG.normal(size=(4, 6, 6)) / 2


def norm(w):
    return jnp.sum(w**2)


def errors(h):
    return jnp.sum((h - 0.5) ** 2)


def layer(h, w):
    return jnp.tanh(h @ w), norm(w)


def stacked(weights, x):
    h, norms = jax.lax.scan(layer, x, weights)
    return errors(h) + norms.sum()


def carried(weights, x):
    def step(carry, w):
        h, penalty = carry
        h, more = layer(h, w)
        return (h, penalty + more), None

    (h, penalty), _ = jax.lax.scan(step, (x, jnp.zeros(())), weights)
    return errors(h) + penalty


def added_in_scan(weights, x):
    def step(carry, w):
        h, total = carry
        h, penalty = layer(h, w)
        return (h, 0.5 * total + errors(h) + penalty), None

    return jax.lax.scan(step, (x, jnp.zeros(())), weights)[0][1]


def added_in_checkpointed_layers(weights, x):
    def step(carry, w):
        @jax.checkpoint
        def block(h, total, w):
            h, penalty = layer(h, w)
            return h, total + (errors(h) - 3 * penalty)

        return block(*carry, w), None

    return jax.lax.scan(step, (x, jnp.zeros(())), weights)[0][1]


def in_fori_loop(weights, x):
    def step(i, carry):
        h, penalty = carry
        h, more = layer(h, weights[i])
        return h, penalty + more

    h, penalty = jax.lax.fori_loop(0, 4, step, (x, jnp.zeros(())))
    return errors(h) + penalty


def in_blocks(block):
    def loss(weights, x):
        penalty = 0.0
        for w in weights:
            x, more = block(x, w)
            penalty = penalty + more
        return errors(x) + penalty

    return loss


def in_branches(h, w):
    return jax.lax.cond(norm(w) > 0, layer, lambda h, w: (h, 0 * norm(w)), h, w)


with_jvp = jax.custom_jvp(layer)
with_jvp.defjvp(lambda primals, tangents: jax.jvp(layer, primals, tangents))
with_vjp = jax.custom_vjp(layer)
with_vjp.defvjp(lambda h, w: jax.vjp(layer, h, w), lambda vjp, grads: vjp(grads))


def from_penalty(weights, x):
    """The loss is added to the penalty, layer by layer."""

    def step(carry, w):
        h, total = carry
        h, _ = layer(h, w)
        return (h, total + errors(h)), None

    return jax.lax.scan(step, (x, 0.1 * norm(weights)), weights)[0][1]


def in_blocks_of_layers(weights, x):
    def step(carry, block):
        def inner_step(carry, w):
            h, total = carry
            h, penalty = layer(h, w)
            return (h, total + errors(h) + 0.1 * penalty), None

        return jax.lax.scan(inner_step, carry, block)[0], None

    blocks = weights.reshape(2, 2, 6, 6)
    return jax.lax.scan(step, (x, jnp.zeros(())), blocks)[0][1]


def in_two_sums(weights, x):
    """One that reads the other, and two that change places."""

    def step(carry, w):
        h, recent, total, a, b = carry
        h, penalty = layer(h, w)
        recent = 0.9 * recent + errors(h) + penalty
        return (h, recent, total + recent, b + 2 * penalty, a + errors(h)), None

    zeros = [jnp.zeros(())] * 4
    _, _, total, a, b = jax.lax.scan(step, (x, *zeros), weights)[0]
    return total + a + b


def in_stack(weights, x):
    h, norms = jax.lax.scan(layer, x, weights)
    terms = jnp.stack([errors(h), norms.sum()])
    return jnp.dot(jnp.array([1.5, 2.0]), terms) + jnp.array([errors(h), 3.0]).sum()


def in_ref(weights, x):
    total = jax.new_ref(jnp.zeros(()))

    def step(h, w):
        h, penalty = layer(h, w)
        total[...] += errors(h) + penalty
        return h, None

    jax.lax.scan(step, x, weights)
    return total[...]


def through_checkpoint(weights, x):
    """It takes a sum that has a penalty, and adds another."""
    total = stacked(weights, x)
    return jax.checkpoint(lambda total, w: 2 * total + norm(w))(total, weights[0])


FORMS = {
    "results of a scan": stacked,
    "a carry": carried,
    "a carry with the loss": added_in_scan,
    "a carry with the loss in a checkpoint": added_in_checkpointed_layers,
    "a fori_loop": in_fori_loop,
    "checkpoints": in_blocks(jax.checkpoint(layer)),
    "branches": in_blocks(in_branches),
    "a custom_jvp": in_blocks(with_jvp),
    "a custom_vjp": in_blocks(with_vjp),
    "where a scan begins": from_penalty,
    "layers in blocks": in_blocks_of_layers,
    "several carries": in_two_sums,
    "a stack": in_stack,
    "a ref": in_ref,
    "a sum that a checkpoint takes": through_checkpoint,
    "a whole checkpoint": jax.checkpoint(in_blocks(layer)),
    "a whole checkpoint of a scan": jax.checkpoint(added_in_scan),
}


@pytest.mark.parametrize("reduction", ["sum", "weighted"])
@pytest.mark.parametrize("name", FORMS)
def test_a_penalty_counts_once_wherever_it_is_added(double, name, reduction):
    form = FORMS[name]

    def total_and_weight(weights, x):
        return form(weights, x), jnp.sum(x**2)

    def quotient(weights, x):
        total, weight = total_and_weight(weights, x)
        return total / weight

    is_weighted = reduction == "weighted"
    by_hand = quotient if is_weighted else form
    expected = jax.value_and_grad(by_hand)(WEIGHTS, X)
    for num_stages in (1, 3):
        grad_fn = jpipe.value_and_grad(
            total_and_weight if is_weighted else form,
            5,
            num_stages=num_stages,
            reduction=reduction,
        )
        result = run(grad_fn, WEIGHTS, X)
        ref.assert_close(result, expected, ref.FLOAT64)


def test_a_penalty_in_each_part_of_the_examples_counts_for_each(double):
    """A scan along examples adds it as often as it has steps, as on one device."""

    def loss(w, x):
        def add(total, row):
            return total + errors(jnp.tanh(row @ w)) + norm(w), None

        return jax.lax.scan(add, 0.0, x)[0]

    w = WEIGHTS[0]
    expected = jax.value_and_grad(loss)(w, X)
    grad_fn = jpipe.value_and_grad(loss, 5, num_stages=1, reduction="sum")
    ref.assert_close(run(grad_fn, w, X), expected, ref.FLOAT64)


def test_a_penalty_that_cannot_be_separated_is_refused():
    """Inside of a rule for derivatives nobody knows which gradient is whose."""
    loss = jax.custom_jvp(in_blocks(layer))
    loss.defjvp(lambda primals, tangents: jax.jvp(in_blocks(layer), primals, tangents))
    grad_fn = jpipe.value_and_grad(loss, 5, num_stages=1, reduction="sum")
    says = "custom_jvp.* adds a term that follows from no example to the loss"
    with pytest.raises(ValueError, match=says):
        grad_fn.place(WEIGHTS, X)


def test_a_weight_may_be_added_up_beside_a_total_of_parameters(double):
    """In a scan over parts of the examples, or in a checkpoint."""
    mask = (np.arange(10) % 3 > 0).astype(float)

    def in_parts(w, x, mask):
        def add(sums, part):
            row, is_counted = part
            total, weight = sums
            return (total + errors(row @ w) * is_counted, weight + is_counted), None

        return jax.lax.scan(add, (0.0, 0.0), (x, mask))[0]

    @jax.checkpoint
    def in_checkpoint(w, x, mask):
        return jnp.sum(((x @ w) ** 2).sum(1) * mask), jnp.sum(mask)

    for function in (in_parts, in_checkpoint):

        def quotient(w, *args, function=function):
            total, weight = function(w, *args)
            return total / weight

        expected = jax.value_and_grad(quotient)(WEIGHTS[0], X, mask)
        grad_fn = jpipe.value_and_grad(function, 5, num_stages=1, reduction="weighted")
        ref.assert_close(run(grad_fn, WEIGHTS[0], X, mask), expected, ref.FLOAT64)


def test_a_number_from_the_host_may_scale_a_penalty(double):
    """What an effect returns is computed with a micro-batch, and not once per step."""

    def loss(weights, x):
        # The thread that calls it has another precision.
        spec = jax.ShapeDtypeStruct((), jnp.float32)
        scale = io_callback(lambda: np.float32(2), spec).astype(x.dtype)
        for w in weights:
            x = jnp.tanh(x @ w)
        return jnp.mean(x**2) + scale * norm(weights[0])

    def of_batch(weights, x):
        """A number that the host computes of a micro-batch, and that counts nothing."""
        spec = jax.ShapeDtypeStruct((), jnp.float32)
        x32 = jax.lax.stop_gradient(x).astype(jnp.float32)
        number = io_callback(lambda x: np.float32(np.sum(x)), spec, x32)
        y = jnp.tanh(jnp.tanh(x @ weights[0]) @ weights[1])
        return jnp.mean(y**2) + 0 * number.astype(x.dtype) * norm(weights[0])

    weights = list(WEIGHTS)
    for function in (loss, of_batch):
        expected = jax.value_and_grad(function)(weights, X)
        grad_fn = jpipe.value_and_grad(function, 5, num_stages=2)
        ref.assert_close(run(grad_fn, weights, X), expected, ref.FLOAT64)
