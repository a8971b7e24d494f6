"""A model on one device: its layers applied one after the other, by Flax and optax.

Of jpipe only what holds the user's modules is read here. Where a layer looks at its
whole batch, the loss is composed of micro-batches; else it is of the mini-batch.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax import nnx

import jpipe

from . import layers as vocabulary
from .layers import MOMENTUM

PyTree = Any
Loss = Callable[[PyTree, PyTree], tuple[jax.Array, PyTree]]
# A part of a mini-batch: its input and its targets, which count its examples.
Part = tuple[PyTree, PyTree]
# Of the path of a parameter, from the number of its layer on, and its value.
Trainable = Callable[[tuple[Any, ...], Any], bool]


def compose(
    layers: Sequence[Any],
    variables: Sequence[PyTree],
    x: PyTree,
    train: bool = False,
    key: Any = None,
) -> tuple[PyTree, tuple[PyTree, ...]]:
    """The output of the layers, and their variables after the call.

    With a key each linen module draws from it.
    """
    x = jax.tree.map(jnp.asarray, x)
    owned: dict[int, int] = {}
    held: dict[int, PyTree] = {}
    after = list(variables)
    shelf: vocabulary.Shelf = {}
    for number, listed in enumerate(layers):
        namespace, module, method = opened(listed)
        own = owned.setdefault(id(module), number)
        after[own] = _with_held(module, after[own], held)
        with vocabulary.by_hand(shelf, namespace):
            x, after[own] = _call(module, method, after[own], x, train, key)
    return x, tuple(after)


def opened(listed: Any) -> tuple[Any, Any, str]:
    """The namespace of the skips of a layer, what is called, and its method."""
    namespace: Any = None
    while hasattr(listed, "namespace"):  # by jpipe.isolate
        namespace, listed = (namespace, listed.namespace), listed.layer
    if hasattr(listed, "method"):  # by jpipe.layer
        return namespace, listed.module, listed.method
    return namespace, listed, "__call__"


def switched(module: Any, method: str, train: bool) -> list[bool]:
    """What a method is given after its input."""
    switches = {
        "train": train,
        "deterministic": not train,
        "use_running_average": not train,
    }
    _, _, *after_x = inspect.signature(getattr(type(module), method)).parameters
    return [switches[name] for name in after_x[:1] if name in switches]


def _with_held(module: Any, entry: PyTree, held: dict[int, PyTree]) -> PyTree:
    """The variables of a layer, with those of a part that an earlier layer has too."""
    if not isinstance(module, vocabulary.Around):
        known = held.setdefault(id(module), entry.get("params"))
        return entry if known is None else {**entry, "params": known}
    known = held.get(id(module.inner))
    if known is not None:
        return {**entry, "params": {"inner": known}}
    held[id(module.inner)] = entry["params"]["inner"]
    return entry


def _call(
    module: Any, method: str, variables: PyTree, x: PyTree, train: bool, key: Any = None
) -> Any:
    if isinstance(module, nnx.Module):
        return _call_nnx(module, method, variables, x, train)
    if isinstance(module, jpipe.Layer):
        return module.apply(variables, x), variables
    if not isinstance(module, nn.Module):
        return module(x), variables
    args = switched(module, method, train)
    options = {"method": method, "rngs": {} if key is None else {"dropout": key}}
    mutable = [name for name in variables if name != "params"] if train else []
    y, changed = module.apply(variables, x, *args, mutable=mutable, **options)
    return y, {**variables, **changed}


def _call_nnx(
    module: Any, method: str, variables: PyTree, x: PyTree, train: bool
) -> Any:
    own = nnx.clone(module)
    for values in variables.values():
        nnx.update(own, nnx.State(values))
    own.train() if train else own.eval()
    y = getattr(own, method)(x)
    if "batch_stats" not in variables:
        return y, variables
    statistics = nnx.to_pure_dict(nnx.state(own, nnx.BatchStat))
    return y, {**variables, "batch_stats": statistics}


def value_and_grad(
    layers: Sequence[Any],
    loss_fn: Loss,
    trainable: Trainable | None = None,
    keys: Sequence[Any] | None = None,
    penalty: Callable[[PyTree], jax.Array] | None = None,
) -> Callable[[Sequence[PyTree], Sequence[Part]], tuple[Any, PyTree]]:
    """The loss and its gradients of a mini-batch, compiled as one program.

    Args:
      layers: the layers.
      loss_fn: ``(outputs of all parts, their targets) -> (loss, aux)``, each joined.
      trainable: which parameters have a gradient; ``None`` stands for the others.
      keys: what each part draws from, where there is one layer.
      penalty: of the parameters of the one layer, which is added to the loss.

    Returns:
      A function of the variables and of the mini-batch, as one part or as
      micro-batches: ``((loss, aux, variables after it), grads)``.
    """

    def loss(free: PyTree, variables: Sequence[PyTree], parts: Sequence[Part]) -> Any:
        new = restored(free, _params(variables))
        merged = _merged(variables, new)
        results = [
            compose(layers, merged, x, True, key)
            for (x, _), key in zip(parts, keys or [None] * len(parts), strict=True)
        ]
        targets = [targets for _, targets in parts]
        value, aux = loss_fn(_joined([y for y, _ in results]), _joined(targets))
        if penalty is not None:
            value += penalty(new[0])
        sizes = [len(jax.tree.leaves(own)[0]) for own in targets]
        after = _committed(variables, [after for _, after in results], sizes)
        return value, (aux, after)

    @jax.jit
    def find(variables: Sequence[PyTree], parts: Sequence[Part]) -> Any:
        gradient = jax.value_and_grad(loss, has_aux=True, allow_int=True)
        free = selected(_params(variables), trainable)
        (value, (aux, after)), grads = gradient(free, variables, parts)
        return (value, aux, after), grads

    return find


def _params(variables: Sequence[PyTree]) -> tuple[PyTree, ...]:
    return tuple(entry.get("params", {}) for entry in variables)


def selected(params: PyTree, trainable: Trainable | None) -> PyTree:
    """The parameters, with ``None`` for those that are not trained."""

    def select(path: Any, leaf: Any) -> Any:
        at = tuple(getattr(key, "key", getattr(key, "idx", None)) for key in path)
        floats = jnp.issubdtype(leaf.dtype, jnp.inexact)
        return leaf if trainable is None or (floats and trainable(at, leaf)) else None

    return jax.tree_util.tree_map_with_path(select, params)


def restored(free: PyTree, whole: PyTree) -> PyTree:
    """The parameters, with others in place of those that are selected."""
    return jax.tree.map(lambda own, new: own if new is None else new, whole, free)


def _merged(variables: Sequence[PyTree], params: Sequence[PyTree]) -> list[PyTree]:
    """The variables with other parameters."""
    return [
        {**entry, "params": own} if "params" in entry else entry
        for entry, own in zip(variables, params, strict=True)
    ]


def _joined(trees: Sequence[PyTree]) -> PyTree:
    return jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *trees)


def _committed(
    before: Sequence[PyTree], afters: Sequence[Sequence[PyTree]], sizes: Sequence[int]
) -> tuple[PyTree, ...]:
    """The collections after a mini-batch, from what each micro-batch made of them.

    A running mean or variance moves once, towards that of the whole mini-batch; other
    collections become the mean over examples; integers those of the last micro-batch.
    """
    shares = [size / sum(sizes) for size in sizes]

    def mean(leaves: Sequence[Any]) -> Any:
        return sum(share * leaf for share, leaf in zip(shares, leaves, strict=True))

    def batch_norm(old: dict[str, Any], new: list[dict[str, Any]]) -> dict[str, Any]:
        """A norm moved by the momentum from each statistic; that is undone here."""
        if not {"mean", "var"} <= set(old):
            return {
                name: batch_norm(old[name], [tree[name] for tree in new])
                for name in old
            }
        seen = {
            name: [(tree[name] - MOMENTUM * old[name]) / (1 - MOMENTUM) for tree in new]
            for name in ("mean", "var")
        }
        squares = [v + m**2 for m, v in zip(seen["mean"], seen["var"], strict=True)]
        whole = mean(seen["mean"])
        now = {"mean": whole, "var": mean(squares) - whole**2}
        return {k: MOMENTUM * old[k] + (1 - MOMENTUM) * now[k] for k in now}

    committed = []
    for number, entry in enumerate(before):
        new = [after[number] for after in afters]
        found = dict(entry)
        for name in entry:
            trees = [tree[name] for tree in new]
            if name == "batch_stats":
                found[name] = batch_norm(entry[name], trees)
            elif name != "params":
                found[name] = jax.tree.map(
                    lambda *leaves: (
                        mean(leaves)
                        if jnp.issubdtype(leaves[0].dtype, jnp.floating)
                        else leaves[-1]
                    ),
                    *trees,
                )
        committed.append(found)
    return tuple(committed)


def steps(
    gradient: Callable[..., Any],
    variables: Sequence[PyTree],
    parts: Sequence[Part],
    tx: optax.GradientTransformation,
    count: int,
    trainable: Trainable | None = None,
) -> tuple[list[jax.Array], tuple[PyTree, ...], PyTree]:
    """The losses of some steps, the variables after them, and the optimizer's state.

    Leaves of integers are not parameters: the optimizer is not shown them.

    Args:
      gradient: of `value_and_grad`.
      variables: those before.
      parts: the mini-batch, the same in each step.
      tx: the optimizer.
      count: how many steps.
      trainable: that of the gradient.
    """

    def chosen(variables: Sequence[PyTree]) -> PyTree:
        whole = _params(variables)
        return _floating(selected(whole, trainable), whole)

    @jax.jit
    def update(variables: Any, after: Any, grads: Any, state: Any) -> Any:
        params = chosen(variables)
        updates, state = tx.update(grads, state, params)
        new = restored(optax.apply_updates(params, updates), _params(variables))
        return tuple(_merged(after, new)), state

    losses, state = [], jax.jit(tx.init)(chosen(variables))
    variables = tuple(variables)
    for _ in range(count):
        (loss, _, after), grads = gradient(variables, parts)
        grads = _floating(grads, _params(variables))
        variables, state = update(variables, after, grads, state)
        losses.append(loss)
    return losses, variables, state


def _floating(tree: PyTree, like: PyTree) -> PyTree:
    return jax.tree.map(
        lambda own, leaf: leaf if jnp.issubdtype(own.dtype, jnp.floating) else None,
        like,
        tree,
    )


def on_host(tree: PyTree) -> PyTree:
    """Copies as arrays of the first device, which is where all this is computed."""
    return jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf)), tree)
