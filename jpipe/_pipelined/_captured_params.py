"""Finds parameters that a loss closes over: as constants they have no gradient."""

from typing import Any

import jax

from .._layers import _nnx_values
from .._layers._adapter import LayerAdapter
from .._messages import WarnOnce, raise_all
from .._model._model import Model
from ._specialization import Specialization

PyTree = Any


def warn_of_captured_params(
    params: PyTree, specialization: Specialization, warnings: WarnOnce
) -> None:
    """Warns of parameters that a loss function closes over.

    `jax.value_and_grad` takes them as constants too, and a penalty on the distance from
    the start closes over the parameters that it starts from.

    Args:
      params: the parameters of the call.
      specialization: the function, traced for them.
      warnings: the warnings of the function.
    """
    if captured := _captured_leaves(params, specialization, tree_name="params"):
        warnings(
            "closures",
            f"the loss closes over {', '.join(captured)}, which it is given as "
            f"parameters too; as under jax.value_and_grad they are constants there and "
            f"have no gradient: read them from the first argument, or give copies, "
            f"jax.tree.map(jnp.copy, params), where constants are meant",
        )


def check_captured_params(
    params: PyTree, specialization: Specialization, model: Model
) -> None:
    """Checks that the loss of a model closes over no variable that has a gradient.

    Args:
      params: the variables of the call.
      specialization: the function, traced for them.
      model: the model that has these variables.

    Raises:
      TypeError: with the parameters that modules or their loss close over.
    """
    constant_ids = _constant_ids(specialization)
    if not constant_ids:
        return
    captured = _captured_leaves(params, specialization, tree_name="variables")
    for index, layer in enumerate(model.layers):
        layer_name = model.label.format(index)
        captured += _captured_variables(layer, constant_ids, layer_name)
    raise_all(
        "the loss or a layer takes variables from outside, which would be "
        "constants without a gradient and stay as they are now; compute it in the "
        "model, or in a layer that lists the module again; or add the gradient to that "
        "of the loss: pipe.jit(jax.value_and_grad(penalty))(params), where penalty is "
        "a function of them; for constants give copies",
        captured,
        error=TypeError,
    )


def _constant_ids(specialization: Specialization) -> set[int]:
    """The ids of the arrays that a function with a loss closes over."""
    traced = specialization.stages.traced()
    return set(map(id, traced.captured_arrays)) if traced.has_loss else set()


def _captured_leaves(
    params: PyTree, specialization: Specialization, *, tree_name: str
) -> list[str]:
    """The trained parameters of the call that are among the constants."""
    constant_ids = _constant_ids(specialization)
    if not constant_ids:
        return []
    layout = specialization.layout
    leaves = jax.tree_util.tree_leaves_with_path(layout.open_params(params))
    return [
        f"{tree_name}{jax.tree_util.keystr(path)}"
        for (path, leaf), is_trained in zip(leaves, layout.is_leaf_trained, strict=True)
        if is_trained and id(leaf) in constant_ids
    ]


def _captured_variables(
    layer: LayerAdapter, constant_ids: set[int], layer_name: str
) -> list[str]:
    """The parameters of a module of nnx that are among the constants."""
    return [
        f"{_nnx_values.attribute_path(path)} of {layer_name} ({layer.name})"
        for path, variable in _nnx_values.parameters(layer.owner).items()
        if id(variable.get_raw_value()) in constant_ids
    ]
