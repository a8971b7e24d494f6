"""Stages with meshes of other sizes: two devices, then four, then two."""

import jax
import numpy as np
import pytest
from flax import linen as nn
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jpipe

from .stages import Normed, batch, compare, dense


def ranks(*shapes):
    """A mesh for each shape, of devices of its own."""
    found, start = [], 0
    for shape in shapes:
        size = int(np.prod(shape))
        devices = np.array(jax.devices()[start : start + size]).reshape(shape)
        found.append(Mesh(devices, ("data", "model")[: len(shape)]))
        start += size
    return found


def layers():
    """A tie between stages of other sizes, and a long skip."""
    shared = dense(8)

    def stashing(x):
        jpipe.stash("skip", x)
        return nn.tanh(x)

    return [
        dense(8),
        shared,
        stashing,
        Normed(),
        dense(8),
        lambda x: x + jpipe.pop("skip"),
        shared,
        dense(4),
    ]


def by_columns(path, spec):
    return P(None, "model") if spec.ndim == 2 and spec.shape[1] == 8 else None


def cut_both_ways(path, spec):
    return P("data", "model") if spec.shape == (8, 8) else None


def test_fsdp_parameters_are_whole_where_they_cannot_be_sharded(double):
    pipe = jpipe.pipeline(
        layers(),
        2,
        balance=[3, 3, 2],
        devices=ranks((2, 2), (2,), (2,)),
        sharding=cut_both_ways,
        gather="microbatch",
    )
    compare(layers, pipe, 4, *batch(16))
    axes = [set(stage.sharded_params) for stage in pipe.plan.stages]
    assert axes[0] == {"data", "model"}
    assert "model" not in axes[1] | axes[2]


def test_a_replica_may_have_a_mesh_of_another_shape(double):
    def make():
        return [dense(8), nn.tanh, dense(8), dense(4)]

    pipe = jpipe.pipeline(
        make(),
        3,
        balance=[2, 2],
        replicas=[2, 1],
        devices=ranks((2, 2), (2,), (2,)),
        sharding=by_columns,
    )
    compare(make, pipe, 6, *batch())


@pytest.mark.parametrize(
    ("devices", "says"),
    [
        (lambda: ranks((2,), (4,)), r"along 'data'.* rank 0 over 2, rank 1 over 4"),
        (
            lambda: [ranks((2,))[0], ranks((2, 2))[0]],
            r"cpu:\d is in the meshes of rank 0 and rank 1; give each rank devices",
        ),
    ],
)
def test_meshes_that_do_not_fit_say_what_to_type(devices, says):
    with pytest.raises(ValueError, match=says):
        jpipe.pipeline([dense(8), dense(4)], 2, devices=devices())
