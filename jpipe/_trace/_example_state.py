"""State with a row for each example, such as a cache, as a part of the mini-batch.

    (*params, *batch, ...) -> (*outputs, *new state)        state among the params
    (*params, *batch, *state, ...) -> (*outputs, *new state)        what is cut

The user's function is traced on variables, state among them, of which a micro-batch has
its own rows. So scans over layers are found along state as along parameters. Then what
the function changes becomes an input that each micro-batch brings; nobody reads the
parameter in its place, which keeps the indices of the others.
"""

from collections.abc import Collection, Sequence
from dataclasses import replace

from jax.extend import core

from .._jaxprs import _dataflow
from ._state_updates import StateLeaf
from ._traced_function import StateInput, TracedFunction


def with_state_inputs(
    traced: TracedFunction,
    first_index: int,
    leaves: Sequence[StateLeaf],
    *,
    collections: Collection[str],
    num_args: int,
) -> TracedFunction:
    """Makes state that a function changes an input of its micro-batches.

    Args:
      traced: the function.
      first_index: the index, among its results besides the loss, of the first leaf that
        it may change.
      leaves: the leaves that it may change.
      collections: the collections of state.
      num_args: the number of leaves of its other arguments, behind which state stands.
    """
    jaxpr = traced.closed.jaxpr
    results = traced.aux_vars[first_index:]
    origins = _dataflow.result_origins(
        core.ClosedJaxpr(jaxpr.replace(outvars=results), traced.closed.consts)
    )
    state_inputs = list[StateInput]()
    invars = list(jaxpr.invars)
    state_vars = list[core.Var]()
    for i, (leaf, origin) in enumerate(zip(leaves, origins, strict=True)):
        if leaf.collection not in collections or origin == leaf.param_index:
            continue
        batch_index = num_args + len(state_vars)
        state_inputs.append(StateInput(leaf.param_index, batch_index, first_index + i))
        var = invars[leaf.param_index]
        invars[leaf.param_index] = core.Var(var.aval)
        state_vars.append(var)
    begin = traced.num_params + num_args
    invars = [*invars[:begin], *state_vars, *invars[begin:]]
    closed = core.ClosedJaxpr(jaxpr.replace(invars=invars), traced.closed.consts)
    return replace(traced, closed=closed, state_inputs=tuple(state_inputs))
