"""Checks that parameters have the shapes for which a plan was made."""

from typing import Any

import jax

from .._arguments import _variables
from .._messages import raise_all
from ._options import Shapes

PyTree = Any


def check_planned_shapes(
    specs: PyTree, planned_shapes: Shapes | None, *, name: str, has_collections: bool
) -> None:
    """Checks that parameters have the shapes that they have in a plan.

    Args:
      specs: the parameters, or specs of them.
      planned_shapes: the shapes in the plan; ``None``: there is no plan.
      name: the name of the parameters in errors.
      has_collections: True if there are other collections among them, of a model.

    Raises:
      ValueError: with all parameters of another shape.
    """
    if planned_shapes is None:
        return
    indices = _variables.param_indices(specs, has_collections=has_collections)
    leaves = jax.tree_util.tree_leaves_with_path(specs)
    advice = "make a plan of this one, by jpipe.plan"
    if len(indices) != len(planned_shapes):
        raise ValueError(
            f"plan: it is of a model or function of {len(planned_shapes)} arrays "
            f"of parameters, and this one has {len(indices)}; {advice}"
        )

    faults = []
    for i, planned_shape in zip(indices, planned_shapes, strict=True):
        path, leaf = leaves[i]
        shape = getattr(leaf, "shape", ())
        if shape != planned_shape:
            faults.append(
                f"{name}{jax.tree_util.keystr(path)} has shape {shape}, in "
                f"the plan {planned_shape}"
            )
    raise_all(
        "plan: it is of a model or function of other parameters",
        faults,
        advice=f"\n{advice}",
    )
