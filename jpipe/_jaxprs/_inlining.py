"""Traces functions, inlines the calls inside of jaxprs, and opens their branches.

What stands inside of one equation runs whole and in one place. To be cut, placed or
counted by its parts, it is put in place of the equation:

    trace              a function as a jaxpr, without calls of `jax.jit`
    inline_eqns        a jaxpr without some calls
    inline_calls       ... without any, and without rules for derivatives
    open_checkpoints   ... without `jax.checkpoint`, for a backward by itself
    open_branches      ... with some conds split by their results, or as selections

The equations inside of a call keep the line of the user's program that called.
"""

import functools
import inspect
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
from jax.extend import core

from . import _source_lines
from ._explicit_dtypes import make_jaxpr
from ._host_memory import put_one_by_one, puts_several
from ._jaxpr import (
    CHECKPOINTS,
    RULES,
    Rule,
    dce_jaxpr,
    evaluate,
    inner_jaxprs,
    retrace,
    spec,
    used_inputs,
)

PyTree = Any
# ``(flat arguments, flat results) -> new flat results``.
Ending = Callable[[Sequence[Any], Sequence[Any]], Sequence[Any]]
# The indices of the results of a `jax.lax.cond`, in groups.
Groups = Sequence[Sequence[int]]

# The names that JAX gives, or has given, to the primitive of `jax.jit`.
_JITS = ("jit", "pjit")
_ANY_ARGUMENTS = inspect.signature(lambda *args: None)


def trace(
    function: Callable[..., Any],
    *specs: PyTree,
    ending: Ending | None = None,
) -> tuple[core.ClosedJaxpr, Any]:
    """Traces a function on abstract arguments, with inner calls of `jax.jit` inlined.

    Args:
      function: ``(*pytrees) -> pytree``.
      *specs: its arguments, with `jax.ShapeDtypeStruct` leaves.
      ending: replaces the flat results: ``(arguments, results) -> new results``.

    Returns:
      The jaxpr over flat leaves, and the specs of the function's result.
    """

    def new_function(*args: PyTree) -> PyTree:
        # JAX caches traces by the function, which may read other values now.
        return function(*args)

    # The errors of JAX name the function that is wrapped at last, which is the user's;
    # its arguments may stand in another order.
    vars(new_function).update(__wrapped__=function, __signature__=_ANY_ARGUMENTS)
    closed, result = make_jaxpr(new_function, return_shape=True)(*specs)
    # The shapes that JAX returns do not tell in which memory the results are.
    result = jax.tree.unflatten(jax.tree.structure(result), map(spec, closed.out_avals))
    return _inline_and_open(closed, _JITS, ending=ending), result


def open_branches(
    closed: core.ClosedJaxpr, groups_of: Mapping[int, Groups]
) -> core.ClosedJaxpr:
    """The same computation with some conds split, or replaced by selections.

    Args:
      closed: the jaxpr.
      groups_of: id of an equation that is a `jax.lax.cond` -> its results in groups,
        each of which gets a cond of its own; or no groups: then all branches are
        computed, and the results selected, leaf by leaf.
    """
    return _inline_and_open(closed, _JITS, groups_of=groups_of)


def open_checkpoints(closed: core.ClosedJaxpr) -> core.ClosedJaxpr:
    """The same computation with calls of `jax.checkpoint` inlined.

    For programs that hold nothing but a backward: next to its forward, XLA would find
    what is computed again and keep it instead.
    """
    return _inline_and_open(closed, (*_JITS, *CHECKPOINTS))


def inline_calls(closed: core.ClosedJaxpr) -> core.ClosedJaxpr:
    """The same values, with all calls inlined and without rules for derivatives."""
    return _inline_and_open(closed, (*_JITS, *CHECKPOINTS, *RULES))


def inline_eqns(closed: core.ClosedJaxpr, eqn_ids: Collection[int]) -> core.ClosedJaxpr:
    """The same computation with some calls, by the ids of their equations, inlined.

    Calls of `jax.jit` inside of them are inlined too, as by `trace`.
    """
    return _inline_and_open(closed, _JITS, eqn_ids=eqn_ids)


