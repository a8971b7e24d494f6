"""Computations: what instructions compute, before it is compiled."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from jax.extend import core

from . import _inlining, _jaxpr, _sharding_constraints

Leaves = Sequence[Any]


@dataclass(frozen=True)
class Argument:
    """An argument of a computation, by its index."""

    index: int


@dataclass(frozen=True)
class Result:
    """A result of a computation, by its index."""

    index: int


ArgumentOrResult = Argument | Result


@dataclass(frozen=True, eq=False)
class Computation:
    """A function of flat leaves; its calls in one place share a compiled program.

    Attributes:
      name: the name in profiles.
      run: ``run(*used_args) -> results``, which JAX can trace.
      results: the specs of its results.
      aliases: result index -> the argument, or the earlier result, that it is. No array
        is made for it: two names of one array could both be donated.
      has_effects: True if it is to run though nobody reads its results.
      used_args: the indices of the arguments that ``run`` takes; ``None``: all.
      closed: the jaxpr of ``run``, if it was made of one.
    """

    name: str
    run: Callable[..., Leaves]
    results: Sequence[Any]
    aliases: dict[int, ArgumentOrResult] = field(default_factory=dict)
    has_effects: bool = False
    used_args: Sequence[int] | None = None
    closed: core.ClosedJaxpr | None = None

    @classmethod
    def from_jaxpr(cls, name: str, closed: core.ClosedJaxpr) -> "Computation":
        """The computation of a jaxpr, which takes the inputs that its results need."""
        closed = _jaxpr.dce_jaxpr(closed, closed.jaxpr.outvars)
        is_used = _jaxpr.used_inputs(closed)
        used_args = [i for i, used in enumerate(is_used) if used]
        invars = [closed.jaxpr.invars[i] for i in used_args]
        closed = core.ClosedJaxpr(closed.jaxpr.replace(invars=invars), closed.consts)

        # variable -> the argument or the first result that it is
        origins: dict[core.Var, ArgumentOrResult] = {
            var: Argument(i) for i, var in enumerate(invars)
        }
        aliases: dict[int, ArgumentOrResult] = {}
        for i, var in enumerate(closed.jaxpr.outvars):
            if isinstance(var, core.Literal):
                continue
            if var in origins:
                aliases[i] = origins[var]
            else:
                origins[var] = Result(i)

        return cls(
            name,
            run=core.jaxpr_as_fun(closed),
            results=closed.out_avals,
            aliases=aliases,
            has_effects=bool(closed.effects),
            used_args=used_args,
            closed=closed,
        )

    @cached_property
    def has_constraints(self) -> bool:
        """True if it holds constraints of a user: see `_sharding_constraints`."""
        return self.closed is not None and _sharding_constraints.has_constraints(
            self.closed
        )

    @classmethod
    def from_function(
        cls, name: str, run: Callable[..., Leaves], *specs: Any
    ) -> "Computation":
        """The computation of a function, traced on leaves of these specs."""
        closed, _ = _inlining.trace(lambda *leaves: list(run(*leaves)), *specs)
        return cls.from_jaxpr(name, closed)


def compose(
    first: core.ClosedJaxpr,
    second: core.ClosedJaxpr,
    args: Sequence[ArgumentOrResult | None],
) -> core.ClosedJaxpr:
    """Two jaxprs as one, without memory for values that pass between them alone.

    Args:
      first: the jaxpr that runs first.
      second: the jaxpr that runs after it.
      args: one per input of the second: the argument or the result of the first that
        it is; ``None`` for an input of its own.

    Returns:
      ``(*inputs of the first, *other inputs of the second) -> (*results of the first,
      *results of the second)``.
    """
    # input of the second -> the variable or literal of the first that it is
    atoms: dict[core.Var, Any] = {}
    for var, arg in zip(second.jaxpr.invars, args, strict=True):
        if isinstance(arg, Argument):
            atoms[var] = first.jaxpr.invars[arg.index]
        elif isinstance(arg, Result):
            atoms[var] = first.jaxpr.outvars[arg.index]

    def substitute(atom: Any) -> Any:
        return atom if isinstance(atom, core.Literal) else atoms.get(atom, atom)

    eqns = [*first.jaxpr.eqns]
    for eqn in second.jaxpr.eqns:
        if atoms.keys() & _jaxpr.variables(eqn.invars):
            eqn = eqn.replace(invars=[*map(substitute, eqn.invars)])
        eqns.append(eqn)

    other_invars = [var for var in second.jaxpr.invars if var not in atoms]
    jaxpr = first.jaxpr.replace(
        constvars=[*first.jaxpr.constvars, *second.jaxpr.constvars],
        invars=[*first.jaxpr.invars, *other_invars],
        outvars=[*first.jaxpr.outvars, *map(substitute, second.jaxpr.outvars)],
        eqns=eqns,
        effects=_jaxpr.effects_of(eqns),
    )
    return core.ClosedJaxpr(jaxpr, [*first.consts, *second.consts])
