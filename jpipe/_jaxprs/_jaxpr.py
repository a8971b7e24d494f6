"""What one does with a jaxpr: trace, rewrite, ask what follows from what.

Analyses are over variables: see `descendants`, `ancestors` and `dce_jaxpr`.

`jax.extend.core` is JAX's public door to jaxprs.
"""

import itertools
from collections.abc import (
    Callable,
    Collection,
    Container,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

PyTree = Any
Ending = Callable[[Sequence[Any], Sequence[Any]], Sequence[Any]]
# The results of an equation, made of its operands in another way.
Rule = Callable[[Sequence[Any]], Sequence[Any]]

# The names that JAX gives, or has given, to the primitives of `jax.jit` and of
# `jax.checkpoint`.
_CALLS = ("jit", "pjit")
CHECKPOINTS = ("remat2", "checkpoint")
RULES = ("custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr")


def trace(
    function: Callable[..., Any],
    *specs: PyTree,
    ending: Ending | None = None,
) -> tuple[core.ClosedJaxpr, Any]:
    """Traces a function on abstract arguments, with inner calls of `jax.jit` inlined.

    Args:
      function: of any pytrees.
      *specs: its arguments, with `jax.ShapeDtypeStruct` leaves.
      ending: of flat arguments and results: what becomes of the results.

    Returns:
      The jaxpr over flat leaves, and the specs of the function's result.
    """

    def anew(*args: PyTree) -> PyTree:
        # JAX knows functions by identity, and what they read may be another now.
        return function(*args)

    closed, result = jax.make_jaxpr(anew, return_shape=True)(*specs)
    return _retrace(closed, _CALLS, ending=ending), result


# Positions of the results of a `jax.lax.cond`, in groups.
Groups = Sequence[Sequence[int]]


def open_branches(
    closed: core.ClosedJaxpr, chosen: Mapping[int, Groups]
) -> core.ClosedJaxpr:
    """The same computation with some branches cut apart, or in the open.

    Args:
      closed: the jaxpr.
      chosen: by the ids of its equations that are a `jax.lax.cond`: their results in
        groups, each of which gets a cond of its own; or no groups: then all branches
        are computed, and the results selected, leaf by leaf.
    """
    return _retrace(closed, _CALLS, chosen)


def open_checkpoints(closed: core.ClosedJaxpr) -> core.ClosedJaxpr:
    """The same computation with calls of `jax.checkpoint` inlined.

    For programs that hold nothing but a backward: next to its forward, XLA would find
    what is computed again and keep it instead.
    """
    return _retrace(closed, (*_CALLS, *CHECKPOINTS))


def inline(closed: core.ClosedJaxpr, chosen: Collection[int]) -> core.ClosedJaxpr:
    """The same computation with some calls, by the ids of their equations, inlined.

    So is what is inside of them that `jax.jit` calls, as by `trace`.
    """
    return _retrace(closed, {*_CALLS, *chosen})


def _retrace(
    closed: core.ClosedJaxpr,
    calls: Container[str | int],
    opened: Mapping[int, Groups] = MappingProxyType({}),
    ending: Ending | None = None,
) -> core.ClosedJaxpr:
    def is_call(eqn: core.JaxprEqn) -> bool:
        return eqn.primitive.name in calls or id(eqn) in calls

    if not (opened or ending or any(map(is_call, closed.jaxpr.eqns))):
        return closed

    def rule(eqn: core.JaxprEqn) -> Rule | None:
        if is_call(eqn):
            (inner,) = inner_jaxprs(eqn)
            return lambda operands: evaluate(inner, operands, rule)
        if id(eqn) in opened:
            return lambda operands: _choose(eqn, operands, opened[id(eqn)])
        return None

    def inlined(*args: Any) -> Sequence[Any]:
        results = evaluate(closed, args, rule)
        return ending(args, results) if ending else results

    return retrace(closed, inlined)


def retrace(
    closed: core.ClosedJaxpr, run: Callable[..., Sequence[Any]], *more: Any
) -> core.ClosedJaxpr:
    """Traces a function of the inputs of a jaxpr, and of more arrays or specs."""
    return jax.make_jaxpr(run)(*specs(closed.jaxpr.invars), *more)


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
      rule: what takes the place of an equation, as a function of its operands; ``None``
        for those that stay.
    """
    values: dict[core.Var, Any] = dict(
        zip(closed.jaxpr.constvars, closed.consts, strict=True)
    )
    values.update(zip(closed.jaxpr.invars, args, strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, core.Literal) else values[atom]

    for run, group in itertools.groupby(closed.jaxpr.eqns, rule):
        eqns = list(group)
        if run is None:
            # Together: one by one takes half as long again.
            made = [var for eqn in eqns for var in eqn.outvars]
            values.update(zip(made, _bind(closed.jaxpr, eqns, values), strict=True))
            continue
        for eqn in eqns:
            results = run([read(atom) for atom in eqn.invars])
            values.update(zip(eqn.outvars, results, strict=True))
    return [read(atom) for atom in closed.jaxpr.outvars]


def as_traced(closed: core.ClosedJaxpr) -> Callable[..., list[Any]]:
    """The function of a jaxpr, for a trace: constants are traced, as under `jax.jit`.

    To what they are else, arrays of NumPy, a `jax.custom_vjp` may not do what it does
    to arrays.
    """

    def run(*args: Any) -> list[Any]:
        consts = [
            jnp.asarray(const) if isinstance(const, np.ndarray) else const
            for const in closed.consts
        ]
        return core.jaxpr_as_fun(core.ClosedJaxpr(closed.jaxpr, consts))(*args)

    return run


def _choose(eqn: core.JaxprEqn, operands: Sequence[Any], groups: Groups) -> list[Any]:
    """Evaluates a `jax.lax.cond`: see `open_branches`."""
    which, *rest = operands
    branches = eqn.params["branches"]
    if not groups:
        cases = [core.jaxpr_as_fun(branch)(*rest) for branch in branches]
        return [jax.lax.select_n(which, *case) for case in zip(*cases, strict=True)]
    results: list[Any] = [None] * len(eqn.outvars)
    for group in groups:
        parts, needed = branches_of(eqn, group)
        runs = [core.jaxpr_as_fun(part) for part in parts]
        made = jax.lax.switch(which, runs, *[rest[i] for i in needed])
        for i, result in zip(group, made, strict=True):
            results[i] = result
    return results


def branches_of(
    eqn: core.JaxprEqn, group: Sequence[int]
) -> tuple[list[core.ClosedJaxpr], list[int]]:
    """The branches of a `jax.lax.cond` that give some of its results.

    Returns:
      The branches, and the positions of the operands that one of them needs.
    """
    whole = [
        dce_jaxpr(branch, [branch.jaxpr.outvars[i] for i in group])
        for branch in eqn.params["branches"]
    ]
    live = zip(*map(used_inputs, whole), strict=True)
    needed = [i for i, any_of in enumerate(live) if any(any_of)]
    parts = []
    for branch in whole:
        invars = [branch.jaxpr.invars[i] for i in needed]
        jaxpr = branch.jaxpr.replace(invars=invars)
        parts.append(core.ClosedJaxpr(jaxpr, branch.consts))
    return parts, needed


def bind(jaxpr: core.Jaxpr, eqn: core.JaxprEqn, operands: Sequence[Any]) -> list[Any]:
    """Evaluates one equation."""
    pairs = zip(eqn.invars, operands, strict=True)
    given = {atom: x for atom, x in pairs if not isinstance(atom, core.Literal)}
    return _bind(jaxpr, [eqn], given)


def _bind(
    jaxpr: core.Jaxpr, eqns: list[core.JaxprEqn], values: Mapping[core.Var, Any]
) -> list[Any]:
    """Evaluates equations, as a jaxpr of their own: the public way to do so."""
    read = [atom for eqn in eqns for atom in eqn.invars]
    given = [var for var in variables(read) if var in values]
    made = [var for eqn in eqns for var in eqn.outvars]
    part = jaxpr.replace(constvars=[], invars=given, outvars=made, eqns=eqns)
    return core.jaxpr_as_fun(core.ClosedJaxpr(part, []))(*map(values.get, given))


def inline_calls(closed: core.ClosedJaxpr) -> core.ClosedJaxpr:
    """The same values by operations in the open, without rules for derivatives."""
    return _retrace(closed, (*_CALLS, *CHECKPOINTS, *RULES))


def descendants(
    jaxpr: core.Jaxpr,
    sources: Iterable[core.Var],
    passes_on: Callable[[core.JaxprEqn, core.Var], bool] = lambda eqn, var: True,
) -> set[core.Var]:
    """Some variables, and all that follow from any of them.

    Args:
      jaxpr: the jaxpr.
      sources: variables of it.
      passes_on: whether a result of an equation follows from its operands; default:
        always.
    """
    reached = set(sources)
    for eqn in jaxpr.eqns:
        if not reached.isdisjoint(variables(eqn.invars)):
            reached.update(var for var in eqn.outvars if passes_on(eqn, var))
    return reached


def computable_from(
    jaxpr: core.Jaxpr,
    sources: Iterable[core.Var],
    may_run: Callable[[core.JaxprEqn], bool],
) -> set[core.Var]:
    """Some variables, and all that follow from no others.

    Args:
      jaxpr: the jaxpr.
      sources: variables of it.
      may_run: whether an equation may be used for this.
    """
    computed = set(sources)
    for eqn in jaxpr.eqns:
        if may_run(eqn) and variables(eqn.invars) <= computed:
            computed.update(eqn.outvars)
    return computed


def depending_on(closed: core.ClosedJaxpr, inputs: Sequence[bool]) -> set[core.Var]:
    """All variables that follow from some of the inputs, or from an effect."""
    jaxpr = closed.jaxpr
    sources = [var for var, chosen in zip(jaxpr.invars, inputs, strict=True) if chosen]
    with_effects = [eqn for eqn in jaxpr.eqns if eqn.effects]
    sources += [var for eqn in with_effects for var in eqn.outvars]
    return descendants(jaxpr, sources)


def ancestors(jaxpr: core.Jaxpr, atoms: Iterable[Any]) -> set[core.Var]:
    """The variables among some atoms, and all that they follow from."""
    _, needed = _needed(jaxpr, list(atoms), has_effects=False)
    return needed


def producers(jaxpr: core.Jaxpr) -> dict[core.Var, int]:
    """The index of the equation that makes each variable."""
    return {var: i for i, eqn in enumerate(jaxpr.eqns) for var in eqn.outvars}


def dce_jaxpr(closed: core.ClosedJaxpr, outvars: Sequence[Any]) -> core.ClosedJaxpr:
    """The same computation with other results, and nothing that they do not need.

    Equations with effects, such as a debug print, stay.
    """
    eqns, _ = _needed(closed.jaxpr, outvars)
    jaxpr = closed.jaxpr.replace(eqns=eqns, outvars=list(outvars))
    return core.ClosedJaxpr(jaxpr, closed.consts)


def used_inputs(closed: core.ClosedJaxpr) -> list[bool]:
    """Which inputs the results need."""
    _, needed = _needed(closed.jaxpr, closed.jaxpr.outvars)
    return [var in needed for var in closed.jaxpr.invars]


def recomputation(
    closed: core.ClosedJaxpr, outvars: Sequence[Any], known: Sequence[core.Var]
) -> core.ClosedJaxpr:
    """What is left to compute of some variables where others are known.

    Args:
      closed: the jaxpr.
      outvars: variables of it.
      known: those which are given, after its inputs.

    Returns:
      ``(*inputs, *known) -> outvars``, without what they do not need, effects such as a
      debug print too.
    """
    eqns, _ = _needed(closed.jaxpr, outvars, known, has_effects=False)
    invars = [*closed.jaxpr.invars, *known]
    jaxpr = closed.jaxpr.replace(invars=invars, eqns=eqns, outvars=list(outvars))
    return core.ClosedJaxpr(jaxpr, closed.consts)


def _needed(
    jaxpr: core.Jaxpr,
    outvars: Sequence[Any],
    known: Sequence[core.Var] = (),
    has_effects: bool = True,
) -> tuple[list[core.JaxprEqn], set[core.Var]]:
    """What some variables need where others are known.

    Returns:
      The equations, those with effects too if there are such, in order; and all
      variables that are read.
    """
    live, eqns = variables(outvars).difference(known), []
    for eqn in reversed(jaxpr.eqns):
        if (has_effects and eqn.effects) or not live.isdisjoint(eqn.outvars):
            live |= variables(eqn.invars).difference(known)
            eqns.append(eqn)
    return eqns[::-1], live


def equations(closed: core.ClosedJaxpr) -> Iterator[core.JaxprEqn]:
    """The equations of a jaxpr, and of those inside of it."""
    for eqn in closed.jaxpr.eqns:
        yield eqn
        for inner in inner_jaxprs(eqn):
            yield from equations(inner)


def contains(closed: core.ClosedJaxpr, name: str) -> bool:
    """Whether a primitive of that name is in a jaxpr, or in one inside of it."""
    return any(eqn.primitive.name == name for eqn in equations(closed))


def inner_jaxprs(eqn: core.JaxprEqn) -> list[core.ClosedJaxpr]:
    """The jaxprs of a call, of branches or of a loop."""
    return [
        value if isinstance(value, core.ClosedJaxpr) else core.ClosedJaxpr(value, [])
        for value in jax.tree.leaves(list(eqn.params.values()))
        if isinstance(value, core.ClosedJaxpr | core.Jaxpr)
    ]


def bodies(eqn: core.JaxprEqn) -> list[core.ClosedJaxpr]:
    """The jaxprs of a call, of branches or of a loop whose results are those of it.

    Each takes the last operands: the first choose the branch, or are for the end
    of a loop.
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
    """Which operands of a loop become its first results; of another equation none."""
    if eqn.primitive.name == "while":
        return slice(len(eqn.invars) - len(eqn.outvars), len(eqn.invars))
    if eqn.primitive.name != "scan":
        return slice(0)
    # Newer JAX has other names for how many there are. What a scan goes along has an
    # axis more outside of it, what it carries has not.
    body: Any = eqn.params["jaxpr"]
    given: list[Any] = [atom.aval for atom in eqn.invars]
    made: list[Any] = [var.aval for var in eqn.outvars]
    xs = sum(x.ndim > y.ndim for x, y in zip(given, body.in_avals, strict=True))
    carry = sum(x.ndim == y.ndim for x, y in zip(made, body.out_avals, strict=True))
    end = len(eqn.invars) - xs
    return slice(end - carry, end)


def vjp(
    run: Callable[..., Sequence[Any]], args: Sequence[Any]
) -> tuple[list[Any], Callable[..., Any]]:
    """`jax.vjp` by the arguments that have a derivative, of the results that have."""
    free = [i for i, x in enumerate(args) if is_inexact(x)]

    def of_the_free(some: list[Any]) -> list[Any]:
        given = dict(enumerate(args)) | dict(zip(free, some, strict=True))
        return [y for y in run(*given.values()) if is_inexact(y)]

    return jax.vjp(of_the_free, [args[i] for i in free])


def is_inexact(x: Any) -> bool:
    """Whether an array or its spec is of floating-point or complex numbers."""
    return jnp.issubdtype(getattr(x, "dtype", jnp.int32), jnp.inexact)


def spec(value: Any) -> jax.ShapeDtypeStruct:
    """What a value is like, as far as tracing needs; an array of NumPy is not weak."""
    weak = getattr(value, "weak_type", False)
    return jax.ShapeDtypeStruct(value.shape, value.dtype, weak_type=weak)


def specs(atoms: Iterable[Any]) -> list[jax.ShapeDtypeStruct]:
    """The spec of each variable or literal."""
    return [spec(atom.aval) for atom in atoms]


def nbytes(value: Any) -> int:
    """The bytes of an array, from it, its spec or its aval."""
    return value.size * value.dtype.itemsize


def zeros(like: PyTree) -> PyTree:
    """An array of zeros for each spec, weakly typed where the spec is."""

    def zero(leaf: Any) -> jax.Array:
        strong = jnp.zeros(leaf.shape, leaf.dtype)
        if not getattr(leaf, "weak_type", False):
            return strong
        # `jax.numpy` makes weak zeros only like a weak array; a trace has one.
        closed = jax.make_jaxpr(jnp.zeros_like)(spec(leaf))
        (weak,) = core.jaxpr_as_fun(closed)(strong)
        return weak

    return jax.tree.map(zero, like)


def variables(atoms: Iterable[Any]) -> set[core.Var]:
    """Those of the atoms that are not literals."""
    return {atom for atom in atoms if not isinstance(atom, core.Literal)}
