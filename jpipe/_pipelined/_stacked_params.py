"""Warns of parameters that stack those of several layers and are read by slices.

A stage that reads a slice of a parameter gets all of it, and computes a gradient as
large as all of it.
"""

from collections.abc import Sequence
from typing import Any

from jax.extend import core

from .._jaxprs import _jaxpr
from .._jaxprs._min_cut import nbytes
from .._messages import WarnOnce
from .._stage._stages import Stages
from ..schedules._formats import format_bytes

# A parameter of fewer bytes takes less to send than a transfer takes to start.
_LEAST_BYTES = 2**16
_SLICES = {"slice", "dynamic_slice", "gather"}
# Operations on all of a parameter that each stage runs before it takes a slice.
_ALIASES = {"convert_element_type", "copy", "copy_p", "name", "stop_gradient"}


def check_stacked_params(
    stages: Stages, paths: Sequence[str], warnings: WarnOnce
) -> None:
    """Warns of large parameters that several stages read by slices.

    Args:
      stages: the stages.
      paths: the text by which users name each parameter.
      warnings: the warnings of the pipeline.
    """
    lines = []
    for param, path in enumerate(paths):
        readers = [
            stage
            for stage in range(stages.num_stages)
            if param in stages.weight_indices(stage)
        ]
        num_bytes = nbytes(stages.traced().params[param])
        if len(readers) < 2 or num_bytes < _LEAST_BYTES:
            continue
        axes = {_sliced_axis(stages, stage, param) for stage in readers}
        if len(axes) > 1 or None in axes:
            continue
        lines.append(
            f"{path}, {format_bytes(num_bytes)}, in stages "
            f"{', '.join(map(str, readers))}: jnp.unstack({path}, axis={axes.pop()})"
        )
    if lines:
        warnings(
            "stacked",
            "each of several stages reads slices of a parameter and is given all of "
            "it, as is its gradient; let params hold an array for each layer instead, "
            "which the same loop indexes:\n"
            + "\n".join(f"  * {line}" for line in lines),
        )


def _sliced_axis(stages: Stages, stage: int, param: int) -> int | None:
    """The axis along which a stage takes slices; ``None`` if it reads all of it."""
    vars_of_batch = stages.traced().vars_of_batch
    aliases = {stages.traced().params[param]}
    axes = set[int]()
    for eqn in stages.slice_of(stage).closed.jaxpr.eqns:
        operands = _jaxpr.variables(eqn.invars)
        if aliases.isdisjoint(operands):
            continue
        if eqn.primitive.name in _ALIASES:
            aliases.update(eqn.outvars)
            continue
        is_same_slice = operands.isdisjoint(vars_of_batch)  # for all micro-batches
        eqn_axes = _axes_of_slice(eqn) if is_same_slice else []
        if len(eqn_axes) != 1:
            return None
        axes.update(eqn_axes)
    return axes.pop() if len(axes) == 1 else None


def _axes_of_slice(eqn: core.JaxprEqn) -> list[int]:
    """The axes of its operand along which an equation takes a part."""
    if eqn.primitive.name not in _SLICES:
        return []
    operand: Any = eqn.invars[0].aval
    result: Any = eqn.outvars[0].aval
    slice_sizes = eqn.params.get("slice_sizes", result.shape)
    lengths = zip(operand.shape, slice_sizes, strict=True)
    return [axis for axis, (length, part) in enumerate(lengths) if part < length]
