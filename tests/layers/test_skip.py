"""Long skip connections: transparent, straight, freed; every fault is named."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jpipe

from .. import reference as ref
from ..errors.model import rows
from ..listing import gradient_of


def keep(x):
    jpipe.stash("a", x)
    return x


def take(x):
    return x + jpipe.pop("a")


def test_skip_goes_straight_to_where_it_is_popped(moved):
    outer = [jpipe.isolate(layer, "outer") for layer in (keep, take)]
    inner = [jpipe.isolate(layer, "inner") for layer in (keep, take)]
    layers = [lambda x: x[:, :2], inner[0], inner[1], lambda x: x.sum(1, keepdims=True)]
    layers = [outer[0], *layers, outer[1]]
    pipe = jpipe.pipeline(layers, 1, balance=[2, 1, 2, 1])
    x, devices = jnp.ones((4, 3)), pipe.devices
    variables = pipe.init(jax.random.key(0), x)
    assert "'a' of 'outer': stage 0 to 3" in str(pipe)
    assert "'a' of 'inner': stage 1 to 2" in str(pipe)
    moved.clear()
    np.testing.assert_array_equal(pipe.apply(variables, x), np.full((4, 3), 5.0))
    # The input and the outer skip; none goes by way of the stages between.
    goals = [device for size, device in moved if size == x.size]
    assert goals == [devices[0], devices[3]]


def test_a_cheap_layer_runs_in_its_stage_and_sends_what_it_returns():
    """The next stage doesn't compute it again from the input, which it doesn't get."""
    layers = [lambda x: (jnp.tanh(x), x), lambda pair: pair[0] + pair[1]]
    pipe = jpipe.pipeline(layers, 2, balance=[1, 1])
    x = jnp.ones((4, 3))
    gradient_of(pipe, x, x)
    tanh_and_x = 2 * x[:2].nbytes
    assert [stage.sent_bytes for stage in pipe.plan.stages] == [tanh_and_x, 0]


def init(*layers):
    return lambda: jpipe.sequential(layers).init(jax.random.key(0), jnp.ones((2, 3)))


def keep_too(x):
    jpipe.stash("b", x)
    return x


FAULTS = {
    ValueError: {
        "'a' is popped by layer 0 (take), and was not stashed before": init(take, keep),
        "'a' is popped by layer 2 (take), and was popped by layer 1 (take)": init(
            keep, take, take
        ),
        "'a' is stashed twice: by layer 0 (keep) and layer 1 (keep)": init(keep, keep),
        "'a' is stashed twice: by layer 0 (keep) and layer 2 (keep)": init(
            keep, take, keep
        ),
        "the skip connections do not fit ... 'a' of 'ns' is stashed by layer 0 (keep) "
        "and never popped ... 'b' is stashed by layer 1 (keep_too) and never": init(
            jpipe.isolate(keep, "ns"), keep_too
        ),
    },
    RuntimeError: {
        "is for the layers of a pipeline": lambda: jpipe.stash("a", 1),
        "pop('a')": lambda: jpipe.pop("a"),
        "return the value from it and stash it": init(jax.jit(keep), take),
        "pop it outside and pass it in": init(keep, jax.jit(take)),
        "pass it in": init(keep, lambda x: jax.lax.map(take, x)),
    },
    TypeError: {
        "stash: the name comes first and must be hashable ... it is a Dynamic": init(
            lambda x: jpipe.stash(x, "a")
        ),
        "layer 0 (<lambda>) returned None; it must return what the next": init(
            lambda x: jpipe.stash("a", x), take
        ),
    },
}


@pytest.mark.parametrize(("call", "error", "match"), rows(FAULTS))
def test_wrong_uses_of_stash_and_pop_are_refused(call, error, match):
    with pytest.raises(error, match=match):
        call()


def test_skips_may_depend_on_training():
    def first(x, train):
        if train:
            jpipe.stash("q", x)
        return x

    def second(x, train):
        return x + jpipe.pop("q") if train else x

    x, _ = ref.regression(4)
    pipe = jpipe.pipeline([first, second], 2)
    loss, _ = pipe.value_and_grad(ref.mse)(({}, {}), x, jnp.zeros_like(x))
    ref.assert_close(loss, jnp.mean((2 * x) ** 2), 1e-6)
    ref.assert_equal(pipe.apply(({}, {}), x), x)
