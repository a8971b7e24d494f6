"""A function cut in two programs: a forward and the backward that completes it.

`jax.vjp` inside `jax.jit` returns what its pullback holds as outputs: fresh copies of
whatever the backward reads, the weights above all, once per micro-batch in flight. Here
that is read off the jaxpr of the forward:

* what *is* an input (a weight, the stage's input, a target) is passed to the backward
  again;
* what follows from the weights alone (a cast to bfloat16, a broadcast scale) is
  computed again from them;
* all the rest is stored, or the fewest bytes from which it follows cheaply: these are
  the *residuals*, which the forward returns for the backward.

Forward and backward are different programs, so XLA cannot undo what is computed again
by finding common subexpressions.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import core

from .._jaxprs import _jaxpr, _min_cut

Leaves = Sequence[Any]
# f(differentiated, fixed) -> (outputs, aux): flat leaves in, flat leaves out. Outputs
# have cotangents, aux has none.
Function = Callable[[Leaves, Leaves], tuple[list[Any], list[Any]]]


class ForwardBackward(NamedTuple):
    """The two halves of one function, as jaxprs over flat leaves.

    Attributes:
      forward: ``(differentiated, fixed) -> (outputs, aux, residuals)``. The backward
        may not read all of these.
      reads: the same computation, ``(differentiated, fixed) -> what the backward
        reads``.
      residuals: the variables of both that the forward returns for the backward.
      backward: ``(differentiated, fixed, residuals, cotangents) -> gradients`` of the
        differentiated leaves; of a loss with what it is divided by in place of
        cotangents.
    """

    forward: core.ClosedJaxpr
    reads: core.ClosedJaxpr
    residuals: list[core.Var]
    backward: core.ClosedJaxpr


def cut_vjp(
    function: Function,
    differentiated: Leaves,
    fixed: Leaves,
    *,
    is_weight: Sequence[bool],
    is_at_hand: Sequence[bool],
    remat: Callable[[Callable[..., Any]], Callable[..., Any]],
    fewest: bool,
    divisors: Leaves | None = None,
) -> ForwardBackward:
    """Cuts a function in a forward and a backward.

    Args:
      function: what to differentiate.
      differentiated: specs of the leaves that have a gradient.
      fixed: specs of the others.
      is_weight: one bool per leaf of both; True if it stays where it is.
      is_at_hand: likewise; True for a leaf of one micro-batch that both halves have
        anyway: targets, keys.
      remat: wraps the function, as `jax.checkpoint` does, to decide what the backward
        reads.
      fewest: whether of that only the fewest bytes are residuals.
      divisors: of a loss, the only output, specs of what it is divided by, if it is;
        ``None``: the cotangents of the outputs are given.

    Returns:
      The two halves.
    """
    tree: list[Any] = []

    def forward(differentiated: Leaves, fixed: Leaves) -> Any:
        outputs, pullback, aux = jax.vjp(
            lambda leaves: remat(function)(leaves, fixed), differentiated, has_aux=True
        )
        stored, structure = jax.tree.flatten(pullback)
        tree.append(structure)
        return outputs, aux, stored

    closed, (outputs, aux, _) = _jaxpr.trace(forward, differentiated, fixed)
    structure = tree[-1]
    count = len(outputs) + len(aux)
    variables = closed.jaxpr.outvars[count:]
    if fewest:
        residuals = _min_cut.find_residuals(closed, variables, is_weight, is_at_hand)
    else:
        residuals = _all_residuals(closed, variables, is_weight)
    again = _jaxpr.as_traced(_jaxpr.recomputation(closed, variables, residuals))

    def backward(
        differentiated: Leaves, fixed: Leaves, residuals: Leaves, *cotangents: Any
    ) -> Any:
        stored = again(*differentiated, *fixed, *residuals)
        pullback = jax.tree.unflatten(structure, stored)
        if divisors is None:
            return pullback(list(cotangents))
        # The only output is the loss: its cotangent is 1, or 1 / (sum of weights).
        (loss,) = outputs
        if not cotangents:
            return pullback([jnp.ones((), loss.dtype)])
        (divisor,) = cotangents
        return pullback([(1 / divisor).astype(loss.dtype)])

    traced, _ = _jaxpr.trace(
        backward,
        differentiated,
        fixed,
        _jaxpr.specs(residuals),
        *(outputs if divisors is None else divisors),
    )
    outvars = [*closed.jaxpr.outvars[:count], *residuals]
    program = core.ClosedJaxpr(closed.jaxpr.replace(outvars=outvars), closed.consts)
    reads = core.ClosedJaxpr(closed.jaxpr.replace(outvars=variables), closed.consts)
    return ForwardBackward(program, reads, residuals, traced)


def _all_residuals(
    closed: core.ClosedJaxpr, variables: Sequence[Any], is_weight: Sequence[bool]
) -> list[core.Var]:
    """What the backward reads, but for inputs and what follows from weights alone.

    Args:
      closed: the jaxpr of the forward.
      variables: those that the backward reads.
      is_weight: one bool per input.
    """
    data = _jaxpr.depending_on(closed, [not weight for weight in is_weight])
    stored = data.difference(closed.jaxpr.invars)
    read = [var for var in variables if not isinstance(var, core.Literal)]
    return [var for var in dict.fromkeys(read) if var in stored]
