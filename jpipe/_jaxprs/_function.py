"""What an instruction computes, before it is compiled."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from jax.extend import core

from . import _constraints, _jaxpr

Leaves = Sequence[Any]


@dataclass(frozen=True, eq=False)
class Function:
    """A function of flat leaves; its calls in one place share a compiled program.

    Attributes:
      name: how profiles call it.
      run: ``run(*leaves) -> leaves``, which JAX can trace.
      results: the specs of its results.
      same: results for which no array is made, by position: as argument ``i`` came;
        or, as ``~i``, what result ``i`` is. Two names of one array could both be
        donated.
      has_effects: whether it is to run though nobody reads its results.
      reads: which of the arguments that it is offered it reads, and ``run`` is given;
        ``None``: all.
      closed: the jaxpr over what it reads, if it was made of one.
      parts: the jaxprs of which it is made.
    """

    name: str
    run: Callable[..., Leaves]
    results: Sequence[Any]
    same: dict[int, int] = field(default_factory=dict)
    has_effects: bool = False
    reads: Sequence[int] | None = None
    closed: core.ClosedJaxpr | None = None
    parts: Sequence[core.ClosedJaxpr] = ()

    @classmethod
    def of(cls, name: str, closed: core.ClosedJaxpr) -> "Function":
        """A jaxpr as a function."""
        closed = _jaxpr.prune(closed, closed.jaxpr.outvars)
        live = _jaxpr.live_inputs(closed)
        reads = [i for i, yes in enumerate(live) if yes]
        invars = [closed.jaxpr.invars[i] for i in reads]
        closed = core.ClosedJaxpr(closed.jaxpr.replace(invars=invars), closed.consts)
        at = {var: i for i, var in enumerate(invars)}
        same = {}
        for i, var in enumerate(closed.jaxpr.outvars):
            if isinstance(var, core.Literal):
                continue
            if var in at:
                same[i] = at[var]
            at.setdefault(var, ~i)
        return cls(
            name,
            core.jaxpr_as_fun(closed),
            closed.out_avals,
            same,
            bool(closed.effects),
            reads,
            closed,
            (closed,),
        )

    @cached_property
    def has_constraints(self) -> bool:
        """Whether it holds constraints of a user's program: see `_constraints`."""
        return any(map(_constraints.are_in, self.parts))

    @classmethod
    def like(cls, name: str, run: Callable[..., Leaves], *specs: Any) -> "Function":
        """A function of leaves such as these; the specs of its results are found."""
        return cls.of(name, _jaxpr.trace(lambda *leaves: list(run(*leaves)), *specs)[0])


def composed(
    first: Function, second: Function, count: int, wires: tuple[int, ...]
) -> Function:
    """Two functions as one: what passes between them alone needs no memory.

    Args:
      first: runs first.
      second: runs after it.
      count: how many arguments the first has.
      wires: what each argument of the second is: an argument of both together, by its
        position; or, as ``~i``, result ``i`` of the first.

    Returns:
      Of the arguments of the first, then those that only the second has: the results of
      the first, then those of the second.
    """

    def run(*leaves: Any) -> list[Any]:
        made = first.run(*leaves[:count])
        return [*made, *second.run(*[made[~i] if i < 0 else leaves[i] for i in wires])]

    before = len(first.results)
    same = dict(first.same)
    for i, at in second.same.items():
        # A wire that is a result of the first is that of both, at the same position.
        wire = wires[at] if at >= 0 else ~(before + ~at)
        same[before + i] = first.same.get(~wire, wire) if wire < 0 else wire
    return Function(
        f"{first.name}_{second.name}",
        run,
        [*first.results, *second.results],
        same,
        first.has_effects or second.has_effects,
        parts=(*first.parts, *second.parts),
    )
