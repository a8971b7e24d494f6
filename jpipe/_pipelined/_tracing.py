"""Traces a function on micro-batches of each size, and makes the traces ready to cut.

These are all passes over a trace, in their order.

For each size, in this order:

1. trace, and at once, in `_traced_function.trace_function`:

   * read the marks of boundaries: first, as it tells what nobody reads but a mark;
   * replace refs by their values, as refs hide what follows from what;
   * drop equations that nobody reads: they would hold parameters in their stage;
   * inline calls of `jax.checkpoint`, as only scans outside of calls are divided;
   * turn loops that count rows into scans along rows, which step 5 divides;
   * fold raw keys, while the index of the micro-batch is the last input;
   * make numbers that are folded into keys inputs, behind the index;
   * make arrays that the function closes over inputs: last, as this shifts the others;

2. restrict meshes to places: a program that names devices is refused before more is
   done with it;
3. tell what of the batch is captured, and count inputs that one stage alone reads: by
   these all later passes tell what follows from examples, and what may be copied;
4. scale the loss of micro-batches, and separate its penalty: this rewrites scans that
   carry the loss, which step 5 counts.

Then for all sizes together:

5. divide scans over layers, in the same pieces; then state of examples becomes an
   input;
6. close over equal arrays, as all later steps compare programs by their equations;
7. split off what runs once per step, on the whole mini-batch, if anything does;
8. sink equations to their first readers, the last step that moves any; not in a list,
   whose marks tell the stage of each;
9. agree, equation by equation, on which ones run once per step.

Then `PipelinedFunction.build` finds the state that is written, with its leaves in the
pieces of step 5, drops results that return it unchanged, and cuts.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax

from .._arguments import _microbatch, _stacked
from .._arguments._batch import Batch
from .._layers import _batch_norm
from .._partition._partition import Partition
from .._partition._scan_division import choose_division
from .._trace import (
    _eqn_order,
    _penalty,
    _traced_function,
    _user_meshes,
    _whole_batch,
)
from .._trace._layer_scans import UNDIVIDED, ScanDivision, divide_scans
from .._trace._traced_function import TracedFunction
from ._user_function import UserFunction

PyTree = Any


def trace_sizes(
    user_function: UserFunction,
    partition: Partition,
    params: PyTree,
    batch: Batch,
    *,
    param_axes: Sequence[int | None],
) -> tuple[dict[int, TracedFunction], ScanDivision]:
    """Traces a function on micro-batches of each size.

    Args:
      user_function: the function.
      partition: the stages that it is cut in.
      params: specs of the parameters.
      batch: the mini-batch.
      param_axes: the axis of the examples in each parameter; ``None``: it has none.

    Returns:
      The traces by these sizes, that of the first micro-batch first; and the pieces in
      which scans over layers and their parameters are.
    """
    traced_functions = {}
    has_tail = False
    param_leaves, param_tree = jax.tree.flatten(params)
    for size in dict.fromkeys(batch.sizes):
        microbatch_params = param_tree.unflatten(
            _microbatch.microbatch_specs(param_leaves, param_axes, size)
        )
        traced = _trace(
            user_function,
            microbatch_params,
            batch,
            size,
            num_stages=partition.most_stages,
        )
        closed = _user_meshes.restrict_to_devices(
            traced.closed, partition.devices, partition.warnings
        )
        traced = replace(
            traced,
            closed=closed,
            captures_batch=all(axis is None for axis in batch.axes),
        )
        traced = user_function.count_inputs(traced, batch.microbatch_specs(size))
        has_tail = _has_tail(user_function, traced)
        if user_function.has_loss and not has_tail:
            traced = _with_scaled_loss(user_function, traced, batch, size)
        traced_functions[size] = traced
    division = partition.division
    if division is None:
        first = traced_functions[batch.sizes[0]]
        division = choose_division(
            first,
            partition.most_stages,
            lambda division: _divide_scans(
                user_function, params, first, division, batch
            ),
            written_params=_written_params(user_function, params, first),
        )
    traced_functions = {
        size: _divide_scans(user_function, params, traced, division, batch)
        for size, traced in traced_functions.items()
    }
    traced_functions = _traced_function.with_equal_arrays(traced_functions)
    if has_tail:
        traced_functions = _whole_batch.split_tails(
            traced_functions,
            is_split=[axis is not None for axis in batch.axes],
            has_parts=batch.num_microbatch_shards > 1,
            aux_of=user_function.aux_of,
            without_aux=user_function.without_aux,
        )
    if partition.moves_equations:
        traced_functions = _eqn_order.sink_equations(traced_functions)
    return _eqn_order.unify_eqn_kinds(traced_functions), division


def _has_tail(user_function: UserFunction, traced: TracedFunction) -> bool:
    """True if the loss follows from the whole mini-batch at once: see `_whole_batch`.

    Raises:
      ValueError: if there are marks, and no loss, or a reduction of micro-batches.
    """
    has_marks = _whole_batch.has_marks(traced)
    if has_marks and not user_function.has_loss:
        raise ValueError(
            "jpipe.whole_batch is called in a forward pass, which has no loss; call it "
            "in a loss function of jpipe.value_and_grad, or type reduction='batch'"
        )
    if has_marks and user_function.reduction not in ("mean", "batch"):
        raise ValueError(
            f"reduction={user_function.reduction!r} combines losses of micro-batches, "
            f"and what follows jpipe.whole_batch runs once, on all examples: return "
            f"the loss itself, and leave reduction= out, or type reduction='batch'"
        )
    return has_marks or user_function.reduction == "batch"


def _divide_scans(
    user_function: UserFunction,
    params: PyTree,
    traced: TracedFunction,
    division: ScanDivision,
    batch: Batch,
) -> TracedFunction:
    """A function with its scans in pieces; state that it writes is in pieces too.

    Then state of its examples becomes an input of micro-batches, piece by piece.
    """
    num_args = len(jax.tree.leaves(batch.args))
    if division == UNDIVIDED:
        return user_function.with_state_inputs(traced, params, num_args)
    names = [
        f"{user_function.params_name}{jax.tree_util.keystr(path)}"
        for path, _ in jax.tree_util.tree_leaves_with_path(params)
    ]
    written_params = _written_params(user_function, params, traced)
    divided = replace(
        divide_scans(traced, division, names, written_params),
        aux=user_function.aux_in_pieces(traced, division.params, num_params=len(names)),
    )
    inner_params = _stacked.split_pieces(params, division.params)
    return user_function.with_state_inputs(divided, inner_params, num_args)


def _written_params(
    user_function: UserFunction, params: PyTree, traced: TracedFunction
) -> dict[int, int]:
    """Index of a leaf of aux -> the parameter whose new value it is."""
    first_index, leaves = user_function.state_leaves(traced, params)
    return {index: leaf.param_index for index, leaf in enumerate(leaves, first_index)}


def trace_whole(
    user_function: UserFunction, params: PyTree, batch: Batch
) -> tuple[TracedFunction, PyTree]:
    """Traces a function on the mini-batch as one micro-batch.

    Returns:
      The trace, and specs of the results besides the loss.
    """
    size = batch.num_examples
    try:
        with _batch_norm.merge_statistics(are_merged=True):
            traced = _trace(user_function, params, batch, size, num_stages=1)
    except Exception as error:
        error.add_note(
            f"raised on the {size} examples of the mini-batch at once: something "
            f"that is returned follows from no example, and is what one device "
            f"returns"
        )
        raise
    return traced, user_function.aux_of(traced)


def _trace(
    user_function: UserFunction,
    params: PyTree,
    batch: Batch,
    size: int,
    *,
    num_stages: int,
) -> TracedFunction:
    is_split = [axis is not None for axis in batch.axes]
    marked_size = size if any(is_split) else None
    with _whole_batch.marks_of_sizes(marked_size, batch.num_examples):
        return _traced_function.trace_function(
            user_function.call,
            params,
            batch.microbatch_specs(size),
            is_split=is_split,
            num_stages=num_stages,
            has_aux=user_function.has_aux,
            has_loss=user_function.has_loss,
            is_weighted=user_function.reduction == "weighted",
            folds_params=user_function.folds_params,
        )


def _with_scaled_loss(
    user_function: UserFunction, traced: TracedFunction, batch: Batch, size: int
) -> TracedFunction:
    """Scales the loss of a micro-batch to its part of that of the mini-batch."""
    share = 1 / batch.num_microbatch_shards
    # reduction -> scale
    scales = {"mean": size / batch.num_examples, "sum": 1.0, "weighted": 1.0}
    scale = scales.get(user_function.reduction, share)
    if not user_function.may_have_penalty:
        return _penalty.scale_loss(traced, scale)
    is_split = [axis is not None for axis in batch.axes]
    return _penalty.separate_penalty(
        traced,
        is_split,
        scale=scale,
        share=share,
        adds_up=user_function.reduction in ("sum", "weighted"),
    )
