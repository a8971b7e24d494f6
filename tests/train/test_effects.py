"""Functions over places that do more than compute, and what their results are."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jpipe

DEVICES = jax.devices()[:2]
PIPE = jpipe.pipeline([jnp.sin, jnp.cos], 2, devices=DEVICES)


def two():
    """A leaf on each device."""
    return {
        name: jax.device_put(jnp.full(3, i + 1.0), device)
        for i, (name, device) in enumerate(zip("ab", DEVICES, strict=True))
    }


def test_effects_in_order_are_refused_if_they_are_in_several_places():
    def told(tree):
        for leaf in (tree["b"], tree["a"]):
            jax.debug.print("{}", leaf.sum(), ordered=True)
        return tree

    with pytest.raises(ValueError, match=r"ordered=True .debug_print. on values of"):
        PIPE.jit(told)(two())
    here = jax.device_put(two(), DEVICES[1])
    PIPE.jit(told)(here)


def test_a_branch_with_a_callback_runs_only_where_it_is_chosen():
    called = []

    def note(x):
        called.append(float(x))
        return np.float32(x)

    spec = jax.ShapeDtypeStruct((), np.float32)

    def choose(yes, tree):
        return jax.lax.cond(
            yes,
            lambda tree: tree["a"].sum() + tree["b"].sum(),
            lambda tree: jax.pure_callback(note, spec, tree["a"].sum() * tree["b"][0]),
            tree,
        )

    chosen = PIPE.jit(choose)
    assert chosen(jnp.bool_(True), two()) == 9
    assert called == []
    assert chosen(jnp.bool_(False), two()) == 6
    assert called == [6.0]


def test_what_is_handed_back_outlives_what_it_was():
    tree = two()
    kept = PIPE.jit(lambda tree: tree)(tree)
    PIPE.jit(lambda tree: jax.tree.map(jnp.negative, tree), donate_argnums=0)(tree)
    assert tree["a"].is_deleted()
    assert kept["a"].tolist() == [1, 1, 1]


def test_a_function_made_anew_each_time_does_not_fill_the_memory():
    twice = PIPE.jit(lambda f, tree: f(tree["a"]), static_argnums=0)
    spread = twice.__closure__[0].cell_contents
    for _ in range(70):
        twice(lambda x: 2 * x, two())
    assert len(spread._programs) <= 64