def _inline_and_open(
    closed: core.ClosedJaxpr,
    names: Container[str],
    *,
    eqn_ids: Container[int] = (),
    groups_of: Mapping[int, Groups] = MappingProxyType({}),
    ending: Ending | None = None,
) -> core.ClosedJaxpr:
    """The jaxpr with calls inlined and branches opened.

    Args:
      closed: the jaxpr.
      names: the names of the primitives whose calls are inlined.
      eqn_ids: the ids of other equations that are calls to inline.
      groups_of: see `open_branches`.
      ending: see `trace`.
    """

    def is_call(eqn: core.JaxprEqn) -> bool:
        return eqn.primitive.name in names or id(eqn) in eqn_ids

    eqns = closed.jaxpr.eqns
    is_changed = any(is_call(eqn) or puts_several(eqn) for eqn in eqns)
    if not (groups_of or ending or is_changed):
        return closed

    def rule(eqn: core.JaxprEqn) -> Rule | None:
        if is_call(eqn):
            (inner,) = inner_jaxprs(eqn)
            inner = _source_lines.with_lines_of(eqn, inner)
            return lambda operands: evaluate(inner, operands, rule)
        if id(eqn) in groups_of:
            return lambda operands: _evaluate_cond(eqn, operands, groups_of[id(eqn)])
        return functools.partial(put_one_by_one, eqn) if puts_several(eqn) else None

    def run(*args: Any) -> Sequence[Any]:
        results = evaluate(closed, args, rule)
        return ending(args, results) if ending else results

    return retrace(closed, run)


def _evaluate_cond(
    eqn: core.JaxprEqn, operands: Sequence[Any], groups: Groups
) -> list[Any]:
    """Evaluates a `jax.lax.cond`: see `open_branches`."""
    branch_index, *branch_operands = operands
    results: list[Any] = [None] * len(eqn.outvars)
    if not groups:
        cases = [
            core.jaxpr_as_fun(branch)(*branch_operands) for branch in branches_of(eqn)
        ]
        for i, alternatives in enumerate(zip(*cases, strict=True)):
            results[i] = jax.lax.select_n(branch_index, *alternatives)
        return results

    for group in groups:
        branches, used_operands = branches_of_results(eqn, group)
        group_results = jax.lax.switch(
            branch_index,
            [core.jaxpr_as_fun(branch) for branch in branches],
            *[branch_operands[i] for i in used_operands],
        )
        for i, result in zip(group, group_results, strict=True):
            results[i] = result
    return results


def branches_of(eqn: core.JaxprEqn) -> list[core.ClosedJaxpr]:
    """The branches of a `jax.lax.cond`, with calls of `jax.jit` inlined."""
    return [_inline_and_open(branch, _JITS) for branch in eqn.params["branches"]]


def branches_of_results(
    eqn: core.JaxprEqn, group: Sequence[int]
) -> tuple[list[core.ClosedJaxpr], list[int]]:
    """The branches of a `jax.lax.cond` that give some of its results.

    Returns:
      The branches, and the indices of the operands that any of them needs.
    """
    full_branches = list[core.ClosedJaxpr]()
    used_operands = set[int]()
    for branch in branches_of(eqn):
        outvars = [branch.jaxpr.outvars[i] for i in group]
        full_branches.append(dce_jaxpr(branch, outvars))
        is_used = used_inputs(full_branches[-1])
        used_operands |= {i for i, used in enumerate(is_used) if used}

    branches = list[core.ClosedJaxpr]()
    for branch in full_branches:
        invars = [branch.jaxpr.invars[i] for i in sorted(used_operands)]
        jaxpr = branch.jaxpr.replace(invars=invars)
        branches.append(core.ClosedJaxpr(jaxpr, branch.consts))
    return branches, sorted(used_operands)
