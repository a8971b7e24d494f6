"""SpectraX, in a process of its own: two CPU devices, as ours.

It is given the plain JAX function that the baseline differentiates, of the same Flax
layers with the same weights, with its mark between the halves. Its steps wait for all
micro-batches by themselves. The update is a `jax.jit` for each stage, where the
gradients are.
"""

# pyright: reportMissingImports=false

from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from spectrax.runtime import GPipe, Std1F1B, sxjit, sxstage_iter, sxvalue_and_grad
from spectrax.runtime.types import MpMdMesh

from ..experiment import mean_cross_entropy
from . import ours
from .measure import Training
from .workload import LEARNING_RATE, Case

PyTree = Any
SCHEDULES = {"gpipe": GPipe, "1f1b": Std1F1B}


def pipeline(case: Case) -> Training:
    """Two stages of SpectraX."""
    layers, size = case.layers(), case.size
    halves = ours.halves([ours.module(layer, size) for layer in layers], case)
    devices = jax.devices()[:2]
    mesh = MpMdMesh(Mesh(np.array(devices), ("stages",)), "stages")
    schedule = SCHEDULES[case.schedule](microbatches=case.microbatches)

    @sxjit(mesh=mesh, schedule=schedule, batch_argnums=(1, 2))
    def loss(weights: PyTree, x: Any, targets: Any) -> Any:
        (_, first), (_, second) = halves
        return mean_cross_entropy(
            second(weights[1], sxstage_iter(first(weights[0], x))), targets
        )

    def new(weights: PyTree, grads: PyTree) -> PyTree:
        return jax.tree.map(lambda w, g: w - LEARNING_RATE * g, weights, grads)

    update = jax.jit(new, donate_argnums=0)
    find, end = sxvalue_and_grad(loss), case.balance()[0]
    loaded = [ours.params(layer, size) for layer in layers]
    pairs = zip((loaded[:end], loaded[end:]), devices, strict=True)
    box = [[jax.device_put(own, device) for own, device in pairs]]
    x, targets = case.data()
    batch = jax.device_put(x, devices[0]), jax.device_put(targets, devices[1])

    def step() -> float:
        weights = box.pop()
        value, (grads,) = find(weights, *batch)
        box.append([*map(update, weights, grads)])
        jax.block_until_ready(box)
        return float(value)

    return Training(ours.total_here(box), step)


warm_up = ours.warm_up
