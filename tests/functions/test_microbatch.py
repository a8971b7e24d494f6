"""Cutting a mini-batch in micro-batches, and putting it together again."""

import math
import re
from typing import Any, NamedTuple

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

import jpipe
from jpipe._functions import _microbatch


@given(st.integers(0, 10**6), st.integers(1, 500))
def test_sizes_sum_to_the_batch_and_differ_by_at_most_one(batch, number):
    sizes = _microbatch.sizes(batch, number)
    assert len(sizes) == number
    assert sum(sizes) == batch
    assert max(sizes) - min(sizes) <= 1
    # The larger ones come first, as in `np.array_split`.
    assert list(sizes) == sorted(sizes, reverse=True)


def test_sizes_of_ten_in_four():
    assert _microbatch.sizes(10, 4) == (3, 3, 2, 2)


class Batched(NamedTuple):
    """A pytree with one axis, or ``None``, for each of its leaves."""

    tree: Any
    axes: Any
    size: int


@st.composite
def leaves_with_axes(draw, size):
    """An array of a random shape with ``size`` examples on a random axis."""
    shape = draw(st.lists(st.integers(0, 3), max_size=2))
    axis = draw(st.none() | st.integers(-len(shape) - 1, len(shape)))
    if axis is not None:
        shape.insert(axis % (len(shape) + 1), size)
    dtype = draw(st.sampled_from([np.float32, np.int32, np.bool_, jnp.bfloat16]))
    # Every entry another number, as far as the dtype goes: no two parts look alike.
    return np.arange(math.prod(shape)).reshape(shape).astype(dtype), axis


def nested(leaves):
    """Pytrees of the given leaves, with ``None`` and empty containers among them."""
    return st.recursive(
        leaves | st.none(),
        lambda inner: (
            st.lists(inner, max_size=2)
            | st.tuples(inner, inner)
            | st.dictionaries(st.sampled_from("abc"), inner, max_size=2)
        ),
        max_leaves=4,
    )


class Pair(NamedTuple):
    """A leaf and its axis, told from the tuples of a pytree by its type."""

    leaf: np.ndarray
    axis: int | None


@st.composite
def batches(draw):
    size = draw(st.integers(1, 7))
    pairs = draw(nested(leaves_with_axes(size).map(lambda pair: Pair(*pair))))

    def pick(field):
        return jax.tree.map(
            lambda pair: getattr(pair, field),
            pairs,
            is_leaf=lambda node: isinstance(node, Pair),
        )

    return Batched(pick("leaf"), pick("axis"), size)


def flatten(batch: Batched) -> tuple[list[jax.Array], list[int | None]]:
    leaves = [jnp.asarray(leaf) for leaf in jax.tree.leaves(batch.tree)]
    axes = _microbatch.flat_axes(
        batch.axes, _microbatch.specs(batch.tree, "x"), "x", "in_axes"
    )
    return leaves, axes


# Each example compiles a split and a join.
@settings(max_examples=40, deadline=None)
@given(batches(), st.data())
def test_split_cuts_like_numpy_and_join_is_its_inverse(batch, data):
    leaves, axes = flatten(batch)
    number = data.draw(st.integers(1, batch.size), label="num_microbatches")
    parts = _microbatch.sizes(batch.size, number)
    pairs = [pair for pair in zip(leaves, axes, strict=True) if pair[1] is not None]
    leaves, axes = [leaf for leaf, _ in pairs], [axis for _, axis in pairs]
    split = []
    for start, count, size in _microbatch.groups(parts):
        cut = _microbatch.splitter(axes, size, count)
        split += jax.jit(cut)(start, *leaves)
    assert len(split) == number * len(leaves)

    for i, (leaf, axis) in enumerate(pairs):
        for part, expected in zip(
            split[i :: len(leaves)],
            np.array_split(np.asarray(leaf), number, axis),
            strict=True,
        ):
            np.testing.assert_array_equal(part, expected, strict=True)

    joined = jax.jit(_microbatch.joiner(axes))(*split)
    for leaf, original in zip(joined, leaves, strict=True):
        np.testing.assert_array_equal(leaf, original, strict=True)


