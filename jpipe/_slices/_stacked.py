"""Parameters that stack those of several layers, and are read a slice at a time.

A stage that reads a slice of a parameter is given all of it, and so is its gradient.
"""

from collections.abc import Sequence
from typing import Any

from jax.extend import core

from .._jaxprs import _jaxpr
from .._jaxprs._cheapest import nbytes
from .._warn import WarnOnce
from ..schedules._units import size
from ._stages import Stages

# A parameter of fewer bytes takes less to send than a transfer takes to start.
_LEAST_BYTES = 2**16
_SLICES = {"slice", "dynamic_slice", "gather"}
# What each stage does to all of a parameter before it takes a slice.
_ALIASES = {"convert_element_type", "copy", "copy_p", "name", "stop_gradient"}


def check(stages: Stages, paths: Sequence[str], warnings: WarnOnce) -> None:
    """Warns of large parameters that several stages read a slice at a time.

    Args:
      stages: the stages.
      paths: how users call each parameter.
      warnings: of the pipeline.
    """
    lines = []
    for param, path in enumerate(paths):
        readers = [s for s in range(stages.num_stages) if param in stages.weights(s)]
        num_bytes = nbytes(stages.first.params[param])
        if len(readers) < 2 or num_bytes < _LEAST_BYTES:
            continue
        axes = {_axis(stages, s, param) for s in readers}
        axis = axes.pop()
        if axes or axis is None:
            continue
        lines.append(
            f"{path}, {size(num_bytes)}, in stages "
            f"{', '.join(map(str, readers))}: jnp.unstack({path}, axis={axis})"
        )
    if lines:
        warnings(
            "stacked",
            "each of several stages reads slices of a parameter and is given all of "
            "it, as is its gradient; let params hold an array for each layer instead, "
            "which the same loop indexes:\n" + "\n".join(f"  * {x}" for x in lines),
        )


def _axis(stages: Stages, stage: int, param: int) -> int | None:
    """The axis along which a stage takes slices; ``None`` if it reads all of it."""
    part, of_batch = stages.part(stage), stages.first.of_batch
    whole = {stages.first.params[param]}
    axes = set[int]()
    for eqn in part.closed.jaxpr.eqns:
        read = _jaxpr.variables(eqn.invars)
        if whole.isdisjoint(read):
            continue
        if eqn.primitive.name in _ALIASES:
            whole.update(eqn.outvars)
            continue
        cut = _axes_of_slice(eqn) if read.isdisjoint(of_batch) else []
        if len(cut) != 1:
            return None
        axes.update(cut)
    return axes.pop() if len(axes) == 1 else None


def _axes_of_slice(eqn: core.JaxprEqn) -> list[int]:
    """The axes of its operand of which an equation takes a part."""
    name, params = eqn.primitive.name, eqn.params
    if name not in _SLICES:
        return []
    operand: Any = eqn.invars[0].aval
    result: Any = eqn.outvars[0].aval
    sizes = params.get("slice_sizes", result.shape)
    pairs = zip(operand.shape, sizes, strict=True)
    return [axis for axis, (length, part) in enumerate(pairs) if part < length]
