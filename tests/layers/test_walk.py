"""The walk on abstract values: equal layers are traced once, and stay apart."""

import dataclasses
from collections import Counter
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

import jpipe
from jpipe._layers import _layer, _stage, _walk

from .. import reference as ref

X = jax.ShapeDtypeStruct((4, 5), jnp.float32)


def walk(layers, x=X):
    listed = _layer.as_layers(layers)
    stages = _stage.fuse(listed, [1] * len(listed))
    return _walk.walk(stages, jax.random.key(0), x)


class Counted(nn.Module):
    """A dense layer that counts by name how often Flax calls it."""

    features: int
    calls: ClassVar[Counter] = Counter()

    @nn.compact
    def __call__(self, x):
        self.calls[self.features] += 1
        return nn.Dense(self.features)(x)


@pytest.fixture(autouse=True)
def none_counted():
    Counted.calls.clear()


def specs(visit):
    return jax.tree.leaves((visit.x, visit.variables))


def test_equal_layers_are_traced_once():
    walk([Counted(5), Counted(5), Counted(5)])
    once = Counted.calls[5]
    Counted.calls.clear()
    walk([Counted(5)])
    assert once == Counted.calls[5]


def test_on_another_input_they_are_traced_again():
    visits, _ = walk([Counted(7), Counted(7)])
    shapes = [jax.tree.leaves(v.variables)[1].shape for v in visits]
    assert shapes == [(5, 7), (7, 7)]


def test_another_dtype_is_another_input():
    layers = [jnp.tanh, lambda x: x.astype(jnp.bfloat16), jnp.tanh, jnp.tanh]
    visits, _ = walk(layers)
    dtypes = [str(visit.x.dtype) for visit in visits]
    assert dtypes == ["float32", "float32", "bfloat16", "bfloat16"]


def test_every_layer_has_specs_of_its_own():
    """Bytes are counted by identity: two arrays of one shape are not one array."""
    visits, _ = walk([nn.Dense(5) for _ in range(4)])
    leaves = [leaf for v in visits for leaf in jax.tree.leaves(v.variables)]
    assert len(set(map(id, leaves))) == len(leaves) == 8


def test_the_plan_counts_equal_layers_each():
    pipe = jpipe.pipeline([nn.Dense(5) for _ in range(4)], 2, balance=[3, 1])
    pipe.init(jax.random.key(0), X)
    assert [stage.num_params for stage in pipe.plan.stages] == [90, 30]


def test_what_is_met_is_what_each_layer_would_make_alone():
    dense = nn.Dense(5)
    layers = [
        *[dense, jnp.tanh, dense, jnp.tanh, nn.Dense(5), nn.BatchNorm()],
        *[nn.BatchNorm(), nnx.Linear(5, 3, rngs=nnx.Rngs(0)), jnp.tanh],
    ]
    visits, _ = walk(layers)
    x = jnp.ones((4, 5))
    pipe = jpipe.sequential(layers)
    variables = pipe.init(jax.random.key(0), x)
    for visit, own in zip(visits, variables, strict=True):
        made = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), own)
        assert made == jax.tree.map(lambda s: (s.shape, s.dtype), visit.variables)
    y = pipe.apply(variables, x)
    assert y.shape == (4, 3)


def stasher(x):
    jpipe.stash("a", x)
    return x


def popper(x):
    return x + jpipe.pop("a")


def test_layers_that_stash_are_met_each_time():
    """A function that stashes, and one that pops, twice each under two namespaces."""
    layers = [
        *[jpipe.isolate(f, "first") for f in (stasher, popper)],
        *[jpipe.isolate(f, "second") for f in (stasher, popper)],
    ]
    visits, routes = walk(layers)
    assert [(r.key[0], r.source, r.target) for r in routes] == [
        ("first", 0, 1),
        ("second", 2, 3),
    ]
    assert [list(v.skips) for v in visits] == [
        [],
        [("first", "a")],
        [],
        [("second", "a")],
    ]


def test_a_second_stash_of_one_function_is_still_a_fault():
    with pytest.raises(ValueError, match="stashed twice"):
        walk([stasher, stasher, popper])


