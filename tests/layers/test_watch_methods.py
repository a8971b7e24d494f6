"""Methods of nnx modules that Flax transforms are seen as any other."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jpipe

KEY, X = jax.random.key(0), jnp.ones((8, 4))
RNGS = {"dropout": jax.random.key(1)}


class Base(nnx.Module):
    """A dropout and a batch norm."""

    def __init__(self):
        self.dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(0))
        self.norm = nnx.BatchNorm(4, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return self.inner(x)


class Jitted(Base):
    @nnx.jit(static_argnames=("more",))
    def inner(self, x, more=False):
        x = self.norm(x, use_running_average=not more)
        return self.dropout(x, deterministic=not more)


class Guarded(Base):
    @nnx.jit(static_argnames=("more",))
    def inner(self, x, more=False):
        return self.dropout(x) if more else x


class Again(Base):
    @nnx.jit(static_argnums=(2,))
    @nnx.remat(static_argnums=(2,))
    def inner(self, x, more=False):
        return self.dropout(x) if more else x


def outputs(listed, train):
    pipe = jpipe.sequential([listed], 2)
    return np.asarray(pipe.apply(pipe.init(KEY, X), X, rngs=RNGS, train=train))


@pytest.mark.parametrize(
    ("kind", "parts"),
    [
        (Jitted, "batch norm norm and dropout dropout"),
        (Guarded, "dropout dropout"),
        (Again, "dropout dropout"),
    ],
)
def test_what_nobody_fills_of_a_method_in_a_jit_is_asked_for(kind, parts):
    outputs(kind(), False)
    before = dict(vars(kind))
    with pytest.raises(ValueError, match="it is unclear what") as asked:
        outputs(kind(), True)
    assert (
        f"{parts} does what evaluation does, as nobody fills more=False of "
        f"{kind.__name__}.inner; where Base calls it, write more=train"
    ) in str(asked.value)
    assert dict(vars(kind)) == before


class Told(Base):
    """Is told, through the jit of its call and of another method."""

    @nnx.jit(static_argnames=("train",))
    def __call__(self, x, train, scale=None):
        return self.inner(x, train)

    @nnx.jit(static_argnames=("train",))
    def inner(self, x, train=False):
        return self.dropout(x, deterministic=not train)


def test_one_in_a_jit_that_is_told_is_trained():
    assert set(np.unique(outputs(Told(), True))) == {0, 2}
    assert (outputs(Told(), False) == 1).all()
