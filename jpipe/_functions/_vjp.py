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

from .._jaxprs import _cheapest, _jaxpr

Leaves = Sequence[Any]
# f(weights, x, extra) -> (outputs, aux): flat leaves in, flat leaves out. Outputs are
# differentiated, aux is not.
Function = Callable[[Leaves, Leaves, Leaves], tuple[list[Any], list[Any]]]


class Cut(NamedTuple):
    """The two halves of one function, as jaxprs over flat leaves.

    Attributes:
      forward: ``(weights, x, extra) -> (outputs, aux, residuals)``. The backward may
        not read all of these.
      reads: the same computation, ``(weights, x, extra) -> what the backward reads``.
      residuals: the variables of both that the forward returns for the backward.
      backward: ``(weights, x, extra, residuals, cotangents) -> (weight_grads,
        x_grads)``, of the differentiated leaves only; of a loss with what it is
        divided by in place of cotangents.
    """

    forward: core.ClosedJaxpr
    reads: core.ClosedJaxpr
    residuals: list[core.Var]
    backward: core.ClosedJaxpr


class Differentiable(NamedTuple):
    """Which leaves of the weights and of x are differentiated."""

    weights: tuple[bool, ...]
    x: tuple[bool, ...]


def cut(
    function: Function,
    weights: Leaves,
    x: Leaves,
    extra: Leaves,
    wanted: Differentiable,
    remat: Callable[[Callable[..., Any]], Callable[..., Any]],
    fewest: bool,
    divisors: Leaves | None = None,
) -> Cut:
    """Cuts a function in a forward and a backward.

    Args:
      function: what to differentiate.
      weights: specs of the leaves that stay where they are.
      x: specs of the leaves that belong to one micro-batch.
      extra: specs of further leaves of one micro-batch that are at hand for both
        halves and have no gradient: targets, keys.
      wanted: which leaves are differentiated.
      remat: wraps the function, as `jax.checkpoint` does, to decide what the backward
        reads.
      fewest: whether of that only the fewest bytes are residuals.
      divisors: of a loss, the only output, specs of what it is divided by, if it is;
        ``None``: the cotangents of the outputs are given.

    Returns:
      The two halves.
    """
    tree: list[Any] = []

    def forward(weights: Leaves, x: Leaves, extra: Leaves) -> Any:
        outputs, pullback, aux = _vjp(function, weights, x, extra, wanted, remat)
        stored, structure = jax.tree.flatten(pullback)
        tree.append(structure)
        return outputs, aux, stored

    closed, (outputs, aux, _) = _jaxpr.trace(forward, weights, x, extra)
    structure = tree[-1]
    count = len(outputs) + len(aux)
    variables = closed.jaxpr.outvars[count:]
    sizes = len(weights), len(x), len(extra)
    residuals = _residuals(closed, variables, sizes, fewest)
    again = _jaxpr.as_traced(_jaxpr.rest(closed, variables, residuals))

    def backward(
        weights: Leaves, x: Leaves, extra: Leaves, residuals: Leaves, *cotangents: Any
    ) -> Any:
        stored = again(*weights, *x, *extra, *residuals)
        pullback = jax.tree.unflatten(structure, stored)
        if divisors is not None:
            one = [jnp.ones((), out.dtype) for out in outputs]
            by = [(1 / x).astype(outputs[0].dtype) for x in cotangents]
            return pullback(by or one)
        return pullback(list(cotangents))

    specs = [_jaxpr.spec(var.aval) for var in residuals]
    given = outputs if divisors is None else divisors
    traced, _ = _jaxpr.trace(backward, weights, x, extra, specs, *given)
    outvars = [*closed.jaxpr.outvars[:count], *residuals]
    program = core.ClosedJaxpr(closed.jaxpr.replace(outvars=outvars), closed.consts)
    reads = core.ClosedJaxpr(closed.jaxpr.replace(outvars=variables), closed.consts)
    return Cut(program, reads, residuals, traced)


def _vjp(
    function: Function,
    weights: Leaves,
    x: Leaves,
    extra: Leaves,
    wanted: Differentiable,
    remat: Callable[[Callable[..., Any]], Callable[..., Any]],
) -> Any:
    free_weights, fixed_weights = _separate(weights, wanted.weights)
    free_x, fixed_x = _separate(x, wanted.x)

    def of_the_free(free_weights, free_x, fixed_weights, fixed_x, extra):
        return function(
            _join(free_weights, fixed_weights, wanted.weights),
            _join(free_x, fixed_x, wanted.x),
            extra,
        )

    wrapped = remat(of_the_free)
    return jax.vjp(
        lambda w, x: wrapped(w, x, fixed_weights, fixed_x, extra),
        free_weights,
        free_x,
        has_aux=True,
    )


def _separate(leaves: Leaves, chosen: Sequence[bool]) -> tuple[list[Any], list[Any]]:
    pairs = list(zip(leaves, chosen, strict=True))
    return [x for x, yes in pairs if yes], [x for x, yes in pairs if not yes]


def _join(free: Leaves, fixed: Leaves, chosen: Sequence[bool]) -> list[Any]:
    some, others = iter(free), iter(fixed)
    return [next(some) if yes else next(others) for yes in chosen]


def _residuals(
    closed: core.ClosedJaxpr,
    variables: Sequence[Any],
    sizes: tuple[int, int, int],
    fewest: bool,
) -> list[core.Var]:
    """What the forward returns for the backward: see the head of this file.

    Args:
      closed: the jaxpr of the forward.
      variables: those that the backward reads.
      sizes: how many of its inputs are weights, x, and extra.
      fewest: whether to look for the fewest bytes.
    """
    constant = [i == 0 for i, size in enumerate(sizes) for _ in range(size)]
    if fewest:
        stored = [i == 2 for i, size in enumerate(sizes) for _ in range(size)]
        return _cheapest.cheapest(closed, variables, constant, stored)
    data = _jaxpr.depending_on(closed, [not yes for yes in constant])
    stored = data.difference(closed.jaxpr.invars)
    read = [var for var in variables if not isinstance(var, core.Literal)]
    return [var for var in dict.fromkeys(read) if var in stored]
