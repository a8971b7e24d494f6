"""A list of layers as one module, which a pipeline divides itself."""

import functools
import itertools
from collections.abc import Hashable, Sequence
from contextlib import nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

import jpipe

from .. import listing
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
from .penalties import AddPenalty, penalty_of

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
    num_microbatches: int,
    *,
    sizes: Sequence[int],
    where: dict[str, Any],
    reduction: str,
    has_aux: bool,
    trainable: hand.Trainable | None,
    tx: optax.GradientTransformation,
    num_steps: int,
    rough: int,
    add_penalty: AddPenalty | None,
) -> None:
    """Asserts the same of a loss function of the parameters, in a loop of the user's.

    Other variables of the model are arguments, and stay as they are.

    Args:
      layers: as of `check.check`, and so are the next two.
      batch: the mini-batch.
      num_microbatches: as for `jpipe.value_and_grad`.
      sizes: the examples of each micro-batch, or of each shard of it.
      where: options of `jpipe.value_and_grad` that change no number.
      reduction: as for `jpipe.value_and_grad`, and so is the next one.
      has_aux: whether the loss function returns more than the loss.
      trainable: asked of paths that begin with the number of a layer.
      tx: the optimizer.
      num_steps: how many steps are taken.
      rough: as of `check.check`.
      add_penalty: how the loss function adds a penalty, if it has one.
    """
    model, loss_fn = whole(layers), loss_of(reduction, has_aux)
    variables = jax.jit(model.init)(KEY(0), batch.x)
    is_trained, is_trained_in_list = by_number(trainable)
    chosen = hand.selected(ref.params_of([variables]), is_trained_in_list)
    if trainable is None or not largest_entry(chosen):
        is_trained = None
        is_trained_in_list = lambda path, leaf: True  # but for integers # noqa: E731
    params, rest = _split(variables)

    def loss(params: PyTree, rest: PyTree, x: PyTree, targets: PyTree, key: Any) -> Any:
        (y, _) = hand.compose([model], [_joined(params, rest)], x, True, key)
        result = loss_fn(y, targets)
        if add_penalty is None:
            return result
        value, *aux = result if has_aux else (result,)
        if reduction == "weighted":
            value = add_penalty(value[0], params), value[1]
        else:
            value = add_penalty(value, params)
        return (value, *aux) if has_aux else value

    def penalty(params: PyTree) -> jax.Array:
        targets = batch.targets
        dtype = targets["t"].dtype
        weight = targets["counts"].sum() if reduction == "weighted" else 1
        return penalty_of(_split({"params": params})[0], dtype) / weight

    grad_fn = jpipe.value_and_grad(
        loss,
        num_microbatches,
        in_axes=(None, batch.in_axes, 0, None),
        trainable=is_trained,
        reduction=reduction,
        has_aux=has_aux,
        **where,
    )
    args = rest, batch.x, batch.targets, KEY(3)
    placed = grad_fn.place(params, *args)
    result = grad_fn(placed, *args)
    with asserting("gradients are the same bits twice"):
        ref.assert_equal(grad_fn(placed, *args), result)
    with asserting("gradients are on the devices of their parameters"):
        assert_beside(placed, result[1])
    with asserting("bytes are those of the instructions"):
        program = listing.program_of(grad_fn, placed, *args)
        leaves = listing.leaves_of((placed, *args))
        assert listing.counted(program, leaves) == listing.live(program)[1:]

    def select(params: PyTree) -> PyTree:
        return hand.selected((params,), is_trained_in_list)[0]

    optimizer = grad_fn.optimizer(tx)
    apply_updates = grad_fn.jit(optax.apply_updates)
    opt_state, losses = optimizer.init(select(placed)), []
    for step in range(num_steps):
        with compiling_nothing(where["remat"]) if step else nullcontext():
            value, grads = grad_fn(placed, *args)
            updates, opt_state = optimizer.update(grads, opt_state, select(placed))
            placed = hand.restored(apply_updates(select(placed), updates), placed)
        losses.append(value[0] if has_aux else value)
    with asserting("trained parameters are on the devices of the first ones"):
        assert_beside(grad_fn.place(params, *args), placed)

    ends = [0, *itertools.accumulate(sizes)]
    parts = [batch.part(a, b) for a, b in itertools.pairwise(ends)]
    keys = [jpipe.microbatch_key(KEY(3), m) for m in range(len(sizes))]
    by_flax = hand.value_and_grad(
        [model],
        whole_loss(reduction, sizes),
        is_trained_in_list,
        keys,
        penalty if add_penalty else None,
    )

    def by_flax_of_params(variables: Sequence[PyTree], parts: Sequence[Any]) -> Any:
        (value, aux, _), grads = by_flax(variables, parts)
        return (value, aux, variables), grads

    on_host = [hand.on_host(variables)]
    (value, aux, _), (grads,) = by_flax_of_params(on_host, parts)
    expected = ((value, aux) if has_aux else value), grads
    steps = hand.steps(
        by_flax_of_params, on_host, parts, tx, num_steps, is_trained_in_list
    )
    expected_losses, (trained,), expected_state = steps
    expected_training = expected_losses, _split(trained)[0], expected_state
    # As where the model is given: by other operations, and steps after steps.
    more = 30 ** max(rough - 1, 0)
    grown = (1000 * more, 1000 * more) if rough else (1, 2**num_steps)
    close = functools.partial(assert_close, batch.dtype, rough)
    close("gradient", result, expected, grown[0])
    training = losses, placed, opt_state
    close("training", training, out_of_list(expected_training), grown[1])


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
