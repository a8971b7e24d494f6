"""What says whether a layer is trained, and is neither a dropout nor a norm of Flax."""

import dataclasses
import typing

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

import jpipe

from .. import reference as ref

KEY, X = jax.random.key(0), jnp.linspace(-1, 1, 24).reshape(6, 4)
RNGS = {"dropout": jax.random.key(1)}


def applied(listed, train):
    pipe = jpipe.sequential([listed], 2)
    return pipe.apply(pipe.init(KEY, X), X, rngs=RNGS, train=train)


def asked(listed, match, train=True):
    with pytest.raises(ValueError, match=f"(?s)it is unclear what .*{match}"):
        applied(listed, train)


class Centre(nn.Module):
    """A norm of one's own, with a running mean."""

    @nn.compact
    def __call__(self, x, train=False):
        mean = self.variable("batch_stats", "mean", lambda: jnp.zeros(4))
        if train and not self.is_initializing():
            mean.value = 0.9 * mean.value + 0.1 * x.mean(0)
        return x - (x.mean(0) if train else mean.value)


class CentreNnx(nnx.Module):
    def __init__(self):
        self.mean = nnx.BatchStat(jnp.zeros(4))

    def __call__(self, x, train=False):
        if train:
            self.mean[...] = 0.9 * self.mean[...] + 0.1 * x.mean(0)
        return x - (x.mean(0) if train else self.mean[...])


# ---------------------------------------------- fields that may be a default


class Held(nn.Module):
    """A field says it, where nobody tells it."""

    use_running_average: bool = False

    @nn.compact
    def __call__(self, x, use_running_average=None):
        frozen = self.use_running_average
        if use_running_average is not None:
            frozen = use_running_average
        return Centre()(x, train=not frozen)


class Required(nn.Module):
    train: bool | None = None

    @nn.compact
    def __call__(self, x, train):
        return Centre()(x, train)


@pytest.mark.parametrize(
    ("listed", "told"),
    [
        (Held(), "use_running_average=not train"),
        (Held(use_running_average=False), "use_running_average=not train"),
        (nn.Sequential([Held(), nn.relu]), "use_running_average=not train"),
        (Required(train=False), "train=train"),
    ],
)
def test_a_field_beside_a_parameter_of_its_name_is_asked_about(listed, told):
    line = rf"list jpipe\.layer\(module, lambda module, x, train: module\(x, {told}\)\)"
    with pytest.raises(TypeError, match=rf"layer 0: .*its call takes .*{line}"):
        jpipe.pipeline([listed], 2)


@pytest.mark.filterwarnings("ignore:each micro-batch by itself")
def test_what_is_to_be_typed_then_is_an_answer():
    told = jpipe.layer(
        Held(), lambda module, x, train: module(x, use_running_average=not train)
    )
    np.testing.assert_allclose(
        applied(told, True).reshape(2, 3, 4).mean(1), 0, atol=1e-6
    )
    np.testing.assert_array_equal(applied(told, False), X)
    left = jpipe.layer(Held(), lambda module, x: module(x, use_running_average=True))
    np.testing.assert_array_equal(applied(left, True), X)


def test_a_field_that_somebody_set_stays():
    np.testing.assert_array_equal(applied(Held(use_running_average=True), True), X)
    np.testing.assert_array_equal(applied(Required(), False), X)


def test_a_default_of_a_field_inside_is_nobodys_word():
    class Shut(Held):
        use_running_average: bool = True

    class Outer(nn.Module):
        @nn.compact
        def __call__(self, x, train):
            return Shut()(x)

    class Dropping(nn.Module):
        deterministic: bool = True  # which it does not read

        @nn.compact
        def __call__(self, x, enable=False):
            return nn.Dropout(0.5)(x, deterministic=not enable)

    asked(Outer(), "use_running_average=None of Shut .* use_running_average=not")
    asked(Dropping(), "nobody fills enable=False of Dropping")


# --------------------------------------------------------------- in a Sequential


