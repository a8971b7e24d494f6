"""What is trained in one process, and in several, to the same bits."""

import functools
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
WHOLE = "1f1b", "mesh", "model", "model of 7"
# By which pipeline a state is saved, and by which restored, and after how many steps.
SAVED = (
    ("1f1b", "mesh", 2),
    ("model of 4", "model of 4", 1),
    ("model of 7", "model of 7", 1),
)


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


def with_keys(x):
    return x, jax.random.split(jax.random.key(1), len(x))


def noisy(inputs):
    x, keys = inputs
    return x * jax.vmap(jax.random.uniform)(keys)[:, None]


class Model(nn.Module):
    """The same kinds of layers as one model, with a tie, a skip and statistics."""

    @nn.compact
    def __call__(self, x, train):
        ends = Ends()
        skip = ends(x)
        h = nn.Dense(6)(jnp.sin(skip))
        h = nn.Dropout(0.3, deterministic=not train)(h)
        h = nn.BatchNorm(not train)(h) + skip
        return ends.decode(nn.Dense(6)(jnp.tanh(h)))


class Layer(nn.Module):
    """A layer of a stack, with dropout."""

    @nn.compact
    def __call__(self, x, train):
        h = nn.Dropout(0.3, deterministic=not train)(jnp.sin(nn.Dense(8)(x)))
        return x + h, None


class Scanned(nn.Module):
    """A scan over stacked layers, in pieces that lie in several processes."""

    num_layers: int

    @nn.compact
    def __call__(self, x, train):
        options: Any = {
            "variable_axes": {"params": 0},
            "split_rngs": {"params": True, "dropout": True},
            "in_axes": nn.broadcast,
        }
        layers = nn.scan(Layer, length=self.num_layers, **options)
        return layers(name="layers")(x, train)[0]


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
        "model": lambda: jpipe.pipeline(Model(), M, num_stages=4, devices=devices),
        "model on a mesh": lambda: jpipe.pipeline(Model(), M, mesh=mesh),
        # Equal pieces are one array, others several.
        "model of 4": lambda: jpipe.pipeline(
            Scanned(4), M, num_stages=4, devices=devices
        ),
        "model of 7": lambda: jpipe.pipeline(
            Scanned(7), M, num_stages=4, devices=devices
        ),
        "keys": lambda: jpipe.pipeline(
            [nn.Dense(8), with_keys, noisy, nn.Dense(8)],
            M,
            balance=[1] * 4,
            devices=devices,
        ),
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
    every = []
    while int(state.step) < until:
        state, metrics = step(state, *fed(*batch(int(state.step))))
        every += map(np.asarray, jax.tree.leaves(metrics))
    return state, every


def here(tree: PyTree) -> dict[str, np.ndarray]:
    """The leaves of a tree, or the pieces of them, that this process has, by path."""
    found = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        name = jax.tree_util.keystr(path)
        if isinstance(leaf, jpipe.Stacked):
            for i, array in enumerate(leaf.arrays):
                if array.addressable_shards:
                    found[f"{name} piece {i}"] = np.asarray(array)
        elif leaf.is_fully_replicated:
            if leaf.addressable_shards:
                found[name] = np.asarray(leaf)
        else:
            for shard in leaf.addressable_shards:
                found[f"{name} {shard.index}"] = np.asarray(shard.data)
    return found


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
    state, metrics = go_on(pipe, start(pipe), 3 if whole else 1, fed)
    found = here((state.params, state.opt_state, state.model_state))
    found |= {f"metric {i}": value for i, value in enumerate(metrics)}
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


def of_function() -> dict[str, np.ndarray]:
    """What a loss function, and a step that overwrites its parameters, come to."""
    rng, (x, targets) = np.random.default_rng(0), batch(0)
    params = {str(i): rng.normal(size=(8, 8)) for i in range(4)}
    params["rate"] = jnp.asarray(0.7)  # weakly typed, and read in the last stage

    def loss_fn(params, x, targets):
        table = params["0"]  # read in the first stage, and in the last
        h = jnp.sin(x @ table)
        for i in range(1, 4):
            h = jpipe.boundary(jnp.sin(h @ params[str(i)]))
        error = jnp.mean((h @ table.T * params["rate"] - targets) ** 2)
        return error + jnp.sum(table**2)

    grad_fn = jpipe.value_and_grad(loss_fn, M, num_stages=4, devices=jax.devices()[:4])
    params, losses = grad_fn.place(params, x, targets), []

    def step(params, grads):
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)

    update = grad_fn.jit(step, donate_argnums=(0, 1))
    for _ in range(2):
        loss, grads = grad_fn(params, x, targets)
        params = update(params, grads)
        losses.append(loss)
    metrics = {f"metric {i}": np.asarray(value) for i, value in enumerate(losses)}
    return here(params) | metrics


