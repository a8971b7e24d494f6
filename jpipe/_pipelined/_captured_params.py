"""Finds parameters that a loss closes over: as constants they have no gradient."""

from typing import Any

import jax

from .._layers import _nnx_values
from .._layers._adapter import LayerAdapter
from .._messages import raise_all
from .._model._model import Model
from ._specialization import Specialization

PyTree = Any


def check_captured_params(
    params: PyTree, specialization: Specialization, model: Model
) -> None:
    """Checks that the loss of a model closes over no variable that has a gradient.

    A loss function of `jpipe.value_and_grad` may: to `jax.value_and_grad` too its
    parameters from outside are constants, such as those from which a penalty starts.

    Args:
      params: the variables of the call.
      specialization: the function, traced for them.
      model: the model that has these variables.

    Raises:
      TypeError: with the parameters that modules or their loss close over.
    """
    traced = specialization.stages.traced()
    if not traced.has_loss or not traced.captured_arrays:
        return
    constant_ids = set(map(id, traced.captured_arrays))
    captured = _captured_leaves(params, specialization, constant_ids)
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


def _captured_leaves(
    params: PyTree, specialization: Specialization, constant_ids: set[int]
) -> list[str]:
    """The trained parameters of the call that are among the constants."""
    layout = specialization.layout
    leaves = jax.tree_util.tree_leaves_with_path(layout.split_params(params))
    return [
        f"variables{jax.tree_util.keystr(path)}"
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