@pytest.mark.filterwarnings("ignore:each micro-batch by itself")
@pytest.mark.parametrize(
    ("first", "second"),
    [
        (Centre, lambda: nn.Dense(4)),
        (CentreNnx, lambda: nnx.Linear(4, 4, rngs=nnx.Rngs(0))),
    ],
)
def test_a_sequential_passes_it_on_to_what_it_begins_with(first, second):
    kind = nn.Sequential if first is Centre else nnx.Sequential
    parts = [first(), second()]
    whole = kind([kind(parts), jnp.tanh]) if kind is nn.Sequential else kind(*parts)
    pipes = [jpipe.pipeline([whole], 2), jpipe.pipeline(parts, 2, balance=[2])]
    found = []
    for pipe in pipes:
        variables = pipe.init(KEY, X)
        leaves = jax.tree.leaves(pipes[1].init(KEY, X))
        tree = jax.tree.structure(variables)
        given = pipe.place(jax.tree.unflatten(tree, leaves))
        (_, state), _ = pipe.value_and_grad(ref.mse, has_state=True)(given, X, X)
        found.append(jax.tree.leaves(state))
    for one, other in zip(*found, strict=True):
        np.testing.assert_array_equal(one, other)
    assert any(np.any(leaf != 0) for leaf in found[0])


def test_and_what_it_begins_with_may_be_a_function_or_may_take_anything():
    def noisy(x, train=False):
        return x + 1 if train else x

    np.testing.assert_array_equal(applied(nn.Sequential([noisy]), True), X + 1)
    np.testing.assert_array_equal(applied(nn.Sequential([noisy]), False), X)
    misnamed = nn.Sequential([lambda x, training=False: x])
    with pytest.raises(ValueError, match=r"begins, takes training; list jpipe.layer"):
        jpipe.pipeline([misnamed], 2)


@pytest.mark.parametrize(
    "listed",
    [
        nn.Sequential([nn.Dense(4), Centre()]),
        nnx.Sequential(nnx.Linear(4, 4, rngs=nnx.Rngs(0)), CentreNnx()),
        jpipe.layer(Centre(), lambda module, x: module(x)),
        jpipe.layer(CentreNnx(), lambda module, x: module(x)),
    ],
)
def test_a_norm_of_ones_own_that_nobody_tells_is_asked_about(listed):
    asked(listed, "does what evaluation does, as nobody fills train=False of Centre")
    applied(listed, False)


def test_a_module_that_is_told_nothing_and_needs_nothing():
    class Plain(nn.Module):
        """Takes the switch, and does the same."""

        def __call__(self, x, train=False):
            return 2 * x

    listed = nn.Sequential([nn.Dense(4), Plain()])
    assert applied(listed, True).shape == X.shape


# ----------------------------------------------------------- other names and kinds


@dataclasses.dataclass(frozen=True)
class Frozen:
    train: bool = False


class Named(typing.NamedTuple):
    train: bool = False


SWITCHES = {
    "dataclass": (Frozen(), lambda value: value.train),
    "NamedTuple": (Named(), lambda value: value.train),
    "dict": ({"train": False}, lambda value: value["train"]),
    "number": (2, lambda value: value == 1),
    "epoch": (-1, lambda value: value >= 0),
    "rate": (0.0, lambda value: value > 0),
    "bytes": (b"eval", lambda value: value == b"train"),
    "numpy": (np.False_, bool),
    "flags": ((), lambda value: "train" in value),
    "set": (frozenset(), lambda value: "train" in value),
}


@pytest.mark.parametrize("kind", SWITCHES)
@pytest.mark.parametrize("guarded", [False, True])
def test_a_switch_of_any_kind(kind, guarded):
    default, says = SWITCHES[kind]
    if guarded and isinstance(default, int | float) and kind != "numpy":
        pytest.skip("numbers are sizes and axes mostly: only what ran tells them")

    class Behind(nn.Module):
        @nn.compact
        def __call__(self, x, given=default):
            if guarded:
                return nn.Dropout(0.5, deterministic=False)(x) if says(given) else x
            return nn.Dropout(0.5)(x, deterministic=not says(given))

    asked(Behind(), "as nobody fills given=")


class Moving(nn.Module):
    """A moving mean behind a parameter of another name."""

    @nn.compact
    def __call__(self, x, update=False):
        mean = self.variable("ema", "mean", lambda: jnp.zeros(4))
        if update:
            mean.value = 0.9 * mean.value + 0.1 * x.mean(0)
        return x - mean.value


class Attends(nn.Module):
    """Dropout in a function."""

    @nn.compact
    def __call__(self, x, enable=False):
        q, k, v = (nn.Dense(4, name=name)(x)[:, None, None] for name in "qkv")
        rng = self.make_rng("dropout") if enable else None
        y = nn.dot_product_attention(
            q, k, v, dropout_rng=rng, dropout_rate=0.5, deterministic=not enable
        )
        return y[:, 0, 0]


