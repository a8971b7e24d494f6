"""Cutting a mini-batch in micro-batches, and putting it together again."""

import math
from typing import Any

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

import jpipe

pytestmark = pytest.mark.usefixtures("quick")


@pytest.mark.parametrize(("batch", "number"), [(10, 4), (7, 7), (11, 5)])
def test_sizes_differ_by_at_most_one_and_larger_ones_come_first(batch, number):
    pipe = jpipe.pipeline([lambda x: 0 * x + len(x)], number)
    expected = [len(part) for part in np.array_split(np.arange(batch), number)]
    found = pipe.apply(({},), np.ones(batch))
    np.testing.assert_array_equal(found, np.repeat(expected, expected))


@st.composite
def batches(draw):
    """Arrays of random shapes with ``size`` examples on a random axis, or on none."""
    size = draw(st.integers(1, 7))
    tree, axes = {}, {}
    for name in "abc"[: draw(st.integers(1, 3))]:
        shape = draw(st.lists(st.integers(0, 3), max_size=2))
        axis = draw(st.integers(-len(shape) - 1, len(shape)))
        axes[name] = axis if name == "a" else draw(st.sampled_from([axis, None]))
        if axes[name] is not None:
            shape.insert(axis % (len(shape) + 1), size)
        dtype = draw(st.sampled_from([np.float32, np.int32, np.bool_, jnp.bfloat16]))
        # Every entry another number, as far as the dtype goes: no parts look alike.
        tree[name] = np.arange(math.prod(shape)).reshape(shape).astype(dtype)
    return tree, axes, size, draw(st.integers(1, size))


# Each example compiles a split and a join.
@settings(max_examples=12, deadline=None)
@given(batches())
def test_micro_batches_are_those_of_numpy_and_outputs_are_joined(batch):
    tree, axes, size, number = batch
    shapes = set()

    def note(part):
        shapes.add(tuple((name, x.shape, x.dtype) for name, x in part.items()))
        return part

    pipe = jpipe.pipeline([note], number, in_axes=axes, out_axes=axes)
    joined = pipe.apply(({},), tree)
    for name, whole in tree.items():
        np.testing.assert_array_equal(joined[name], whole, strict=True)

    def cut(name, rows):
        axis, whole = axes[name], tree[name]
        part = whole if axis is None else np.take(whole, rows, axis)
        return name, part.shape, part.dtype

    # The variables are those of layers that see the whole mini-batch.
    all_rows = np.arange(size)
    parts = [all_rows, *np.array_split(all_rows, number)]
    assert shapes == {tuple(cut(name, rows) for name in tree) for rows in parts}


def test_outputs_that_lack_the_axis_are_all_listed():
    x = jnp.zeros((2, 3))
    pipe = jpipe.pipeline(
        [lambda x: {"kept": x, "sum": x.sum(), "turned": x.T}], num_microbatches=2
    )
    with pytest.raises(ValueError, match="cannot be joined on out_axes=0") as refusal:
        pipe.apply(({},), x)
    assert str(refusal.value).splitlines()[1:] == [
        "  * outputs['sum'] has shape ()",
        "  * outputs['turned'] has shape (3, 1)",
    ]


def test_outputs_of_an_input_with_another_axis_are_answered_with_both_axes():
    pipe = jpipe.pipeline([jnp.sin], 2, in_axes=1)
    with pytest.raises(ValueError, match="out_axes=0") as refusal:
        pipe.apply(({},), jnp.zeros((6, 8)))
    (note,) = (text for text in refusal.value.__notes__ if "in_axes" in text)
    assert "in_axes=1 splits the input along axis 1" in note
    assert "type out_axes=1; where the examples are rows" in note


def total(tree: Any) -> jax.Array:
    """Each leaf counts, wherever its axis of examples was, or still is."""
    leaves = enumerate(jax.tree.leaves(tree), 1)
    return jnp.asarray(sum(i * jnp.sum(leaf**2) for i, leaf in leaves))


def array(*shape: int) -> np.ndarray:
    return np.arange(math.prod(shape), dtype=np.float32).reshape(shape)


ALIKE = {
    "one axis for all": (0, {"a": array(4, 2), "b": (array(4), array(4, 3))}),
    "negative": (-1, (array(2, 4), array(4))),
    "an axis per leaf": ({"a": 0, "b": 1}, {"a": array(4, 2), "b": array(2, 4)}),
    "an axis per subtree": ((0, 1), ({"u": array(4), "v": array(4, 3)}, array(2, 4))),
    "None for a leaf": ((0, None), (array(4, 2), array(7))),
    "an axis for a scalar": (0, (array(4, 2), array())),
    "unequal sizes": (0, (array(4), array(3))),
    "a missing leaf": (0, {"a": array(4, 2), "mask": None}),
    "a missing leaf before others": ([None, 0, 1], [None, array(4, 2), array(2, 4)]),
    "too few keys": ({"a": 0}, {"a": array(4), "b": array(4)}),
    "deeper than the tree": ({"a": (0, 0)}, {"a": array(4, 4)}),
    "a bool": ({"a": True}, {"a": array(4, 4)}),
}


@pytest.mark.parametrize(("axes", "tree"), ALIKE.values(), ids=ALIKE)
def test_in_axes_mean_what_they_mean_to_vmap(axes, tree):
    def apply():
        pipe = jpipe.pipeline([lambda x: total(x)[None]], 4, in_axes=axes)
        return pipe.apply(({},), tree)

    try:
        expected = jax.vmap(total, in_axes=(axes,))(tree)
    except (TypeError, ValueError):
        with pytest.raises((TypeError, ValueError), match=r"in_axes|split|differ"):
            apply()
    else:
        np.testing.assert_array_equal(apply(), expected)


def test_inputs_and_targets_may_be_none():
    # A mask that is absent, and targets that the loss does not need.
    def layer(inputs):
        assert inputs["mask"] is None
        return 2 * inputs["x"]

    pipe = jpipe.pipeline([layer], num_microbatches=2)
    inputs = {"x": jnp.arange(4.0), "mask": None}
    np.testing.assert_array_equal(pipe.apply(({},), inputs), [0, 2, 4, 6])
    mean = pipe.value_and_grad(lambda outputs, targets: outputs.mean())
    assert mean(({},), inputs, None)[0] == 3


def test_apply_ignores_the_axes_of_targets():
    pipe = jpipe.pipeline([jnp.sin], 2, target_axes=(0, None))
    np.testing.assert_allclose(pipe.apply(({},), jnp.ones(4)), np.sin(np.ones(4)))