def test_what_has_no_axis_is_stacked_when_it_is_joined():
    join = _microbatch.joiner([None, 0])
    first, second = join(jnp.ones(2), jnp.ones(1), jnp.zeros(2), jnp.ones(2))
    np.testing.assert_array_equal(first, [[1, 1], [0, 0]])
    assert second.shape == (3,)


@settings(max_examples=50, deadline=None)
@given(batches(), st.data())
def test_specs_of_a_part_are_those_of_the_part(batch, data):
    specs = jax.tree.leaves(_microbatch.specs(batch.tree, "x"))
    leaves, axes = flatten(batch)
    number = data.draw(st.integers(1, batch.size), label="num_microbatches")
    for size in set(_microbatch.sizes(batch.size, number)):
        for leaf, axis, spec in zip(
            leaves, axes, _microbatch.part_specs(specs, axes, size), strict=True
        ):
            part = leaf if axis is None else np.take(leaf, range(size), axis)
            assert (spec.shape, spec.dtype) == (part.shape, part.dtype)


def test_join_refuses_outputs_that_lack_the_axis_and_lists_all():
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


def seen_by_vmap(axes: Any, tree: Any) -> list[tuple[int, ...]]:
    """The shapes of the leaves of one example: the word of JAX."""
    shapes: list[tuple[int, ...]] = []

    def record(example):
        shapes.extend(leaf.shape for leaf in jax.tree.leaves(example))
        return 0.0

    jax.eval_shape(jax.vmap(record, in_axes=(axes,)), tree)
    return shapes


def seen_by_jpipe(axes: Any, tree: Any) -> list[tuple[int, ...]]:
    """The shapes of the leaves of one example: ours."""
    specs = _microbatch.specs(tree, "x")
    flat = _microbatch.flat_axes(axes, specs, "x", "in_axes")
    _microbatch.batch_size([("x", specs, flat)], num_microbatches=1)
    parts = _microbatch.part_specs(jax.tree.leaves(specs), flat, 1)
    return [
        part.shape if axis is None else np.empty(part.shape).squeeze(axis).shape
        for part, axis in zip(parts, flat, strict=True)
    ]


def array(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.float32)


ALIKE = {
    "one axis for all": (0, {"a": array(4, 2), "b": (array(4), array(4, 3))}),
    "another axis": (1, [array(2, 4), array(3, 4, 5)]),
    "negative": (-1, (array(2, 4), array(4))),
    "negative before the first": (-3, array(4, 2)),
    "beyond the last": (2, array(4, 2)),
    "an axis per leaf": ({"a": 0, "b": 1}, {"a": array(4, 2), "b": array(2, 4)}),
    "an axis per subtree": ((0, 1), ({"u": array(4), "v": array(4, 3)}, array(2, 4))),
    "None for a leaf": ((0, None), (array(4, 2), array(7))),
    "None for a scalar": ((0, None), (array(4, 2), array())),
    "None for a subtree": ((0, None), (array(4), {"u": array(2), "v": array(3)})),
    "None for everything": (None, array(4, 2)),
    "an axis for a scalar": (0, (array(4, 2), array())),
    "unequal sizes": (0, (array(4), array(3))),
    "unequal sizes where it does not matter": ((0, None), (array(4), array(3))),
    "no leaves at all": (0, ()),
    "an empty subtree": ((0, 0), (array(4, 2), ())),
    "a missing leaf": (0, {"a": array(4, 2), "mask": None}),
    "a missing leaf with its axis": (
        {"a": 0, "mask": None},
        {"a": array(4, 2), "mask": None},
    ),
    "a missing leaf before others": ([None, 0, 1], [None, array(4, 2), array(2, 4)]),
    "too few keys": ({"a": 0}, {"a": array(4), "b": array(4)}),
    "too many": ((0, 0), (array(4),)),
    "a list for a tuple": ([0, None], (array(4), array(4))),
    "deeper than the tree": ({"a": (0, 0)}, {"a": array(4, 4)}),
    "a bool": ({"a": True}, {"a": array(4, 4)}),
    "a float": ({"a": 0.0}, {"a": array(4, 4)}),
    "a name": ({"a": "batch"}, {"a": array(4, 4)}),
}


