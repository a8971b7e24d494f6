"""What an instruction computes, before it is compiled."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from jax.extend import core

from . import _jaxpr, _sharding_constraints

Leaves = Sequence[Any]


@dataclass(frozen=True)
class ArgumentSource:
    """An argument of a function, by its index."""

    index: int


@dataclass(frozen=True)
class ResultSource:
    """A result of a function, by its index."""

    index: int


# Where a value comes from.
Source = ArgumentSource | ResultSource


@dataclass(frozen=True, eq=False)
class Computation:
    """A function of flat leaves; its calls in one place share a compiled program.

    Attributes:
      name: how profiles call it.
      run: ``run(*leaves) -> leaves``, which JAX can trace.
      results: the specs of its results.
      aliases: result index -> the argument, or the earlier result, that it is. No array
        is made for it: two names of one array could both be donated.
      has_effects: whether it is to run though nobody reads its results.
      reads: which of the arguments that it is offered it reads, and ``run`` is given;
        ``None``: all.
      closed: the jaxpr over what it reads, if it was made of one.
    """

    name: str
    run: Callable[..., Leaves]
    results: Sequence[Any]
    aliases: dict[int, Source] = field(default_factory=dict)
    has_effects: bool = False
    reads: Sequence[int] | None = None
    closed: core.ClosedJaxpr | None = None

    @classmethod
    def of(cls, name: str, closed: core.ClosedJaxpr) -> "Computation":
        """A jaxpr as a function."""
        closed = _jaxpr.dce_jaxpr(closed, closed.jaxpr.outvars)
        live = _jaxpr.used_inputs(closed)
        reads = [i for i, yes in enumerate(live) if yes]
        invars = [closed.jaxpr.invars[i] for i in reads]
        closed = core.ClosedJaxpr(closed.jaxpr.replace(invars=invars), closed.consts)
        # variable -> the argument or the first result that it is
        sources: dict[core.Var, Source] = {
            var: ArgumentSource(i) for i, var in enumerate(invars)
        }
        aliases: dict[int, Source] = {}
        for i, var in enumerate(closed.jaxpr.outvars):
            if isinstance(var, core.Literal):
                continue
            if var in sources:
                aliases[i] = sources[var]
            else:
                sources[var] = ResultSource(i)
        return cls(
            name,
            run=core.jaxpr_as_fun(closed),
            results=closed.out_avals,
            aliases=aliases,
            has_effects=bool(closed.effects),
            reads=reads,
            closed=closed,
        )

    @cached_property
    def has_constraints(self) -> bool:
        """Whether it holds constraints of a user's program: see `_constraints`."""
        return self.closed is not None and _sharding_constraints.are_in(self.closed)

    @classmethod
    def like(cls, name: str, run: Callable[..., Leaves], *specs: Any) -> "Computation":
        """A function of leaves such as these; the specs of its results are found."""
        return cls.of(name, _jaxpr.trace(lambda *leaves: list(run(*leaves)), *specs)[0])


def compose(
    first: core.ClosedJaxpr, second: core.ClosedJaxpr, sources: Sequence[Source | None]
) -> core.ClosedJaxpr:
    """Two jaxprs as one: what passes between them alone needs no memory.

    Args:
      first: runs first.
      second: runs after it.
      sources: one per input of the second: the argument or the result of the first that
        it is; ``None`` for an input of both together.

    Returns:
      ``(*inputs of the first, *other inputs of the second) -> (*results of the first,
      *results of the second)``.
    """
    inputs = second.jaxpr.invars
    atoms: dict[core.Var, Any] = {}
    for var, source in zip(inputs, sources, strict=True):
        if isinstance(source, ArgumentSource):
            atoms[var] = first.jaxpr.invars[source.index]
        elif isinstance(source, ResultSource):
            atoms[var] = first.jaxpr.outvars[source.index]

    def replaced(atom: Any) -> Any:
        return atom if isinstance(atom, core.Literal) else atoms.get(atom, atom)

    eqns = [*first.jaxpr.eqns]
    for eqn in second.jaxpr.eqns:
        if atoms.keys() & _jaxpr.variables(eqn.invars):
            eqn = eqn.replace(invars=[*map(replaced, eqn.invars)])
        eqns.append(eqn)
    jaxpr = first.jaxpr.replace(
        constvars=[*first.jaxpr.constvars, *second.jaxpr.constvars],
        invars=[*first.jaxpr.invars, *(var for var in inputs if var not in atoms)],
        outvars=[*first.jaxpr.outvars, *map(replaced, second.jaxpr.outvars)],
        eqns=eqns,
        effects={effect for eqn in eqns for effect in eqn.effects},
    )
    return core.ClosedJaxpr(jaxpr, [*first.consts, *second.consts])
