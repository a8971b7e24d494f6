"""Parameters that a program reads as constants too, since it closes over them."""

from collections.abc import Sequence
from typing import Any, Protocol

import jax

from .._faults import refuse
from .._layers import _nnx_values
from .._layers._layer import LayerAdapter
from .._warn import WarnOnce
from ._built import Built

PyTree = Any


class Modules(Protocol):
    """The modules of a pipeline, and what errors call each: see `_modules.Modules`."""

    layers: Sequence[LayerAdapter]
    called: str


def check(
    params: PyTree, built: Built, modules: Modules | None, warnings: WarnOnce
) -> None:
    """Checks that a loss closes over no array by which it is differentiated.

    Args:
      params: the parameters of the call.
      built: what was built for them.
      modules: those whose parameters they are; ``None``: those of a loss function, for
        which this is a warning: `jax.value_and_grad` takes them as constants too, and
        a penalty on the way from the start closes over what it starts from.
      warnings: of the function.

    Raises:
      TypeError: with those that modules or their loss close over.
    """
    program = built.stages.first
    if not program.has_loss or not program.constants:
        return
    constants = set(map(id, program.constants))
    captured = _leaves(params, built, constants, "variables" if modules else "params")
    if modules is None:
        if captured:
            warnings(
                "closures",
                f"the loss closes over {', '.join(captured)}, which it is given as "
                f"parameters too; as under jax.value_and_grad they are constants there "
                f"and have no gradient: read them from the first argument, or give "
                f"copies, jax.tree.map(jnp.copy, params), where constants are meant",
            )
        return
    for number, layer in enumerate(modules.layers):
        captured += _values(layer, constants, modules.called.format(number))
    refuse(
        "the loss or a layer takes variables from outside, which would be "
        "constants without a gradient and stay as they are now; compute it in the "
        "model, or in a layer that lists the module again; or add the gradient to that "
        "of the loss: pipe.jit(jax.value_and_grad(penalty))(params), where penalty is "
        "a function of them; for constants give copies",
        captured,
        TypeError,
    )


def _leaves(params: PyTree, built: Built, constants: set[int], name: str) -> list[str]:
    """The trained parameters of the call that are among the constants."""
    paths = jax.tree_util.tree_leaves_with_path(params)
    return [
        f"{name}{jax.tree_util.keystr(path)}"
        for (path, leaf), is_trained in zip(paths, built.layout.marks, strict=True)
        if is_trained and id(leaf) in constants
    ]


def _values(layer: LayerAdapter, constants: set[int], name: str) -> list[str]:
    """The parameters that a module of nnx holds which are among the constants."""
    return [
        f"{_nnx_values.dotted(path)} of {name} ({layer.name})"
        for path, variable in _nnx_values.parameters(layer.owner).items()
        if id(variable.get_raw_value()) in constants
    ]