class Shifted(nn.Module):
    """Has an array among its attributes: it cannot be hashed."""

    shift: np.ndarray

    @nn.compact
    def __call__(self, x):
        return nn.Dense(5)(x) + self.shift


def test_layers_that_cannot_be_hashed_are_met_each_time():
    visits, _ = walk([Shifted(np.ones(5)), Shifted(np.zeros(5))])
    assert [len(jax.tree.leaves(v.variables)) for v in visits] == [2, 2]


class Add(nn.Module):
    """Adds a number, whose type decides on the dtype."""

    number: object

    def __call__(self, x):
        return x + self.number


class Scale(nn.Module):
    """A parameter of the input's dtype."""

    @nn.compact
    def __call__(self, x):
        return x * self.param("scale", nn.initializers.ones, (), x.dtype)


class Full(nn.Module):
    """A parameter of the dtype of an attribute."""

    number: object

    @nn.compact
    def __call__(self, x):
        return x * self.param("number", lambda key: jnp.full((), self.number))


class Hidden(nn.Module):
    """Has an attribute that comparisons do not see."""

    features: int = dataclasses.field(compare=False)

    @nn.compact
    def __call__(self, x):
        return nn.Dense(self.features)(x)


@dataclasses.dataclass(frozen=True)
class Cut:
    """A function with an attribute that comparisons do not see."""

    width: int = dataclasses.field(compare=False)

    def __call__(self, x):
        return x[:, : self.width]


