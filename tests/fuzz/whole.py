"""A list of layers as one module, which a pipeline divides itself."""

import itertools
from collections.abc import Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

import jpipe

from .. import reference as ref
from . import by_hand as hand
from . import layers as vocabulary
from .asserting import (
    assert_beside,
    assert_close,
    asserting,
    compiling_nothing,
    largest_entry,
)
from .batches import Batch, loss_of, whole_loss

PyTree = Any
KEY = jax.random.key


class Whole(nn.Module):
    """Calls modules of linen and functions one after the other.

    Attributes:
      modules: what is called; the variables of one are in ``modules_3``, by its number.
      calls: of each the namespace of its skips and the method.
    """

    modules: tuple[Any, ...]
    calls: tuple[tuple[Hashable, str], ...]

    def __call__(self, x, train: bool = False):
        shelf: vocabulary.Shelf = {}
        for module, (namespace, method) in zip(self.modules, self.calls, strict=True):
            with vocabulary.by_hand(shelf, namespace):
                if isinstance(module, nn.Module):
                    args = hand.switched(module, method, train)
                    x = getattr(module, method)(x, *args)
                elif module is vocabulary.noise:
                    rngs = {"dropout": self.make_rng("dropout")} if train else None
                    x = module(x, rngs, train)
                else:
                    x = module(x)
        return x


def whole(layers: Sequence[Any]) -> Whole:
    """The layers as one module."""
    modules, calls = [], []
    for listed in layers:
        namespace, module, method = hand.opened(listed)
        modules.append(module)
        calls.append((namespace, method))
    return Whole(tuple(modules), tuple(calls))


def by_number(trainable: hand.Trainable | None) -> tuple[Any, Any]:
    """What is asked of paths of the whole, and of those of a list of it alone.

    Args:
      trainable: what is asked of paths that begin with the number of a layer.
    """
    if trainable is None:
        return None, None

    def own(path: tuple[Any, ...], leaf: Any) -> bool:
        name, *rest = path
        return trainable((int(name.removeprefix("modules_")), *rest), leaf)

    return own, lambda path, leaf: own(path[1:], leaf)


def in_list(variables: PyTree) -> tuple[PyTree]:
    """The variables of a list of the whole; those of a train state name parameters."""
    return ({"params": {}, **variables},)


def out_of_list(tree: PyTree) -> PyTree:
    """What there is of a list of the whole, such as gradients, of the whole itself."""

    def is_list(node: Any) -> bool:
        return type(node) is tuple and len(node) == 1 and isinstance(node[0], dict)

    return jax.tree.map(
        lambda node: node[0] if is_list(node) else node, tree, is_leaf=is_list
    )


def check_loss(
    layers: Sequence[Any],
    batch: Batch,
    sizes: Sequence[int],
    where: dict[str, Any],
    options: dict[str, Any],
    trainable: hand.Trainable | None,
    rough: int,
) -> None:
    """The same of a loss function of the parameters, in micro-batches of such sizes."""
    model, own_loss = whole(layers), loss_of(**options)
    variables = jax.jit(model.init)(KEY(0), batch.x)
    own, trainable = by_number(trainable)
    chosen = hand.selected(ref.params_of([variables]), trainable)
    if trainable is None or not largest_entry(chosen):
        own, trainable = None, lambda path, leaf: True  # but for integers
    params, rest = _split(variables)

    def loss(params: PyTree, rest: PyTree, x: PyTree, targets: PyTree, key: Any) -> Any:
        (y, _) = hand.compose([model], [_joined(params, rest)], x, True, key)
        return own_loss(y, targets)

    axes = (None, batch.in_axes, 0, None)
    find = jpipe.value_and_grad(
        loss, len(sizes), in_axes=axes, trainable=own, **options, **where
    )
    args = rest, batch.x, batch.targets, KEY(3)
    placed = find.place(params, *args)
    found = find(placed, *args)
    with asserting("gradients are the same bits twice, and nothing is compiled"):
        with compiling_nothing(where["remat"]):
            again = find(placed, *args)
        ref.assert_equal(again, found)
    with asserting("gradients are on the devices of their parameters"):
        assert_beside(placed, found[1])
    ends = [0, *itertools.accumulate(sizes)]
    parts = [batch.part(a, b) for a, b in itertools.pairwise(ends)]
    keys = [jpipe.microbatch_key(KEY(3), m) for m in range(len(sizes))]
    whole_batch = whole_loss(options["reduction"], sizes)
    by_flax = hand.value_and_grad([model], whole_batch, trainable, keys)
    (value, aux, _), (grads,) = by_flax([hand.on_host(variables)], parts)
    expected = ((value, aux) if options["has_aux"] else value), grads
    grown = 1000 * 30 ** max(rough - 1, 0) if rough else 1
    assert_close(batch.dtype, rough, "gradient", found, expected, grown)


def _split(variables: PyTree) -> tuple[PyTree, PyTree]:
    """The parameters that can be trained, and all other variables."""
    params = variables.get("params", {})
    free = jax.tree.map(lambda x: x if _is_float(x) else None, params)
    fixed = jax.tree.map(lambda x: None if _is_float(x) else x, params)
    return free, {**variables, "params": fixed}


def _joined(free: PyTree, rest: PyTree) -> PyTree:
    """The variables again."""
    params = jax.tree.map(
        lambda x, y: y if x is None else x,
        free,
        rest["params"],
        is_leaf=lambda x: x is None,
    )
    return {**rest, "params": params}


def _is_float(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)
