"""Examples over several devices per stage: M micro-batches on D are M * D on one."""

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jpipe

from .. import reference as ref
from .stages import TX, all_of, batch, close, compare, dense, mesh, normed

pytestmark = pytest.mark.usefixtures("double")


def plain():
    return [dense(8), jnp.tanh, dense(8), dense(4)]


def test_aux_is_joined_over_shards_where_it_has_an_axis():
    """Also what leaves as it came: a target; two variables that change places."""

    class Swapping(nn.Module):
        @nn.compact
        def __call__(self, x, train):
            a, b = (
                self.variable("own", name, lambda n=n: jnp.arange(4) * n)
                for n, name in enumerate("ab")
            )
            x = dense(8)(x) + a.value.sum()
            if train:
                a.value, b.value = b.value, a.value
            return x

    def make():
        return [Swapping(), jnp.tanh, dense(8), dense(4)]

    def loss_fn(y, t):
        return ref.mse(y * t["scale"], t["y"]), (y.sum(1), t["scale"])

    x, targets = batch()
    axes = {"target_axes": {"y": 0, "scale": None}}
    targets = {"y": targets, "scale": jnp.arange(8.0).reshape(2, 4).sum(0)}
    pipe = jpipe.pipeline(make(), 2, balance=[2, 2], mesh=mesh(2, 2), **axes)
    options = {"loss_fn": loss_fn, "has_aux": True, "aux_axes": (0, None)}
    got = compare(make, pipe, 4, x, targets, given=axes, **options)
    shapes = [leaf.shape for leaf in got["metrics"]["aux"]]
    assert shapes == [(24,), (4, 4)]


def test_a_batch_may_be_anywhere_and_a_device_holds_what_one_would():
    pipe = jpipe.pipeline(plain(), 2, balance=[2, 2], mesh=mesh(2, 2))
    one = jpipe.pipeline(plain(), 2, balance=[2, 2])
    x, targets = batch(16)
    find = pipe.value_and_grad(ref.mse)
    variables = pipe.init(jax.random.key(0), x)
    expected = find(variables, x, targets)
    over = NamedSharding(jax.make_mesh((8,), ("any",)), P("any"))
    for given in (ref.on_host((x, targets)), jax.device_put((x, targets), over)):
        ref.assert_equal(find(variables, *given), expected)
    given = one.init(jax.random.key(0), x[:8]), x[:8], targets[:8]
    one_find = one.value_and_grad(ref.mse)
    one_find(*given)
    # Beside the mini-batch, which one device is given whole and cuts itself.
    peaks = [f.plan.peak_bytes for f in (find, one_find)]
    for several, alone in zip(*peaks, strict=True):
        assert several[1] == pytest.approx(alone[1], rel=0.2)


def test_a_state_moves_between_meshes():
    x, targets = batch()
    first = jpipe.pipeline(normed(), 2, balance=[2, 2], mesh=mesh(2, 2))
    state = all_of(first, x, targets)["state"]
    saved = jax.device_get(state.replace(rng=jax.random.key_data(state.rng)))
    saved = saved.replace(rng=jax.random.wrap_key_data(saved.rng))
    second = jpipe.pipeline(normed(), 1, balance=[1, 3], mesh=mesh(2, 4))
    one = jpipe.sequential(normed(), 4)
    after = []
    for pipe in (first, second, one):
        step = pipe.train_step(ref.mse, TX)
        after.append(step(pipe.place(saved), x, targets))
    for other in after[1:]:
        close(other, after[0])