class Same(nnx.Module):
    """An nnx module that says that it is equal to all of its class."""

    def __init__(self, entering, features):
        self.dense = nnx.Linear(entering, features, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return self.dense(x)

    def __eq__(self, other):
        return isinstance(other, Same)

    def __hash__(self):
        return 1


class TestWhatIsEqualToPythonMayNotDoTheSame:
    def test_one_and_one_point_zero(self):
        integers = jax.ShapeDtypeStruct((4, 5), jnp.int32)
        visits, _ = walk([Add(1), Scale(), Add(1), Add(1.0), Scale()], integers)
        dtypes = [v.variables["params"]["scale"].dtype for v in visits if v.variables]
        assert dtypes == [jnp.int32, jnp.float32]

    def test_neither_as_initial_values(self):
        pipe = jpipe.sequential([Full(2), Full(2.0)])
        variables = pipe.init(jax.random.key(0), X)
        dtypes = [v["params"]["number"].dtype for v in variables]
        assert dtypes == [jnp.int32, jnp.float32]

    @pytest.mark.parametrize(
        "layers", [[Hidden(3), Hidden(2)], [Cut(3), Cut(2), nn.Dense(2)]]
    )
    def test_attributes_that_comparisons_do_not_see(self, layers):
        pipe = jpipe.sequential(layers)
        x = jnp.ones((4, 5))
        assert pipe.apply(pipe.init(jax.random.key(0), x), x).shape == (4, 2)

    def test_an_equality_of_the_users_own(self):
        layers = [Same(5, 5), Same(5, 3), nn.Dense(2)]
        pipe = jpipe.sequential(layers)
        x = jnp.ones((4, 5))
        assert pipe.apply(pipe.init(jax.random.key(0), x), x).shape == (4, 2)


class Two(nn.Module):
    """Two dense layers, of which one method uses the second only."""

    def setup(self):
        self.first, self.second = nn.Dense(3), nn.Dense(3)

    def __call__(self, x):
        return self.second(self.first(x))

    def last(self, x):
        return self.second(x)


def test_a_tied_layer_says_nothing_of_an_equal_one_that_is_not():
    tied, free = Two(), Two()
    layers = [tied, jpipe.layer(tied, "last"), jpipe.layer(free, "last")]
    pipe = jpipe.sequential(layers)
    x = jnp.ones((4, 3))
    variables = pipe.init(jax.random.key(0), x)
    assert [sorted(v.get("params", ())) for v in variables] == [
        ["first", "second"],
        [],
        ["second"],
    ]
    assert pipe.apply(variables, x).shape == (4, 3)


class Fails(nn.Module):
    """Raises on an input that is not five wide."""

    @nn.compact
    def __call__(self, x):
        if x.shape[-1] != 5:
            raise TypeError("five, please")
        return nn.Dense(5)(x)


def test_an_error_names_the_layer_though_its_equal_was_met():
    with pytest.raises(TypeError, match="five") as caught:
        walk([Fails(), Fails(), nn.Dense(6), Fails()])
    assert "layer 3 (Fails)" in "".join(caught.value.__notes__)


def test_equal_layers_train_as_different_ones():
    layers = [nn.Dense(5), jnp.tanh, nn.Dense(5), jnp.tanh, nn.Dense(5), nn.Dense(4)]
    pipe = jpipe.pipeline(layers, 3, balance=[2, 2, 2])
    x, targets = ref.regression(6)
    variables = pipe.init(jax.random.key(0), x)
    first, second = (np.asarray(variables[i]["params"]["kernel"]) for i in (0, 2))
    assert not (first == second).any()
    value = pipe.value_and_grad(ref.mse)(variables, x, targets)
    expected = ref.value_and_grad(layers, ref.params_of(variables), x, targets)
    ref.assert_close(value, expected, ref.FLOAT32)


def test_nothing_of_a_trace_outlives_it(small_heap):
    x = jnp.ones((4, 5))

    def keep(x):
        jpipe.stash("x", x)
        return 2 * x

    with jax.check_tracer_leaks(True):
        layers = [keep, jnp.sin, lambda x: x + jpipe.pop("x"), nn.Dense(3)]
        pipe = jpipe.pipeline(layers, 2, balance=[1, 2, 1])
        variables = pipe.init(jax.random.key(0), x)
        pipe.value_and_grad(ref.mse)(variables, x, x[:, :3])


def test_parameters_that_start_from_a_python_number_compile_nothing_twice(caplog):
    class Scale(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(3)(x) * self.param("scale", lambda key: 1.5)

    pipe = jpipe.pipeline([Scale(), nn.Dense(4)], 2)
    x, targets = ref.regression(4)
    tx = optax.adam(1e-2)
    state = pipe.init_train_state(jax.random.key(0), x, tx)
    assert not any(leaf.weak_type for leaf in jax.tree.leaves(state.params))
    step = pipe.train_step(ref.mse, tx)
    state, _ = step(state, x, targets)
    caplog.clear()
    with jax.log_compiles(), caplog.at_level("WARNING"):
        step(state, x, targets)
    assert not [r for r in caplog.records if "Compiling" in r.getMessage()]


class TestLayersMeetMicroBatches:
    """Layers are met as they run: with a micro-batch, not with the mini-batch."""

    def layer(self, x):
        assert x["rows"].shape[1] == 4, x
        return (x["rows"].reshape(3, 4) + x["whole"]).T

    def test_in_every_call(self):
        axes = {"rows": 1, "whole": None}
        layers = [self.layer, ref.dense(2)]
        pipe = jpipe.pipeline(layers, 2, in_axes=axes)
        x = {"rows": jnp.arange(24.0).reshape(3, 8), "whole": jnp.ones((3, 1))}
        targets = jnp.ones((8, 2))
        variables = pipe.init(jax.random.key(0), x)
        y = pipe.apply(variables, x)
        assert y.shape == (8, 2)
        loss, _ = pipe.value_and_grad(ref.mse)(variables, x, targets)
        assert loss == pytest.approx(float(ref.mse(y, targets)), rel=1e-5)
        tx = optax.sgd(0.1)
        for given in (None, variables):
            key = jax.random.key(0)
            state = pipe.init_train_state(key, x, tx, variables=given)
            _, metrics = pipe.train_step(ref.mse, tx)(state, x, targets)
            assert metrics["loss"] == loss

    @pytest.mark.parametrize(("examples", "size"), [(1, 1), (3, 3), (4, 1), (10, 3)])
    def test_a_sample_that_is_too_small_is_met_whole(self, examples, size):
        shapes = []

        def noted(x):
            shapes.append(x.shape)
            return x

        pipe = jpipe.pipeline([noted, ref.dense(4)], 4)
        x = jnp.ones((examples, 5))
        made = pipe.init(jax.random.key(0), x)
        assert {shape[0] for shape in shapes} == {size}
        other = jpipe.sequential([noted, ref.dense(4)]).init(jax.random.key(0), x)
        ref.assert_equal(made, other)
