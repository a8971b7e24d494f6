"""The stages of a program: slices of its equations, by who reads which variable."""

from bisect import bisect_right
from collections.abc import Container, Sequence
from typing import Any

from jax.extend import core

from .._jaxprs import _jaxpr
from .._jaxprs._jaxpr import is_inexact
from .._trace._boundaries import is_mark
from .._trace._traced_function import TracedFunction
from ._stage import Stage


def _variables(atoms: Sequence[Any]) -> list[core.Var]:
    return [atom for atom in atoms if not isinstance(atom, core.Literal)]


def slices(
    program: TracedFunction,
    cuts: Sequence[int],
    trained: set[core.Var],
    trained_params: set[core.Var],
) -> list[Stage]:
    """The stages, in order. The last makes the loss.

    Args:
      program: what is divided.
      cuts: where.
      trained: what has a gradient: see `with_gradient`.
      trained_params: the parameters that have one, zero though it may be.

    Raises:
      ValueError: if a reference is used in two stages.
    """
    jaxpr, count = program.closed.jaxpr, len(cuts) + 1
    eqns = jaxpr.eqns
    needed = {
        id(eqn) for eqn in _jaxpr.dce_jaxpr(program.closed, jaxpr.outvars).jaxpr.eqns
    }
    stage = [
        bisect_right(cuts, i) if kind == "stage" and id(eqn) in needed else None
        for i, (eqn, kind) in enumerate(zip(eqns, program.kinds, strict=True))
    ]
    consts = dict(zip(jaxpr.constvars, program.closed.consts, strict=True))
    params = set(program.params)
    outputs = [v for v in _variables(program.outputs) if v not in params]
    maker = {v: stage[i] for v, i in program.producer.items() if stage[i] is not None}
    # The equations of each stage, with those that it computes for itself.
    of_stage: list[list[int]] = [[] for _ in range(count)]
    reads: list[dict[core.Var, None]] = [{} for _ in range(count)]
    for s in range(count):
        needed = dict.fromkeys(v for v in outputs if maker.get(v, count - 1) == s)
        for i in reversed(range(len(eqns))):
            is_copy = program.kinds[i] == "copy"
            if stage[i] == s or (is_copy and any(v in needed for v in eqns[i].outvars)):
                of_stage[s].append(i)
                needed |= dict.fromkeys(_variables(eqns[i].invars))
        of_stage[s].reverse()
        made = {var for i in of_stage[s] for var in eqns[i].outvars}
        reads[s] = {var: None for var in needed if var not in made}
    _check_references(
        [{v: None for v in read if v not in consts} for read in reads], maker
    )
    given = set(program.given)
    found = []
    for s in range(count):
        read_later = {var for t in range(count) if t != s for var in reads[t]}
        made = [var for i in of_stage[s] for var in eqns[i].outvars]
        crossing = [v for v in made if maker.get(v) == s and v in read_later]
        ends = _variables(program.loss) or [v for v in outputs if v in trained]
        ends = [v for v in dict.fromkeys(ends) if maker.get(v, count - 1) == s]
        leaves = [*ends, *(v for v in crossing if v in trained and v not in ends)]
        aux = [v for v in crossing if v not in trained]
        returned = [v for v in outputs if maker.get(v, count - 1) == s]
        aux += [v for v in dict.fromkeys(returned) if v not in {*leaves, *aux}]
        with_grads, no_grads = _split_by([v for v in reads[s] if v in maker], trained)
        of_batch = [v for v in program.given if v in reads[s]]
        inputs = [v for v in of_batch if v in program.inputs]
        batch = of_batch[len(inputs) :]
        known = {*maker, *given, *consts}
        trained_weights, fixed_weights = _split_by(
            [v for v in reads[s] if v not in known],
            trained_params | trained.difference(program.params),
        )
        closed = _closed(
            program,
            [
                *trained_weights,
                *with_grads,
                *fixed_weights,
                *no_grads,
                *inputs,
                *batch,
            ],
            [*leaves, *aux],
            [eqns[i] for i in of_stage[s]],
            {var: const for var, const in consts.items() if var in reads[s]},
        )
        found.append(
            Stage(
                weights=[*trained_weights, *fixed_weights],
                num_trained=len(trained_weights),
                arrives=[*with_grads, *no_grads],
                num_differentiated=len(with_grads),
                inputs=inputs,
                batch=batch,
                leaves=leaves,
                aux=aux,
                closed=closed,
            )
        )
    return found


