"""What is trained in one process, and in several, to the same bits."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from jax.sharding import Mesh

import jpipe

PyTree = Any
M = 4
# The pipelines of which more is looked at than a step: programs take long to compile.
WHOLE = "1f1b", "mesh"


class Ends(nn.Module):
    """An embedding that is used again at the end."""

    def setup(self):
        self.table = self.param("table", nn.initializers.normal(), (8, 6))

    def __call__(self, x):
        return x @ self.table

    def decode(self, x):
        return x @ self.table.T


def layers():
    """Dropout, a batch norm, a skip connection and a tie."""
    ends = Ends()

    def stashing(x):
        jpipe.stash("skip", x)
        return jnp.sin(x)

    def popping(x):
        return x + jpipe.pop("skip")

    return [
        ends,
        stashing,
        nn.Dense(6),
        nn.Dropout(0.3),
        nn.BatchNorm(),
        popping,
        nn.Dense(6),
        jpipe.layer(ends, "decode"),
    ]


def loss(y, targets):
    return jnp.mean((y - targets) ** 2), {"worst": jnp.abs(y - targets).max(1)}


def weighted(y, targets):
    """Its weight reads outputs, and goes to all stages."""
    _, aux = loss(y, targets)
    return (jnp.sum((y - targets) ** 2), jnp.sum(y < targets)), aux


def batch(step: int) -> tuple[np.ndarray, np.ndarray]:
    """The mini-batch of a step: the data position is the number of the step."""
    rng = np.random.default_rng(step)
    size = 10 if step == 1 else 16  # one is smaller, and does not divide
    return rng.normal(size=(size, 8)), rng.normal(size=(size, 8))


TX = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2))


def pipelines() -> dict[str, Callable[[], Any]]:
    """Each needs four devices, of one process or of several."""
    devices = jax.devices()[:4]

    def made(**how: Any) -> Callable[[], Any]:
        return lambda: jpipe.pipeline(layers(), M, **{"devices": devices, **how})

    mesh = Mesh(np.array(devices).reshape(2, 2), ("stage", "data"))
    return {
        "1f1b": made(balance=[2, 2, 2, 2]),
        "zb_h1": made(balance=[2, 2, 2, 2], schedule="zb_h1"),
        "zb_v": made(balance=[1] * 8, schedule="zb_v"),
        "mesh": made(balance=[4, 4], mesh=mesh, devices=None),
        "replicas": made(balance=[2, 4, 2], replicas=[1, 2, 1]),
    }


def start(pipe: jpipe.Pipeline) -> jpipe.TrainState:
    """The state at step 0."""
    x = jax.ShapeDtypeStruct((16, 8), jnp.zeros(()).dtype)
    return pipe.init_train_state(jax.random.key(0), x, TX)


def go_on(
    pipe: jpipe.Pipeline,
    state: jpipe.TrainState,
    until: int,
    fed: Callable[..., Any] = lambda *batch: batch,
) -> tuple[jpipe.TrainState, list[np.ndarray]]:
    """Trains; gives the state, and the metrics of all steps."""
    step = pipe.train_step(loss, TX, has_aux=True, aux_axes=0)
    told = []
    while int(state.step) < until:
        state, metrics = step(state, *fed(*batch(int(state.step))))
        told += map(np.asarray, jax.tree.leaves(metrics))
    return state, told


def here(tree: PyTree) -> dict[str, np.ndarray]:
    """The leaves of a tree that this process has, by path."""
    return {
        jax.tree_util.keystr(path): np.asarray(leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
        if leaf.addressable_shards
    }


def results(
    pipe: jpipe.Pipeline,
    whole: bool,
    fed: Callable[..., Any] = lambda *batch: batch,
) -> dict[str, np.ndarray]:
    """What steps, and functions of what they give, come to in this process.

    Args:
      pipe: the pipeline.
      whole: whether it is three steps, and what else a loop calls.
      fed: what a process is given of a mini-batch.
    """
    state, told = go_on(pipe, start(pipe), 3 if whole else 1, fed)
    found = here((state.params, state.opt_state, state.model_state))
    found |= {f"metric {i}": value for i, value in enumerate(told)}
    if not whole:
        return found
    x, targets = batch(7)
    run = pipe.value_and_grad(
        weighted, has_aux=True, has_state=True, reduction="weighted"
    )
    given = *fed(x, targets), jax.random.key(5)
    (value, _, new), grads = run(state.variables, *given[:2], rngs=given[2])
    norm = pipe.jit(optax.tree.norm)(grads)
    found |= {"loss": np.asarray(value), "norm": np.asarray(norm)}
    y = pipe.apply(state.variables, fed(x, targets)[0])
    return found | here({"gradients": grads, "changed": new, "output": y})