@pytest.mark.parametrize(("axes", "tree"), ALIKE.values(), ids=ALIKE)
def test_in_axes_mean_what_they_mean_to_vmap(axes, tree):
    try:
        expected = seen_by_vmap(axes, tree)
    except (TypeError, ValueError):
        with pytest.raises((TypeError, ValueError), match=r"in_axes|split|differ"):
            seen_by_jpipe(axes, tree)
    else:
        assert seen_by_jpipe(axes, tree) == expected


def test_the_cases_for_vmap_are_of_both_kinds():
    # A table of refusals alone would pass with a library that refuses everything.
    def accepted(axes, tree):
        try:
            seen_by_vmap(axes, tree)
        except (TypeError, ValueError):
            return False
        return True

    count = sum(accepted(*case) for case in ALIKE.values())
    assert 10 <= count <= len(ALIKE) - 10


@settings(max_examples=50, deadline=None)
@given(batches())
def test_in_axes_per_leaf_mean_what_they_mean_to_vmap(batch):
    if all(axis is None for axis in flatten(batch)[1]):
        for seen in (seen_by_vmap, seen_by_jpipe):
            with pytest.raises(ValueError, match=r"vmap|no leaf has a batch axis"):
                seen(batch.axes, batch.tree)
    else:
        expected = seen_by_vmap(batch.axes, batch.tree)
        assert seen_by_jpipe(batch.axes, batch.tree) == expected


def test_a_shared_leaf_reaches_every_microbatch_whole():
    pipe = jpipe.pipeline(
        [lambda inputs: inputs["x"] @ inputs["table"]],
        num_microbatches=3,
        in_axes={"x": 0, "table": None},
    )
    x = np.arange(15, dtype=np.float32).reshape(5, 3)
    table = np.arange(12, dtype=np.float32).reshape(3, 4)
    # Small whole numbers: exact in any order.
    np.testing.assert_array_equal(
        pipe.apply(({},), {"x": x, "table": table}), x @ table
    )


def test_targets_may_be_shared_by_all_microbatches():
    pipe = jpipe.pipeline([jnp.square], num_microbatches=2, target_axes=None)
    distance = pipe.value_and_grad(lambda outputs, target: (outputs - target).mean())
    assert distance(({},), jnp.array([1.0, 2.0, 3.0, 4.0]), jnp.array([7.5]))[0] == 0


def test_inputs_may_be_shared_by_all_microbatches():
    # One image, many labels: the batch is that of the targets.
    pipe = jpipe.pipeline([jnp.sum], num_microbatches=2, in_axes=None)
    distance = pipe.value_and_grad(lambda outputs, target: (outputs - target).mean())
    assert distance(({},), jnp.ones((3, 5)), jnp.array([14.0, 15.0, 16.0]))[0] == 0


def test_inputs_and_targets_may_lack_what_is_optional():
    # A mask that is absent, and targets that the loss does not need.
    def layer(inputs):
        assert inputs["mask"] is None
        return 2 * inputs["x"]

    pipe = jpipe.pipeline([layer], num_microbatches=2)
    inputs = {"x": jnp.arange(4.0), "mask": None}
    np.testing.assert_array_equal(pipe.apply(({},), inputs), [0, 2, 4, 6])
    mean = pipe.value_and_grad(lambda outputs, targets: outputs.mean())
    assert mean(({},), inputs, None)[0] == 3


@pytest.mark.parametrize("axis", [0, 1, -1, -2])
def test_outputs_are_joined_on_out_axes(axis):
    pipe = jpipe.pipeline([jnp.negative], 3, in_axes=axis, out_axes=axis)
    x = np.arange(20, dtype=np.float32).reshape(4, 5)
    np.testing.assert_array_equal(pipe.apply(({},), x), -x)