def _split_by(
    variables: Sequence[core.Var], chosen: Container[core.Var]
) -> tuple[list[core.Var], list[core.Var]]:
    """Those of the variables that are chosen, and the others."""
    others = [var for var in variables if var not in chosen]
    return [var for var in variables if var in chosen], others


def _closed(
    program: TracedFunction,
    invars: list[core.Var],
    outvars: list[core.Var],
    eqns: Sequence[core.JaxprEqn],
    consts: dict[core.Var, Any],
) -> core.ClosedJaxpr:
    """Some equations as a jaxpr, in which what is marked is what it was."""
    was: dict[core.Var, Any] = {}

    def before(atom: Any) -> Any:
        return atom if isinstance(atom, core.Literal) else was.get(atom, atom)

    unmarked = []
    for eqn in eqns:
        if is_mark(eqn):
            was[eqn.outvars[0]] = before(eqn.invars[0])
        elif was.keys() & _jaxpr.variables(eqn.invars):
            unmarked.append(eqn.replace(invars=[*map(before, eqn.invars)]))
        else:
            unmarked.append(eqn)
    jaxpr = program.closed.jaxpr.replace(
        constvars=[*consts],
        invars=invars,
        outvars=[*map(before, outvars)],
        eqns=unmarked,
        effects={effect for eqn in unmarked for effect in eqn.effects},
    )
    return core.ClosedJaxpr(jaxpr, [*consts.values()])


def _check_references(reads: Sequence[Any], maker: Any) -> None:
    for s, variables in enumerate(reads):
        for var in variables:
            if not hasattr(var.aval, "dtype") or "Ref" in type(var.aval).__name__:
                raise ValueError(
                    f"a jax.Ref is used in stages {maker.get(var)} and {s}; use it "
                    f"in one, between two places that jpipe.boundary marks"
                )


def with_gradient(program: TracedFunction, trained: Sequence[bool]) -> set[core.Var]:
    """What has a tangent, as it follows from what is trained, and reaches the loss.

    Without a loss what reaches a result.
    """
    jaxpr = program.closed.jaxpr
    pairs = zip(program.params, trained, strict=True)
    tangent = _jaxpr.descendants(
        jaxpr,
        [param for param, is_trained in pairs if is_trained],
        lambda eqn, v: eqn.primitive.name != "stop_gradient" and is_inexact(v.aval),
    )
    if not tangent.isdisjoint(_jaxpr.variables(program.weight)):
        raise TypeError(
            "reduction='weighted': the weight follows from parameters, so that it has "
            "a gradient, which a pipeline would leave out: the gradient of a quotient "
            "needs both sums. Compute the weight of targets alone; to take it for a "
            "constant return (total, jax.lax.stop_gradient(weight))"
        )
    ends = [*program.loss, *program.rest] if program.has_loss else program.aux_vars
    return tangent & _jaxpr.ancestors(jaxpr, ends)


def once(program: TracedFunction, parts: Sequence[Stage]) -> core.ClosedJaxpr:
    """``params -> values``: what is once in a step, for stages and the loss."""
    params = set(program.params)
    wanted = dict.fromkeys(v for part in parts for v in part.weights if v not in params)
    pruned = _jaxpr.dce_jaxpr(program.closed, [*wanted, *program.rest])
    eqns = [eqn for eqn in pruned.jaxpr.eqns if not eqn.effects]
    jaxpr = pruned.jaxpr.replace(invars=program.params, eqns=eqns, effects=set())
    return core.ClosedJaxpr(jaxpr, program.closed.consts)
