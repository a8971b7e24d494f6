"""Long skip connections: transparent, straight, freed; every fault is named."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

import jpipe

from .. import reference as ref


class Down(nn.Module):
    """Halves the width and stashes a pytree with an integer leaf and ``None``."""

    name_: str = "skip"

    @nn.compact
    def __call__(self, x):
        h = nn.Dense(x.shape[-1] // 2, param_dtype=x.dtype)(x)
        rows = (x[:, 0] > 0).astype(jnp.int32)
        value = {"x": jnp.sin(x), "rows": rows, "none": None}
        jpipe.stash(self.name_, value)
        return nn.tanh(h)


class Up(nn.Module):
    """Doubles the width and adds what was stashed."""

    name_: str = "skip"

    @nn.compact
    def __call__(self, x):
        skip = jpipe.pop(self.name_)
        assert skip["none"] is None
        weight = 1 / (1 + skip["rows"].astype(x.dtype))
        h = nn.Dense(2 * x.shape[-1], param_dtype=x.dtype)(x)
        return h + skip["x"] * weight[:, None]


def layers(dtype=jnp.float32):
    """A small U: two skips, one inside the other, of one block class."""
    return [
        ref.dense(8, dtype),
        jpipe.isolate(Down(), "outer"),
        jpipe.isolate(Down(), "inner"),
        jnp.sin,
        jpipe.isolate(Up(), "inner"),
        jpipe.isolate(Up(), "outer"),
        ref.dense(4, dtype),
    ]


def test_training_continues_in_a_pipe_of_another_balance():
    x, targets = ref.regression(8)
    tx = optax.adam(1e-2)
    one = jpipe.pipeline(layers(), 4, balance=[2, 2, 1, 2], schedule="zb_h1")
    two = jpipe.pipeline(layers(), 4, balance=[4, 3])
    state = one.init_train_state(jax.random.key(0), x, tx)
    losses = []
    for pipe in (one, two, one):
        state = pipe.place(state)
        state, metrics = pipe.train_step(ref.mse, tx)(state, x, targets)
        losses.append(float(metrics["loss"]))
    assert losses[2] < losses[1] < losses[0]


class TestTransfers:
    def moves(self, balance, schedule="1f1b"):
        """From which device to which each transfer of a forward pass goes."""
        pipe = jpipe.pipeline(layers(), 1, balance=balance, schedule=schedule)
        x, _ = ref.regression(4)
        variables = pipe.init(jax.random.key(0), x)
        program = pipe._cache.inference(variables, x, None, False).program
        return [
            (program.devices[i.source].id, program.devices[i.place].id)
            for i in program.instructions
            if i.source is not None and i.source >= 0
        ]

    def test_go_straight_to_where_they_are_popped(self):
        # The inner one ends in the next stage: it travels with the boundary.
        moves = self.moves([2, 2, 1, 2])
        assert sorted(moves) == [(0, 1), (0, 3), (1, 2), (2, 3)]

    def test_nothing_moves_between_stages_of_one_rank(self):
        # ZB-V: the first and the last stage are on one rank.
        moves = self.moves([2, 2, 1, 2], "zb_v")
        assert (0, 0) not in moves
        assert sorted(moves) == [(0, 1), (1, 0)]


def test_the_plan_shows_the_routes():
    pipe = jpipe.pipeline(layers(), 2, balance=[2, 2, 1, 2])
    x, _ = ref.regression(4)
    pipe.init(jax.random.key(0), x)
    assert "'skip' of 'outer': stage 0 to 3" in str(pipe)
    assert "'skip' of 'inner': stage 1 to 2" in str(pipe)


def keep(x):
    jpipe.stash("a", x)
    return x


def take(x):
    return x + jpipe.pop("a")


def refused(layers, *messages):
    with pytest.raises(ValueError, match="the skip connections do not fit") as caught:
        jpipe.sequential(layers).init(jax.random.key(0), jnp.ones((2, 3)))
    for message in messages:
        assert message in str(caught.value)


class TestFaults:
    def test_all_at_once(self):
        refused(
            [
                take,
                keep,
                keep,
                lambda x: x + jpipe.pop("nowhere"),
                jpipe.isolate(keep, "ns"),
            ],
            "'a' is popped by layer 0 (take) before it is stashed by layer 1 (keep)",
            "'a' is stashed twice: by layer 1 (keep) and layer 2 (keep)",
            "'nowhere' is popped by layer 3 (<lambda>) and never stashed",
            "'a' of 'ns' is stashed by layer 4 (keep) and never popped",
        )

    def test_popped_twice(self):
        refused(
            [keep, take, take], "'a' is popped twice: by layer 1 (take) and layer 2"
        )

    def test_what_a_guess_breaks_later_does_not_hide_the_fault(self):
        refused(
            [lambda x: x @ jpipe.pop("matrix"), lambda x: x @ jnp.ones((99, 3))],
            "'matrix' is popped by layer 0 (<lambda>) and never stashed",
        )

    def test_outside_of_a_pipeline(self):
        with pytest.raises(RuntimeError, match="is for the layers of a pipeline"):
            jpipe.stash("a", 1)
        with pytest.raises(RuntimeError, match=re.escape("pop('a')")):
            jpipe.pop("a")

    def test_names_without_a_hash(self):
        with pytest.raises(TypeError, match=re.escape("isolate(..., ['a']): needs a")):
            jpipe.isolate(keep, ["a"])
        layers = [lambda x: jpipe.stash(["a"], x)]
        with pytest.raises(TypeError, match="hashable name, such as a string; this is"):
            jpipe.sequential(layers).init(jax.random.key(0), jnp.ones((2, 3)))

    @pytest.mark.parametrize(
        "transform",
        [
            jax.jit,
            jax.checkpoint,
            jax.vmap,
            lambda f: lambda x: jax.lax.map(f, x),
        ],
        ids=["jit", "checkpoint", "vmap", "map"],
    )
    def test_inside_a_transformation(self, transform):
        layers = [transform(keep), take]
        with pytest.raises(RuntimeError, match="return the value from it and stash it"):
            jpipe.sequential(layers).init(jax.random.key(0), jnp.ones((2, 3)))
        layers = [keep, transform(take)]
        with pytest.raises(RuntimeError, match="pop it outside and pass it in"):
            jpipe.sequential(layers).init(jax.random.key(0), jnp.ones((2, 3)))


def test_skips_that_depend_on_training_are_refused_whatever_the_balance():
    def first(x, train):
        if train:
            jpipe.stash("q", x)
        return x

    def second(x, train):
        return x + jpipe.pop("q") if train else x

    x, _ = ref.regression(4)
    pipe = jpipe.pipeline([first, second], 2)
    with pytest.raises(ValueError, match="stashed or popped in training and not in"):
        pipe.value_and_grad(ref.mse)(({}, {}), x, x)


def test_namespaces_nest():
    def keep(x):
        jpipe.stash("a", x)
        return x

    def take(x):
        return x + jpipe.pop("a")

    def block(name, layer):
        return jpipe.isolate(jpipe.isolate(layer, name), "outer")

    layers = [block("i", keep), block("j", keep), block("i", take), block("j", take)]
    y = jpipe.sequential(layers).apply(({},) * 4, jnp.ones(3))
    np.testing.assert_array_equal(y, 3 * np.ones(3))