@pytest.mark.parametrize(
    ("listed", "what"),
    [
        (Moving(), "what writes ema/mean .* update=False of Moving"),
        (Attends(), "what draws random numbers .* enable=False of Attends"),
    ],
)
def test_what_training_may_write_or_draw_is_asked_about(listed, what):
    asked(listed, what)
    line = "jpipe.layer(module, lambda module, x: module(x, {}=False))"
    name = "update" if isinstance(listed, Moving) else "enable"
    frozen = eval(line.format(name), {"jpipe": jpipe, "module": listed})
    np.testing.assert_array_equal(applied(frozen, True), applied(frozen, False))


def test_a_decorator_that_hides_the_parameters_is_refused():
    def logged(call):
        def run(self, x, *args):
            return call(self, x, *args)

        return run

    class Hidden(nn.Module):
        @nn.compact
        @logged
        def __call__(self, x, train=False):
            return nn.Dropout(0.5)(x, deterministic=not train)

    with pytest.raises(TypeError, match="Hidden is called with any arguments"):
        jpipe.pipeline([Hidden()], 2)


# ------------------------------------------------------------- as nnx has its modules


def test_a_module_of_nnx_is_what_it_is_while_it_is_trained():
    class Own(nnx.Module):
        """Has a mean of its own, by the momentum of its norm."""

        def __init__(self):
            self.norm = nnx.BatchNorm(4, momentum=0.75, rngs=nnx.Rngs(0))
            self.dropout = nnx.Dropout(0.0, rngs=nnx.Rngs(0))
            self.mine = nnx.BatchStat(jnp.zeros(4))

        def __call__(self, x):
            if type(self.dropout) is nnx.Dropout:
                x = 2 * x
            keep = self.norm.momentum
            self.mine[...] = keep * self.mine[...] + (1 - keep) * x.mean(0)
            return self.dropout(self.norm(x))

    module, pipe = Own(), jpipe.pipeline([Own()], 1)
    variables = pipe.init(KEY, X)
    (_, state), _ = pipe.value_and_grad(ref.mse, has_state=True)(variables, X, X)
    calls = [vars(kind)["__call__"] for kind in (nnx.Dropout, nnx.BatchNorm)]
    module(X)
    stats = state[0]["batch_stats"]
    # Single precision: statistics of a mini-batch move once, at its end.
    ref.assert_close(stats["mine"], module.mine[...], 1e-6)
    ref.assert_close(stats["norm"]["mean"], module.norm.mean[...], 1e-6)
    ref.assert_close(stats["norm"]["var"], module.norm.var[...], 1e-6)
    assert all(call.__module__.startswith("flax") for call in calls)


class Rebuilt(nnx.Module):
    """Holds the values of a norm, and makes the norm in each call."""

    def __init__(self):
        self.graphdef, state = nnx.split(
            nnx.BatchNorm(4, momentum=0.75, rngs=nnx.Rngs(0))
        )
        self.state = nnx.data(state)

    def __call__(self, x):
        norm = nnx.merge(self.graphdef, self.state)
        y = norm(x)
        nnx.update(self.state, nnx.state(norm))
        return y


def test_a_norm_of_nnx_that_a_call_makes_is_plain():
    module, pipe = Rebuilt(), jpipe.pipeline([Rebuilt()], 1)
    variables = pipe.init(KEY, X)
    (_, state), _ = pipe.value_and_grad(ref.mse, has_state=True)(variables, X, X)
    module(X)
    expected = nnx.to_pure_dict(nnx.state(module, nnx.BatchStat))
    # Compiled as a whole, in single precision.
    ref.assert_close(state[0]["batch_stats"], expected, 1e-6)


def test_equal_modules_of_nnx_are_equal_while_they_are_traced():
    class Pair(nnx.Module):
        def __init__(self):
            self.a, self.b = (nnx.Dropout(0.5, rngs=nnx.Rngs(0)) for _ in range(2))

        def __call__(self, x):
            return 2 * x if nnx.graphdef(self.a) == nnx.graphdef(self.b) else x

    pipe = jpipe.pipeline([Pair()], 2)
    np.testing.assert_array_equal(pipe.apply(pipe.init(KEY, X), X), 2 * X)