def of_scanned_function() -> dict[str, np.ndarray]:
    """What a loss function comes to that scans over pieces of stacked layers."""
    x, targets = batch(0)
    rng = np.random.default_rng(0)
    params = {
        "inner": rng.normal(size=(4, 8, 32)),
        "outer": rng.normal(size=(4, 32, 8)),
    }

    def loss_fn(params, x, targets):
        def layer(h, weights):
            return h + jnp.sin(h @ weights["inner"]) @ weights["outer"], None

        y, _ = jax.lax.scan(layer, x, params)
        return jnp.mean((y - targets) ** 2) + jnp.mean(params["inner"] ** 2)

    grad_fn = jpipe.value_and_grad(loss_fn, M, num_stages=4, devices=jax.devices()[:4])
    tx = optax.chain(optax.clip_by_global_norm(0.1), optax.adam(0.1))
    params = grad_fn.place(params, x, targets)
    optimizer = grad_fn.optimizer(tx)
    state = optimizer.init(params)
    update = grad_fn.jit(optax.apply_updates, donate_argnums=(0, 1))
    losses = []
    for _ in range(2):
        loss, grads = grad_fn(params, x, targets)
        updates, state = optimizer.update(grads, state, params)
        params = update(params, updates)
        losses.append(loss)
    metrics = {f"metric {i}": np.asarray(value) for i, value in enumerate(losses)}
    return here({"params": params, "state": state}) | metrics


def of_whole_batch() -> dict[str, np.ndarray]:
    """What two towers come to, whose loss compares all examples."""
    rng, (x, targets) = np.random.default_rng(0), batch(1)
    params = {
        "first": [rng.normal(size=(8, 8)) for _ in range(2)],
        "second": [rng.normal(size=(8, 8)) for _ in range(2)],
        "head": rng.normal(size=(8, 8)),  # read behind the marks alone
        "scale": jnp.asarray(0.5),
    }

    def loss_fn(params, x, targets):
        towers = []
        for name, h in (("first", x), ("second", targets)):
            for w in params[name]:
                h = jnp.sin(h @ w)
            towers.append(jpipe.whole_batch(h) @ params["head"])
        logits = towers[0] @ towers[1].T * jnp.exp(params["scale"])
        labels = jnp.arange(len(logits))
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return losses.mean() + jnp.sum(params["first"][0] ** 2)

    grad_fn = jpipe.value_and_grad(loss_fn, M, num_stages=4, devices=jax.devices()[:4])
    placed = grad_fn.place(params, x, targets)
    loss, grads = grad_fn(placed, x, targets)
    return here({"params": placed, "gradients": grads}) | {"metric 0": np.asarray(loss)}


def of_decoding() -> dict[str, np.ndarray]:
    """What calls come to of which each goes on from the caches of the one before."""
    layers = [nn.Dense(8), nn.MultiHeadDotProductAttention(2, decode=True)]
    layers += [nn.Dense(8), nn.MultiHeadDotProductAttention(2, decode=True)]
    pipe = jpipe.pipeline(layers, 2, devices=jax.devices()[:4])
    x = np.random.default_rng(0).normal(size=(5, 3, 8))
    variables = pipe.init(jax.random.key(0), x)
    for i in range(3):
        y, state = pipe.apply(variables, x[:, i : i + 1], mutable="cache", donate=True)
        pairs = zip(variables, state, strict=True)
        variables = [{**old, **new} for old, new in pairs]
    return here({"variables": variables, "output": y})


def refuse_pieces() -> list[str]:
    """What is said where all of a leaf is asked for, of which a process has pieces."""
    state = start(pipelines()["model of 7"]())
    other = jpipe.pipeline(Scanned(7), M, num_stages=3, devices=jax.devices()[:3])
    requests = (
        lambda: np.asarray(jax.tree.leaves(state.params)[0]),
        lambda: other.place(state.variables, batch(0)[0]),
    )
    messages = []
    for request in requests:
        try:
            request()
        except (RuntimeError, ValueError) as error:
            messages.append(str(error))
    return messages


def run(name: str, fed: Callable[..., Any] | None = None) -> dict[str, np.ndarray]:
    """What one of the pipelines, or the function, comes to in this process.

    Args:
      name: its name.
      fed: of a pipeline, what a process is given of a mini-batch.
    """
    if name == "function":
        return of_function()
    if name == "whole batch":
        return of_whole_batch()
    if name == "scanned function":
        return of_scanned_function()
    if name == "decoding":
        return of_decoding()
    pipe = pipelines()[name]()
    given = {"fed": functools.partial(fed, pipe)} if fed else {}
    if name.startswith("model"):  # all are given all
        given = {}
    return results(pipe, name in WHOLE, **given)
