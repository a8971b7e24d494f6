"""Scans with another body, with operands in other roles, or without some results.

    constants, carry, xs -> carry, ys

An iteration carries some operands of a scan, goes along some, and has the others as
constants.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend import core

from . import _jaxpr


def run_scan(
    body: Callable[..., Sequence[Any]],
    operands: Sequence[Any],
    *,
    carried: Sequence[int],
    along: Sequence[int],
    like: core.JaxprEqn,
) -> list[Any]:
    """Evaluates a scan.

    Args:
      body: ``(*operands) -> (*carry, *ys)``, the operands as an iteration has them.
      operands: the operands; those that the body does not read may have any shape.
      carried: the indices of the operands that are carried.
      along: the indices of the operands along whose first axis the scan goes.
      like: a scan of the same length, direction and unrolling.

    Returns:
      The last carry, and the ys.
    """

    def step(carry: Sequence[Any], xs: Sequence[Any]) -> Any:
        args = list(operands)
        for index, value in zip([*carried, *along], [*carry, *xs], strict=True):
            args[index] = value
        results = body(*args)
        return results[: len(carried)], results[len(carried) :]

    params: Any = like.params
    carry, ys = jax.lax.scan(
        step,
        [operands[i] for i in carried],
        [operands[i] for i in along],
        length=params["length"],
        reverse=params["reverse"],
        unroll=params["unroll"],
    )
    return [*carry, *ys]


def prune_scans(closed: core.ClosedJaxpr) -> core.ClosedJaxpr:
    """The same computation, whose scans compute and carry only what results need.

    The scan with which Flax makes stacked parameters computes activations beside them.
    """
    jaxpr = closed.jaxpr
    needed_vars = _jaxpr.variables(jaxpr.outvars)
    # id of a scan -> the part of it that is needed
    parts: dict[int, _ScanPart] = {}
    for eqn in reversed(jaxpr.eqns):
        if needed_vars.isdisjoint(eqn.outvars):
            continue
        operands = eqn.invars
        if eqn.primitive.name == "scan" and not eqn.effects:
            part = _needed_part(eqn, [var in needed_vars for var in eqn.outvars])
            parts[id(eqn)] = part
            operands = [operands[i] for i in part.used_operands]
        needed_vars |= _jaxpr.variables(operands)

    def rule(eqn: core.JaxprEqn) -> _jaxpr.Rule | None:
        part = parts.get(id(eqn))
        return None if part is None else part.evaluate

    pruned = _jaxpr.rewrite(closed, rule) if parts else closed
    return _jaxpr.dce_jaxpr(pruned, pruned.jaxpr.outvars)


class _ScanPart(NamedTuple):
    """The part of a scan that some of its results need.

    Attributes:
      eqn: the scan.
      body: ``(*operands) -> the results that are needed`` of an iteration.
      is_needed: one bool per result of the scan.
    """

    eqn: core.JaxprEqn
    body: core.ClosedJaxpr
    is_needed: Sequence[bool]

    @property
    def carried(self) -> list[int]:
        """The indices of the operands that are carried."""
        carry_slice = _jaxpr.carry_slice(self.eqn)
        indices = range(carry_slice.start, carry_slice.stop)
        return [i for i, needed in zip(indices, self.is_needed, strict=False) if needed]

    @property
    def read_operands(self) -> list[int]:
        """The indices of the operands that the body reads."""
        is_read = _jaxpr.used_inputs(self.body)
        return [i for i, read in enumerate(is_read) if read]

    @property
    def used_operands(self) -> list[int]:
        """The indices of the operands that the body reads or that are carried."""
        return sorted({*self.read_operands, *self.carried})

    def evaluate(self, operands: Sequence[Any]) -> list[Any]:
        """The results of the scan; those that nobody needs are zeros."""
        end_of_carry = _jaxpr.carry_slice(self.eqn).stop
        computed = iter(
            run_scan(
                core.jaxpr_as_fun(self.body),
                operands,
                carried=self.carried,
                along=[i for i in self.read_operands if i >= end_of_carry],
                like=self.eqn,
            )
        )
        specs = _jaxpr.specs(self.eqn.outvars)
        return [
            next(computed) if needed else _jaxpr.zeros(spec)
            for needed, spec in zip(self.is_needed, specs, strict=True)
        ]


def _needed_part(eqn: core.JaxprEqn, is_needed: Sequence[bool]) -> _ScanPart:
    """The part of a scan that some results need: a carry may need others.

    Args:
      eqn: the scan.
      is_needed: one bool per result of the scan.
    """
    body: Any = eqn.params["jaxpr"]
    carry_slice = _jaxpr.carry_slice(eqn)
    is_needed = list(is_needed)
    while True:
        outvars = zip(body.jaxpr.outvars, is_needed, strict=True)
        needed_outvars = [var for var, needed in outvars if needed]
        pruned = prune_scans(_jaxpr.dce_jaxpr(body, needed_outvars))
        reads = _jaxpr.used_inputs(pruned)[carry_slice]
        missing = [k for k, is_read in enumerate(reads) if is_read and not is_needed[k]]
        if not missing:
            return _ScanPart(eqn, pruned, is_needed)
        for k in missing:
            is_needed[k] = True
