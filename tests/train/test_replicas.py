"""Replicas of a stage take micro-batches in turn: the results of one device each."""

import jax

import jpipe

from .. import reference as ref
from ..mesh.stages import Normed, batch, compare, dense, mesh


def normed():
    return [Normed(), Normed(), dense(8), dense(4)]


def test_norms_dropout_and_sums_are_those_of_one_device(double):
    options = {"balance": [2, 2], "replicas": [3, 1], "mesh": mesh(4, 2)}
    compare(normed, jpipe.pipeline(normed(), 3, **options), 6, *batch())


def test_weights_are_sent_and_gradients_added_once_in_a_step(moved):
    """However many micro-batches: what moves beyond boundaries is the kernels' size."""
    sizes = []
    for num_microbatches in (3, 6):
        pipe = jpipe.pipeline(
            [ref.dense(8), ref.dense(4)], num_microbatches, replicas=[3, 1]
        )
        x, targets = ref.regression(12)
        variables = pipe.init(jax.random.key(0), x)
        find = pipe.value_and_grad(ref.mse)
        find(variables, x, targets)
        moved.clear()
        find(variables, x, targets)
        kernels = [target for size, target in moved if size == 40]
        # To two replicas; and back from them, once.
        assert len(kernels) == 4
        sizes.append(kernels)
    assert sizes[0] == sizes[1]
