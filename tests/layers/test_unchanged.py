"""A module that is changed after a pipeline was made of it is noticed."""

import array
import collections

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

import jpipe

from .. import reference as ref


class Scaled(nnx.Module):
    def __init__(self):
        self.scale = 1.0
        self.norm = nnx.BatchNorm(5, rngs=nnx.Rngs(0))
        self.drop = nnx.Dropout(0.0, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return self.drop(self.norm(x)) * self.scale


def freeze(module):
    module.norm.eval()


def scale(module):
    module.scale = 2.0


def drop(module):
    module.drop.rate = 0.5


CHANGES = {
    freeze: r"norm\.use_running_average of layer 0 \(Scaled\) was False and is True",
    scale: r"scale of layer 0 \(Scaled\) was 1\.0 and is 2\.0",
    drop: r"drop\.rate of layer 0 \(Scaled\) was 0\.0 and is 0\.5",
}


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_change_between_two_steps_is_noticed(change):
    module, tx = Scaled(), optax.sgd(0.1)
    x, targets = ref.regression(4)
    pipe = jpipe.pipeline([module, nn.Dense(4)], 2)
    state = pipe.init_train_state(jax.random.key(0), x, tx)
    step = pipe.train_step(ref.mse, tx)
    state, _ = step(state, x, targets)
    change(module)
    for call in (
        lambda: step(state, x, targets),
        lambda: pipe.apply(state.variables, x),
        lambda: pipe.value_and_grad(ref.mse)(state.variables, x, targets),
        lambda: pipe.init(jax.random.key(0), x),
        lambda: pipe.modules(state.variables),
    ):
        with pytest.raises(
            ValueError, match=f"make a new one.*(?s:.*){CHANGES[change]}"
        ):
            call()
    again = jpipe.pipeline([module, nn.Dense(4)], 2)
    before = jax.tree.map(jnp.copy, state.model_state)
    state, _ = again.train_step(ref.mse, tx)(state, x, targets)
    if change is freeze:
        ref.assert_equal(state.model_state, before)


def test_equal_values_and_other_arrays_are_no_change():
    module = Scaled()
    x, _ = ref.regression(4)
    pipe = jpipe.pipeline([module, nn.Dense(4)], 2)
    variables = pipe.init(jax.random.key(0), x)
    module.scale = float("1")
    module.norm.mean[...] = jnp.ones(5)
    module(x)
    pipe.apply(variables, x)


def test_an_attribute_that_hides_one_of_the_class_is_noticed():
    class Switched(nnx.Module):
        deterministic = False
        gain: int

        def __call__(self, x):
            return x * (1 if self.deterministic else 10)

    module = Switched()
    x, _ = ref.regression(4)
    pipe = jpipe.pipeline([jpipe.layer(module, lambda module, x: module(x))], 2)
    pipe.apply(({},), x)
    module.train()  # as it was
    module.eval()
    fault = r"deterministic of layer 0 .* was False and is True"
    with pytest.raises(ValueError, match=f"make a new one(?s:.*){fault}"):
        pipe.apply(({},), x)
    module = Switched()
    pipe = jpipe.pipeline([jpipe.layer(module, lambda module, x: module(x))], 2)
    module.gain = 2
    with pytest.raises(ValueError, match=r"gain of layer 0 .* was missing and is 2"):
        pipe.apply(({},), x)


class Kinds(nnx.Module):
    """Holds a value of every kind."""

    def __init__(self):
        self.mask = nnx.Variable(jnp.ones(5))
        self.table = jnp.arange(5.0)
        self.a = nnx.Param(jnp.ones(5), by=[1.0])
        self.b = nnx.Param(jnp.ones(5))
        self.tied = self.b
        self.norm = nnx.LayerNorm(5, rngs=nnx.Rngs(0))
        self.parts = nnx.List([nnx.Param(jnp.ones(5)), 2.0])
        self.held = nnx.data((nnx.Param(jnp.ones(5)), None))
        self.scales, self.chosen = [1.0, {"x": 2.0}], {1}
        self.drop = nnx.Dropout(0.5, rngs=nnx.Rngs(0))
        self.drop.deterministic = None

    def __call__(self, x):
        if self.mask is not None:
            x = x * self.mask
        x = x * self.a[...] + self.b[...] + self.tied[...] + self.table
        x = self.norm(x) * self.parts[0][...] * self.parts[1] * self.held[0][...]
        x = self.drop(x, deterministic=True)
        return x * self.scales[0] * self.scales[1]["x"] * getattr(self, "gain", 1.0)


def double(variable, value):
    return 2 * value


KIND_CHANGES = {
    "no mask": (
        lambda m: setattr(m, "mask", None),
        r"mask .* was an nnx.Variable of type Variable and is None",
    ),
    "a number": (
        lambda m: setattr(m, "mask", nnx.static(0.5)),
        r"mask .* was an nnx.Variable of type Variable and is 0\.5",
    ),
    "an array": (
        lambda m: setattr(m, "mask", jnp.ones(5)),
        r"mask .* was an nnx.Variable of type Variable and is an array",
    ),
    "no array": (
        lambda m: setattr(m, "table", nnx.Variable(m.table)),
        r"table .* was an array and is an nnx.Variable of type Variable",
    ),
    "no bias": (
        lambda m: setattr(m.norm, "bias", None),
        r"norm\.bias .* was an nnx.Variable of type Param and is None",
    ),
    "another type": (
        lambda m: setattr(m, "a", nnx.BatchStat(m.a[...])),
        r"a .* was an nnx.Variable of type Param and is .* of type BatchStat",
    ),
    "another tie": (
        lambda m: setattr(m, "a", m.b),
        r"b .* was the Variable b .* and is a of layer 0",
    ),
    "no tie": (
        lambda m: setattr(m, "tied", nnx.Param(m.b[...])),
        r"tied .* was the Variable b .* and is tied of layer 0",
    ),
    "metadata": (
        lambda m: m.a.set_metadata(on_get_value=double),
        r"a\.on_get_value .* was missing and is <function double",
    ),
    "metadata in place": (
        lambda m: m.a.by.append(2.0),
        r"a\.by .* was \[1\.0\] and is \[1\.0, 2\.0\]",
    ),
    "metadata of another": (
        lambda m: setattr(m, "a", nnx.Param(m.a[...], by=[1.0], gain=2)),
        r"a\.gain .* was missing and is 2",
    ),
    "a part of a list": (
        lambda m: m.parts.__setitem__(1, 3.0),
        r"parts\.1 .* was 2\.0 and is 3\.0",
    ),
    "a part of a tuple": (
        lambda m: setattr(m, "held", nnx.data((m.held[0], 1))),
        r"held\.1 .* was None and is 1",
    ),
    "in place": (
        lambda m: m.scales[1].update(x=3.0),
        r"scales\.1\.x .* was 2\.0 and is 3\.0",
    ),
    "a set in place": (
        lambda m: m.chosen.add(2),
        r"chosen .* was frozenset\(\{1\}\) and is frozenset\(\{1, 2\}\)",
    ),
    "another part": (
        lambda m: setattr(m, "norm", nnx.LayerNorm(5, rngs=nnx.Rngs(0))),
        r"norm of layer 0 \(Kinds\) was a LayerNorm and is another$",
    ),
    "what was not there": (
        lambda m: setattr(m, "gain", jnp.ones(())),
        r"gain .* was missing and is an array",
    ),
    "what is gone": (
        lambda m: delattr(m, "table"),
        r"table .* was an array and is missing",
    ),
}


@pytest.mark.parametrize("name", KIND_CHANGES)
def test_another_kind_of_value_is_noticed(name):
    change, fault = KIND_CHANGES[name]
    module, tx = Kinds(), optax.sgd(0.1)
    x, targets = ref.regression(4)[0], jnp.ones((4, 5))
    pipe = jpipe.pipeline([module], 2)
    variables = pipe.init(jax.random.key(0), x)
    pipe.apply(variables, x)
    change(module)
    for call in (
        lambda: pipe.apply(variables, x),
        lambda: pipe.value_and_grad(ref.mse)(variables, x, targets),
        lambda: pipe.train_step(ref.mse, tx)(None, x, targets),
    ):
        with pytest.raises(ValueError, match=rf"make a new one(?s:.*){fault}"):
            call()


def test_what_was_traced_meets_another_kind_of_value():
    module, tx = Kinds(), optax.sgd(0.1)
    x, targets = ref.regression(4)[0], jnp.ones((4, 5))
    pipe = jpipe.pipeline([module], 2)
    state = pipe.init_train_state(jax.random.key(0), x, tx)
    gradient, step = pipe.value_and_grad(ref.mse), pipe.train_step(ref.mse, tx)
    gradient(state.variables, x, targets)
    state, _ = step(state, x, targets)
    mask, module.mask = module.mask, None
    for call in (
        lambda: gradient(state.variables, x, targets),
        lambda: step(state, x, targets),
    ):
        with pytest.raises(ValueError, match=KIND_CHANGES["no mask"][1]):
            call()
    module.mask = mask
    step(state, x, targets)


def test_another_value_of_the_same_kind_is_no_change():
    module = Kinds()
    x, _ = ref.regression(4)
    pipe = jpipe.pipeline([module], 2)
    variables = pipe.init(jax.random.key(0), x)
    expected = pipe.apply(variables, x)
    module.seen = nnx.Intermediate(module(x))
    module.eval()
    module.train()
    module.b = module.tied = nnx.Param(2 * module.b[...])
    module.parts[0] = nnx.Param(jnp.zeros(5))
    module.table, module.scales = 2 * module.table, [1.0, {"x": 2.0}]
    for _ in range(2):
        ref.assert_equal(pipe.apply(variables, x), expected)
    module.tied = nnx.Param(module.b[...])
    with pytest.raises(ValueError, match=KIND_CHANGES["no tie"][1]):
        pipe.apply(variables, x)


class Holder(nnx.Module):
    def __init__(self, held):
        self.held = held

    def __call__(self, x):
        return x


def change_held(make, change):
    """Whether what a module holds may be so changed after it was traced."""
    module = Holder(make())
    x, _ = ref.regression(4)
    pipe = jpipe.pipeline([module], 2)
    pipe.apply(({},), x)
    changed = change(module.held)
    module.held = module.held if changed is None else changed
    pipe.apply(({},), x)


@pytest.mark.parametrize(
    ("make", "change"),
    [
        (lambda: collections.deque([1.0]), lambda held: held.append(2.0)),
        (lambda: bytearray(b"a"), lambda held: held.extend(b"b")),
        (lambda: array.array("d", [1.0]), lambda held: held.append(2.0)),
        (lambda: {"a": 1, "b": 2}, lambda held: held.update(a=held.pop("a"))),
        (lambda: [{"a"}], lambda held: held[0].add("b")),
        (lambda: 0.0, lambda held: -0.0),
        (lambda: [1], lambda held: [True]),
        (lambda: np.float32(1), lambda held: np.float64(1)),
    ],
    ids=["deque", "bytes", "array", "order", "set", "zero", "bool", "dtype"],
)
def test_what_was_held_is_something_else(make, change):
    with pytest.raises(ValueError, match=r"held.* of layer 0 \(Holder\) was "):
        change_held(make, change)


@pytest.mark.parametrize(
    "make",
    [
        lambda: float("nan"),
        lambda: float("1.5"),
        lambda: complex("1+2j"),
        lambda: np.float32(1),
        lambda: (np.int64(2), "ab" * 2, {"b"}),
        lambda: range(3),
        lambda: slice(1, 2),
        lambda: frozenset({1}),
    ],
    ids=["nan", "float", "complex", "numpy", "tuple", "range", "slice", "frozenset"],
)
def test_what_was_held_is_there_again(make):
    change_held(make, lambda held: make())


def test_a_switch_that_the_class_leaves_open_is_one_that_is_on():
    class Open(Holder):
        deterministic: bool | None = None

    module = Open(1)
    x, _ = ref.regression(4)
    pipe = jpipe.pipeline([module], 2)
    pipe.apply(({},), x)
    module.train()
    pipe.apply(({},), x)
    module.eval()
    with pytest.raises(ValueError, match=r"deterministic .* was False and is True"):
        pipe.apply(({},), x)


def test_a_call_writes_to_no_list_of_the_users():
    class Logs(nnx.Module):
        def __init__(self):
            self.shapes, self.seen = [(0, {})], collections.deque()

        def __call__(self, x):
            self.shapes.append(x.shape)
            self.shapes[0][1]["seen"] = True
            self.seen.append(x.shape)
            return x

    module = Logs()
    x, _ = ref.regression(4)
    pipe = jpipe.pipeline([module], 2)
    ref.assert_equal(pipe.apply(({},), x), x)
    assert module.shapes == [(0, {})]
    assert not module.seen
    pipe.apply(({},), x)


def test_a_module_that_becomes_of_another_class_is_noticed():
    class Twice(nnx.Linear):
        def __call__(self, x):
            return 2 * super().__call__(x)

    x, _ = ref.regression(4)
    module = nnx.Linear(5, 5, rngs=nnx.Rngs(0))
    pipe = jpipe.pipeline([module], 2)
    variables = pipe.init(jax.random.key(0), x)
    pipe.apply(variables, x)
    module.__class__ = Twice
    with pytest.raises(ValueError, match=r"__class__ of layer 0 .*Twice"):
        pipe.apply(variables, x)
