"""``out_axes=``: what micro-batches return is what one device returns, or refused."""

import re

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn

import jpipe

from .. import reference as ref
from ..slow import slow_except

pytestmark = pytest.mark.usefixtures("quick")

KEY = jax.random.key(0)


class Head(nn.Module):
    """Outputs of many sorts; micro-batches have two examples, as many as codes rows."""

    @nn.compact
    def __call__(self, x):
        codes = self.param("codes", nn.initializers.lecun_normal(), (2, 3))
        y = nn.Dense(3, name="dense")(x)
        return {
            "y": y,
            "reduced": {"mean": (y**2).mean(), "each": y.mean(0)},
            "counted": {"positive": (y > 0).sum(), "total": y.sum(0)},
            "of no example": {
                "codes": codes,
                "scaled": jnp.exp(codes),
                "temperature": jnp.exp(codes[0, 0]),
                "table": jnp.ones((5,)),
                "repeated": jnp.broadcast_to(codes[0], (len(x), 3)),
                "zeros": jnp.zeros((len(x), 3)),
                "positions": jnp.arange(len(x)),
                "size": len(x),
            },
        }


AXES = {
    "y": 0,
    "reduced": jpipe.MEAN,
    "counted": jpipe.SUM,
    "of no example": 0,
}


def build(name, out_axes, num_microbatches=4):
    """A pipeline of a dense layer and a head, listed or one model."""
    layers, devices = [nn.Dense(6), Head()], jax.devices()
    model = nn.Sequential([nn.Dense(6), Head()])
    options = {"num_microbatches": num_microbatches, "out_axes": out_axes}
    stages = {"mesh": jax.make_mesh((2, 2), ("stage", "data"), devices=devices[:4])}
    return {
        "list": lambda: jpipe.pipeline(layers, **options),
        "sequential": lambda: jpipe.sequential(layers, **options),
        "replicas": lambda: jpipe.pipeline(layers, replicas=[1, 2], **options),
        "list on meshes": lambda: jpipe.pipeline(layers, **options, **stages),
        "model": lambda: jpipe.pipeline(model, num_stages=2, **options),
        "model on meshes": lambda: jpipe.pipeline(model, **options, **stages),
    }[name]()


PIPES = "list", "sequential", "replicas", "list on meshes", "model", "model on meshes"


def on_one_device(variables, x):
    """What the two layers return, composed by hand."""
    params = jax.device_get(variables)
    if isinstance(params, tuple):
        first, head = params
    else:
        first, head = ({"params": own} for own in params["params"].values())
    outputs = Head().apply(head, nn.Dense(6).apply(first, x))
    return jax.tree.map(jnp.asarray, outputs)


@pytest.mark.parametrize(
    "name",
    slow_except({"list", "replicas", "list on meshes", "model on meshes"}, PIPES),
)
def test_outputs_are_those_of_one_device(name):
    """Of micro-batches of two examples each, of two and three, and of a single one."""
    pipe, num_shards = build(name, AXES), 2 if "mesh" in name else 1
    for examples in (8 * num_shards, 10 * num_shards):
        x = jax.random.normal(KEY, (examples, 4))
        variables = pipe.init(KEY, x)
        found = pipe.apply(variables, x)
        ref.assert_close(found, on_one_device(variables, x), ref.FLOAT32)


def test_one_micro_batch_returns_the_outputs_of_one_device():
    pipe, x = build("list", None, num_microbatches=1), jax.random.normal(KEY, (8, 4))
    variables = pipe.init(KEY, x)
    found = pipe.apply(variables, x)
    ref.assert_close(found, on_one_device(variables, x), ref.FLOAT32)


@pytest.mark.parametrize("name", slow_except({"list", "model on meshes"}, PIPES))
def test_an_output_that_follows_from_examples_is_not_given_once(name):
    axes = {**AXES, "reduced": {"mean": None, "each": jpipe.MEAN}, "counted": None}
    pipe = build(name, axes)
    x = jax.random.normal(KEY, (16, 4))
    variables = pipe.init(KEY, x)
    says = re.escape("as in out_axes=(0, jpipe.MEAN)")
    with pytest.raises(ValueError, match=says) as refusal:
        pipe.apply(variables, x)
    assert str(refusal.value).splitlines()[1:] == [
        "  * outputs['counted']['positive'] has shape ()",
        "  * outputs['counted']['total'] has shape (3,)",
        "  * outputs['reduced']['mean'] has shape ()",
    ]


def test_a_mean_of_a_count_is_refused():
    pipe = jpipe.pipeline([lambda x: (x, (x > 2).sum())], 4, out_axes=(0, jpipe.MEAN))
    says = r"(?s)of a count type jpipe.SUM.*outputs\[1\] is int32"
    with pytest.raises(ValueError, match=says):
        pipe.apply(({},), jnp.arange(8.0)[:, None])


def test_outputs_of_another_structure_or_of_one_axis_for_tokens_are_refused():
    x = jnp.ones((8, 2))
    rows = jpipe.pipeline([lambda x: [*x]], 3, out_axes=jpipe.SUM)
    with pytest.raises(ValueError, match=r"sizes \(3, 3, 2\).*what is in outputs: "):
        rows.apply(({},), x)
    tokens = jpipe.pipeline([lambda x: x.reshape(-1)], 4)
    with pytest.raises(ValueError, match="cannot be joined on out_axes=0"):
        tokens.apply(({},), x)
