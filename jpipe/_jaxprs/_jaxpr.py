"""Jaxprs: functions that rewrite, evaluate and analyse them.

A *closed* jaxpr is a jaxpr with the values of its constants. Functions that rewrite one
evaluate it under a new trace, in which rules replace some of its equations.

    dce_jaxpr          a jaxpr with other results, and no more than they need
    recomputation      the same, without effects, where some variables are stored
    rewrite            a jaxpr, some of its equations replaced by rules
    retrace            a jaxpr of another function, of the same inputs
    evaluate           results in a trace, some equations by rules
    as_traced          a jaxpr as a function for a trace, without rules
    ancestors          the variables that must be computed before some
    descendants        the variables that are computed after any of some,
    depending_on       ... of some inputs, or after an effect
    computable_from    ... and after nothing else

An equation runs whole, after all that it reads. From which of its operands the value of
a result follows, `_dataflow` tells.

`jax.extend.core` is JAX's public door to jaxprs.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from ._explicit_dtypes import make_jaxpr
from ._host_memory import in_memory_of

PyTree = Any
# ``operands -> results``, in place of an equation.
Rule = Callable[[Sequence[Any]], Sequence[Any]]

# The names that JAX gives, or has given, to the primitives of `jax.checkpoint`.
CHECKPOINTS = ("remat2", "checkpoint")
RULES = ("custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr")


def retrace(
    closed: core.ClosedJaxpr, run: Callable[..., Sequence[Any]], *more_specs: Any
) -> core.ClosedJaxpr:
    """Traces a function of the inputs of a jaxpr, and of more arrays or specs."""
    return make_jaxpr(run)(*specs(closed.jaxpr.invars), *more_specs)


def rewrite(
    closed: core.ClosedJaxpr, rule: Callable[[core.JaxprEqn], Rule | None]
) -> core.ClosedJaxpr:
    """The jaxpr with some equations replaced by rules: see `evaluate`."""
    return retrace(closed, lambda *args: evaluate(closed, args, rule))


def evaluate(
    closed: core.ClosedJaxpr,
    args: Sequence[Any],
    rule: Callable[[core.JaxprEqn], Rule | None],
) -> list[Any]:
    """Evaluates a jaxpr, some of its equations by rules.

    Args:
      closed: the jaxpr.
      args: its inputs.
      rule: the function of operands that replaces an equation; ``None`` for an
        equation that stays.
    """
    values: dict[core.Var, Any] = dict(
        zip(closed.jaxpr.constvars, closed.consts, strict=True)
    )
    values.update(zip(closed.jaxpr.invars, args, strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, core.Literal) else values[atom]

    def bind_all(eqns: list[core.JaxprEqn]) -> None:
        if eqns:
            results = bind_eqns(closed.jaxpr, eqns, values)
            values.update(zip(outvars_of(eqns), results, strict=True))

    # Equations without a rule, in a row: one by one they take half as long again.
    plain_eqns = list[core.JaxprEqn]()
    for eqn in closed.jaxpr.eqns:
        run = rule(eqn)
        if run is None:
            plain_eqns.append(eqn)
            continue
        bind_all(plain_eqns)
        plain_eqns = []
        results = run([read(atom) for atom in eqn.invars])
        values.update(zip(eqn.outvars, results, strict=True))
    bind_all(plain_eqns)
    return [read(atom) for atom in closed.jaxpr.outvars]


def as_traced(closed: core.ClosedJaxpr) -> Callable[..., list[Any]]:
    """The function of a jaxpr, for a trace: constants are traced, as under `jax.jit`.

    A constant may be an array of NumPy, which the functions of a `jax.custom_vjp` need
    not accept.
    """

    def run(*args: Any) -> list[Any]:
        consts = [
            jnp.asarray(const) if isinstance(const, np.ndarray) else const
            for const in closed.consts
        ]
        return core.jaxpr_as_fun(core.ClosedJaxpr(closed.jaxpr, consts))(*args)

    return run


def bind(jaxpr: core.Jaxpr, eqn: core.JaxprEqn, operands: Sequence[Any]) -> list[Any]:
    """Evaluates one equation."""
    pairs = zip(eqn.invars, operands, strict=True)
    values = {atom: x for atom, x in pairs if not isinstance(atom, core.Literal)}
    return bind_eqns(jaxpr, [eqn], values)


def bind_eqns(
    jaxpr: core.Jaxpr, eqns: list[core.JaxprEqn], values: Mapping[core.Var, Any]
) -> list[Any]:
    """Evaluates equations, as a jaxpr of their own: the public way to do so.

    Args:
      jaxpr: the jaxpr that they are in.
      eqns: the equations.
      values: variable -> its value, for those that the equations read.
    """
    reads = set[core.Var]()
    for eqn in eqns:
        reads |= variables(eqn.invars)
    invars = [var for var in reads if var in values]
    outvars = outvars_of(eqns)
    part = jaxpr.replace(constvars=[], invars=invars, outvars=outvars, eqns=eqns)
    return core.jaxpr_as_fun(core.ClosedJaxpr(part, []))(*map(values.get, invars))


def descendants(jaxpr: core.Jaxpr, roots: Iterable[core.Var]) -> set[core.Var]:
    """The results of equations that run after any of some roots, and these."""
    reached = set(roots)
    for eqn in jaxpr.eqns:
        if not reached.isdisjoint(variables(eqn.invars)):
            reached.update(eqn.outvars)
    return reached


def computable_from(
    jaxpr: core.Jaxpr,
    roots: Iterable[core.Var],
    may_run: Callable[[core.JaxprEqn], bool],
) -> set[core.Var]:
    """The results of equations that run after some roots and nothing else, and these.

    Args:
      jaxpr: the jaxpr.
      roots: the variables to begin with.
      may_run: tells if an equation may be used for this.
    """
    computed = set(roots)
    for eqn in jaxpr.eqns:
        if may_run(eqn) and variables(eqn.invars) <= computed:
            computed.update(eqn.outvars)
    return computed


def depending_on(closed: core.ClosedJaxpr, inputs: Sequence[bool]) -> set[core.Var]:
    """The results of equations that run after some inputs, or that have an effect."""
    jaxpr = closed.jaxpr
    invars = zip(jaxpr.invars, inputs, strict=True)
    roots = [var for var, is_chosen in invars if is_chosen]
    roots += outvars_of(eqn for eqn in jaxpr.eqns if eqn.effects)
    return descendants(jaxpr, roots)


def ancestors(jaxpr: core.Jaxpr, atoms: Iterable[Any]) -> set[core.Var]:
    """The variables among some atoms, and all that is computed before them."""
    return _find_needed(jaxpr, list(atoms), keeps_effects=False).read


def producers(jaxpr: core.Jaxpr) -> dict[core.Var, int]:
    """The index of the equation that makes each variable."""
    producer: dict[core.Var, int] = {}
    for index, eqn in enumerate(jaxpr.eqns):
        producer |= dict.fromkeys(eqn.outvars, index)
    return producer


def dce_jaxpr(closed: core.ClosedJaxpr, outvars: Sequence[Any]) -> core.ClosedJaxpr:
    """The same computation with other results, and nothing that they do not need.

    Equations with effects, such as a debug print, stay.
    """
    eqns = _find_needed(closed.jaxpr, outvars).eqns
    jaxpr = closed.jaxpr.replace(eqns=eqns, outvars=list(outvars))
    return core.ClosedJaxpr(jaxpr, closed.consts)


def used_inputs(closed: core.ClosedJaxpr) -> list[bool]:
    """One bool per input; True if the results, or effects, need it."""
    read = _find_needed(closed.jaxpr, closed.jaxpr.outvars).read
    return [var in read for var in closed.jaxpr.invars]


def recomputation(
    closed: core.ClosedJaxpr, outvars: Sequence[Any], stored: Sequence[core.Var]
) -> core.ClosedJaxpr:
    """The part of a jaxpr that computes some variables from its inputs and others.

    Args:
      closed: the jaxpr.
      outvars: the variables to compute.
      stored: the variables whose values become inputs, after those of the jaxpr.

    Returns:
      ``(*inputs, *stored) -> outvars``, without equations that these do not need, and
      so without effects such as a debug print.
    """
    needed = _find_needed(closed.jaxpr, outvars, stored, keeps_effects=False)
    jaxpr = closed.jaxpr.replace(
        invars=[*closed.jaxpr.invars, *stored],
        eqns=needed.eqns,
        outvars=list(outvars),
    )
    return core.ClosedJaxpr(jaxpr, closed.consts)


def needed_eqns(
    jaxpr: core.Jaxpr, outvars: Sequence[Any], stored: Sequence[core.Var]
) -> list[core.JaxprEqn]:
    """The equations that compute some variables from stored ones and inputs."""
    return _find_needed(jaxpr, outvars, stored, keeps_effects=False).eqns


class _Needed(NamedTuple):
    """The part of a jaxpr that some of its variables need.

    Attributes:
      eqns: the equations, in order.
      read: the variables that these read, and those that are asked for.
    """

    eqns: list[core.JaxprEqn]
    read: set[core.Var]


def _find_needed(
    jaxpr: core.Jaxpr,
    outvars: Sequence[Any],
    stored: Sequence[core.Var] = (),
    *,
    keeps_effects: bool = True,
) -> _Needed:
    """Finds what some variables need if others are stored.

    Args:
      jaxpr: the jaxpr.
      outvars: the variables to compute.
      stored: the variables that need no equation, and are in no result.
      keeps_effects: True if equations with effects are needed too.
    """
    read = variables(outvars).difference(stored)
    eqns = list[core.JaxprEqn]()
    for eqn in reversed(jaxpr.eqns):
        has_effects = keeps_effects and bool(eqn.effects)
        if has_effects or not read.isdisjoint(eqn.outvars):
            read |= variables(eqn.invars).difference(stored)
            eqns.append(eqn)
    return _Needed(eqns[::-1], read)


def outvars_of(eqns: Iterable[core.JaxprEqn]) -> list[core.Var]:
    """The results of some equations, in order."""
    outvars = list[core.Var]()
    for eqn in eqns:
        outvars += eqn.outvars
    return outvars


def effects_of(eqns: Iterable[core.JaxprEqn]) -> set[Any]:
    """The effects of some equations."""
    effects = set[Any]()
    for eqn in eqns:
        effects |= eqn.effects
    return effects


def equations(closed: core.ClosedJaxpr) -> Iterator[core.JaxprEqn]:
    """The equations of a jaxpr, and of those inside of it."""
    for eqn in closed.jaxpr.eqns:
        yield eqn
        for inner in inner_jaxprs(eqn):
            yield from equations(inner)


def contains(closed: core.ClosedJaxpr, name: str) -> bool:
    """True if a primitive of that name is in a jaxpr, or in one inside of it."""
    return any(eqn.primitive.name == name for eqn in equations(closed))


def inner_jaxprs(eqn: core.JaxprEqn) -> list[core.ClosedJaxpr]:
    """The jaxprs of a call, of branches or of a loop."""
    return [
        value if isinstance(value, core.ClosedJaxpr) else core.ClosedJaxpr(value, [])
        for value in jax.tree.leaves(list(eqn.params.values()))
        if isinstance(value, core.ClosedJaxpr | core.Jaxpr)
    ]


def inner_eqns(eqn: core.JaxprEqn) -> list[core.JaxprEqn]:
    """The equations of the jaxprs of a call, of branches or of a loop."""
    eqns = list[core.JaxprEqn]()
    for closed in inner_jaxprs(eqn):
        eqns += closed.jaxpr.eqns
    return eqns


def bodies(eqn: core.JaxprEqn) -> list[core.ClosedJaxpr]:
    """The jaxprs inside of a call, a cond or a loop that compute its results.

    Each takes the last operands: the first ones choose the branch, or tell when a loop
    ends.
    """
    name = eqn.primitive.name
    if name.startswith("reduce"):
        return []
    if name == "while":
        return [eqn.params["body_jaxpr"]]
    return [
        closed
        for closed in inner_jaxprs(eqn)
        if len(closed.jaxpr.outvars) == len(eqn.outvars)
        and (name == "cond" or len(closed.jaxpr.invars) == len(eqn.invars))
    ]


def carry_slice(eqn: core.JaxprEqn) -> slice:
    """The slice of operands that a loop carries; for other equations it is empty.

    They become the first results.
    """
    if eqn.primitive.name == "while":
        return slice(len(eqn.invars) - len(eqn.outvars), len(eqn.invars))
    if eqn.primitive.name != "scan":
        return slice(0)
    # Newer JAX has other names for these numbers. An array that a scan goes along has
    # one axis more outside of it; what it carries has as many.
    body: Any = eqn.params["jaxpr"]
    operands: list[Any] = [atom.aval for atom in eqn.invars]
    results: list[Any] = [var.aval for var in eqn.outvars]
    operand_pairs = zip(operands, body.in_avals, strict=True)
    result_pairs = zip(results, body.out_avals, strict=True)
    num_xs = sum(outside.ndim > inside.ndim for outside, inside in operand_pairs)
    num_carry = sum(outside.ndim == inside.ndim for outside, inside in result_pairs)
    end = len(eqn.invars) - num_xs
    return slice(end - num_carry, end)


def vjp(
    run: Callable[..., Sequence[Any]], args: Sequence[Any]
) -> tuple[list[Any], Callable[..., Any]]:
    """`jax.vjp` of inexact results by inexact arguments; others have no derivative."""
    is_differentiated = [is_inexact(x) for x in args]

    def run_inexact(differentiated: list[Any]) -> list[Any]:
        all_args = replace_leaves(args, differentiated, is_differentiated)
        return [result for result in run(*all_args) if is_inexact(result)]

    return jax.vjp(run_inexact, list(itertools.compress(args, is_differentiated)))


def replace_leaves(
    leaves: Sequence[Any], new_leaves: Iterable[Any], is_replaced: Sequence[bool]
) -> list[Any]:
    """Replaces some leaves, in order.

    Args:
      leaves: all leaves.
      new_leaves: the leaves that replace some of them.
      is_replaced: one bool per leaf; True if it is replaced.
    """
    remaining = iter(new_leaves)
    return [
        next(remaining) if replaced else leaf
        for leaf, replaced in zip(leaves, is_replaced, strict=True)
    ]


def is_inexact(x: Any) -> bool:
    """True if an array, or its spec, is of floating-point or complex numbers."""
    return jnp.issubdtype(getattr(x, "dtype", jnp.int32), jnp.inexact)


def spec(value: Any) -> jax.ShapeDtypeStruct:
    """The shape, dtype, weak type and memory of a value: NumPy's has no weak type."""
    weak_spec = jax.ShapeDtypeStruct(
        value.shape, value.dtype, weak_type=_is_weakly_typed(value)
    )
    return in_memory_of(weak_spec, value)


def _is_weakly_typed(value: Any) -> bool:
    return hasattr(value, "weak_type") and value.weak_type


def specs(atoms: Iterable[Any]) -> list[jax.ShapeDtypeStruct]:
    """The spec of each variable or literal."""
    return [spec(atom.aval) for atom in atoms]


def nbytes(value: Any) -> int:
    """The bytes of an array, from it, its spec or its aval."""
    return value.size * value.dtype.itemsize


def zeros(like: PyTree) -> PyTree:
    """An array of zeros for each spec, weakly typed where the spec is."""

    def zero(leaf: Any) -> jax.Array:
        strong_zeros = jnp.zeros(leaf.shape, leaf.dtype)
        if not _is_weakly_typed(leaf):
            return strong_zeros
        # `jax.numpy` makes weak zeros only like a weak array; a trace has one.
        closed = make_jaxpr(jnp.zeros_like)(spec(leaf))
        (weak_zeros,) = core.jaxpr_as_fun(closed)(strong_zeros)
        return weak_zeros

    return jax.tree.map(zero, like)


def variables(atoms: Iterable[Any]) -> set[core.Var]:
    """The atoms that are not literals."""
    return {atom for atom in atoms if not isinstance(atom, core.Literal)}