@pytest.mark.parametrize(
    ("of_numpy", "of_jax"),
    [
        (np.float64, np.float32),
        (np.int64, np.int32),
        (np.uint64, np.uint32),
        (np.complex128, np.complex64),
        (np.float16, np.float16),
        (np.int8, np.int8),
        (np.bool_, np.bool_),
    ],
)
def test_dtypes_are_those_that_jax_will_use(of_numpy, of_jax):
    array = np.ones((2, 3), of_numpy)
    spec = _microbatch.specs(array, "x")
    assert (spec.shape, spec.dtype) == ((2, 3), of_jax)
    pipe = jpipe.pipeline([lambda x: x], num_microbatches=2)
    y = pipe.apply(({},), array)
    assert y.dtype == of_jax
    np.testing.assert_array_equal(y, array)


@pytest.mark.parametrize("dtype", [np.float64, np.int64, np.float32, np.int8, np.bool_])
def test_specs_are_taken_as_the_arrays_that_they_stand_for(dtype):
    # Of a NumPy batch in double precision, which JAX will hold in single precision.
    spec = jax.ShapeDtypeStruct((2, 3), dtype)
    assert _microbatch.specs(spec, "x") == _microbatch.specs(
        np.ones((2, 3), dtype), "x"
    )


def test_specs_of_random_keys_keep_their_dtype():
    keys = jax.random.split(jax.random.key(0), 4)
    spec = jax.ShapeDtypeStruct(keys.shape, keys.dtype)
    assert _microbatch.specs(keys, "x") == _microbatch.specs(spec, "x") == spec


def test_double_precision_stays_where_it_is_enabled():
    with jax.enable_x64(True):
        assert _microbatch.specs(np.ones(3), "x").dtype == np.float64


def test_numpy_and_jax_inputs_give_the_same():
    layer = jpipe.Stage(
        init=lambda key, x: {"params": jax.random.normal(key, x.shape[-1:])},
        apply=lambda variables, x: variables["params"] * x,
    )
    pipe = jpipe.pipeline([layer], num_microbatches=2)
    x = np.random.default_rng(0).normal(size=(5, 3))
    shapes = jax.ShapeDtypeStruct((5, 3), np.float32)
    made = [pipe.init(jax.random.key(0), like) for like in (x, jnp.asarray(x), shapes)]
    for other in made[1:]:
        np.testing.assert_array_equal(other[0]["params"], made[0][0]["params"])
    np.testing.assert_array_equal(
        pipe.apply(made[0], x), pipe.apply(made[0], jnp.asarray(x))
    )


def test_specs_keep_the_structure_and_hold_no_data():
    tree = {"a": [np.ones(3), None], "b": (jnp.ones((), jnp.int32),)}
    specs = _microbatch.specs(tree, "x")
    assert jax.tree.structure(specs) == jax.tree.structure(tree)
    assert all(
        isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(specs)
    )


def test_every_leaf_that_is_no_array_is_listed():
    tree = {"a": 3, "b": ["text", 2.5], "c": np.array(["text"]), "d": jnp.ones(3)}
    with pytest.raises(TypeError, match=r"convert with jnp\.asarray") as refusal:
        _microbatch.specs(tree, "x")
    listed = re.findall(r"\* (x\S*) is", str(refusal.value))
    assert listed == ["x['a']", "x['b'][0]", "x['b'][1]", "x['c']"]


def test_one_micro_batch_has_nothing_to_join():
    pipe = jpipe.sequential([lambda x: x.sum()])
    assert pipe.apply(({},), jnp.ones(3)) == 3


def test_apply_does_not_ask_for_the_axes_of_targets():
    pipe = jpipe.pipeline([jnp.sin], 2, target_axes=(0, None))
    np.testing.assert_allclose(pipe.apply(({},), jnp.ones(4)), np.sin(np.ones(4)))
