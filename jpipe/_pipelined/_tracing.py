"""Traces a function on micro-batches of each size, and makes the traces ready to cut.

For each size, in this order:

1. trace;
2. restrict meshes to places: a program that names devices is refused before more is
   done with it;
3. tell what of the batch is captured, and count inputs that one stage alone reads: by
   these all later passes tell what follows from examples, and what may be copied;
4. scale the loss, and separate its penalty: this rewrites scans that carry the loss,
   which step 5 counts.

Then for all sizes together:

5. divide scans over layers, in the same pieces;
6. close over equal arrays, as steps 7 and 8 compare programs by their equations;
7. sink equations to their first readers, the last step that moves any; not in a list,
   whose marks tell the stage of each;
8. agree, equation by equation, on which ones run once per step.
"""

from dataclasses import replace
from typing import Any

import jax

from .._arguments._batch import Batch
from .._layers import _batch_norm
from .._partition._partition import Partition
from .._partition._scan_division import choose_division
from .._trace import _eqn_order, _penalty, _traced_function, _user_meshes
from .._trace._layer_scans import UNDIVIDED, ScanDivision, divide_scans
from .._trace._traced_function import TracedFunction
from ._function_spec import FunctionSpec

PyTree = Any


def trace_sizes(
    spec: FunctionSpec, partition: Partition, params: PyTree, batch: Batch
) -> tuple[dict[int, TracedFunction], ScanDivision]:
    """Traces a function on micro-batches of each size.

    Args:
      spec: the function.
      partition: the stages that it is cut in.
      params: specs of the parameters.
      batch: the mini-batch.

    Returns:
      The traces by these sizes, that of the first micro-batch first; and the pieces in
      which scans over layers and their parameters are.
    """
    traced_functions = {}
    for size in dict.fromkeys(batch.sizes):
        traced = _trace(
            spec, params, batch, size, num_stages=partition.num_traced_stages
        )
        closed = _user_meshes.restrict_to_devices(
            traced.closed, partition.devices, partition.warnings
        )
        traced = replace(
            traced,
            closed=closed,
            captures_batch=all(axis is None for axis in batch.axes),
        )
        traced = spec.count_inputs(traced, batch.microbatch_specs(size))
        if spec.has_loss:
            traced = _with_scaled_loss(spec, traced, batch, size)
        traced_functions[size] = traced
    division = partition.division
    if division is None:
        first = traced_functions[batch.sizes[0]]
        division = choose_division(
            first,
            partition.num_traced_stages,
            lambda division: _divide_scans(spec, params, first, division),
        )
    traced_functions = {
        size: _divide_scans(spec, params, traced, division)
        for size, traced in traced_functions.items()
    }
    traced_functions = _traced_function.with_equal_arrays(traced_functions)
    if partition.moves_equations:
        traced_functions = _eqn_order.sink_equations(traced_functions)
    return _eqn_order.unify_eqn_kinds(traced_functions), division


def _divide_scans(
    spec: FunctionSpec,
    params: PyTree,
    traced: TracedFunction,
    division: ScanDivision,
) -> TracedFunction:
    """A function with its scans in pieces; state that it writes is in pieces too."""
    if division == UNDIVIDED:
        return traced
    names = [
        f"{spec.params_name}{jax.tree_util.keystr(path)}"
        for path, _ in jax.tree_util.tree_leaves_with_path(params)
    ]
    first_index, leaves = spec.state_leaves(traced, params)
    written_params = {
        index: leaf.param_index for index, leaf in enumerate(leaves, first_index)
    }
    return replace(
        divide_scans(traced, division, names, written_params),
        aux=spec.aux_in_pieces(traced, division.params, num_params=len(names)),
    )


def trace_whole(
    spec: FunctionSpec, params: PyTree, batch: Batch
) -> tuple[TracedFunction, PyTree]:
    """Traces a function on the mini-batch as one micro-batch.

    Returns:
      The trace, and specs of the results besides the loss.
    """
    size = batch.num_examples
    try:
        with _batch_norm.merge_statistics(are_merged=True):
            traced = _trace(spec, params, batch, size, num_stages=1)
    except Exception as error:
        error.add_note(
            f"raised on the {size} examples of the mini-batch at once: something "
            f"that is returned follows from no example, and is what one device "
            f"returns"
        )
        raise
    return traced, spec.aux_of(traced)


def _trace(
    spec: FunctionSpec, params: PyTree, batch: Batch, size: int, *, num_stages: int
) -> TracedFunction:
    return _traced_function.trace_function(
        spec.function,
        params,
        batch.microbatch_specs(size),
        is_split=[axis is not None for axis in batch.axes],
        num_stages=num_stages,
        has_aux=spec.has_aux,
        has_loss=spec.has_loss,
        is_weighted=spec.reduction == "weighted",
        folds_params=spec.folds_params,
    )


def _with_scaled_loss(
    spec: FunctionSpec, traced: TracedFunction, batch: Batch, size: int
) -> TracedFunction:
    """Scales the loss of a micro-batch to its part of that of the mini-batch."""
    share = 1 / batch.num_microbatch_shards
    # reduction -> scale
    scales = {"mean": size / batch.num_examples, "sum": 1.0, "weighted": 1.0}
    scale = scales.get(spec.reduction, share)
    if not spec.may_have_penalty:
        return _penalty.scale_loss(traced, scale)
    is_split = [axis is not None for axis in batch.axes]
    return _penalty.separate_penalty(
        traced,
        is_split,
        scale=scale,
        share=share,
        adds_up=spec.reduction in ("sum", "weighted"),
    )
