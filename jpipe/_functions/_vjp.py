"""A function cut in two programs: a forward and the backward that completes it.

`jax.vjp` inside `jax.jit` returns what its pullback holds as outputs: fresh copies of
whatever the backward reads, the weights above all, once per micro-batch in flight. Here
that is read off the jaxpr of the forward:

* what *is* an input (a weight, the stage's input, a target) is passed to the backward
  again;
* what follows from the weights alone (a cast to bfloat16, a broadcast scale) is
  computed again from them;
* the rest are the *residuals*, which the forward returns for the backward.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import core

from .._jaxprs import _jaxpr

Leaves = Sequence[Any]
# f(weights, x, extra) -> (outputs, aux): flat leaves in, flat leaves out. Outputs are
# differentiated, aux is not.
Function = Callable[[Leaves, Leaves, Leaves], tuple[list[Any], list[Any]]]


class Cut(NamedTuple):
    """The two halves of one function, as jaxprs over flat leaves.

    Attributes:
      forward: ``(weights, x, extra) -> (outputs, aux, residuals)``. The backward may
        not read all of these.
      backward: ``(weights, x, extra, residuals, cotangents) -> (weight_grads,
        x_grads)``, of the differentiated leaves only; without cotangents if these are
        ones.
    """

    forward: core.ClosedJaxpr
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
    is_loss: bool,
) -> Cut:
    """Cuts a function in a forward and a backward.

    Args:
      function: what to differentiate.
      weights: specs of the leaves that stay where they are.
      x: specs of the leaves that belong to one micro-batch.
      extra: specs of further leaves of one micro-batch that are at hand for both
        halves and have no gradient: targets, keys.
      wanted: which leaves are differentiated.
      remat: wraps the function, as `jax.checkpoint` does, to say what are residuals.
      is_loss: whether all outputs are scalars whose cotangents are ones.

    Returns:
      The two halves.
    """
    tree: list[Any] = []

    def forward(weights: Leaves, x: Leaves, extra: Leaves) -> Any:
        outputs, pullback, aux = _vjp(function, weights, x, extra, wanted, remat)
        held, structure = jax.tree.flatten(pullback)
        tree.append(structure)
        return outputs, aux, held

    closed, (outputs, aux, held) = _jaxpr.trace(forward, weights, x, extra)
    structure = tree[-1]
    count = len(outputs) + len(aux)
    variables = closed.jaxpr.outvars[count:]
    source = _Sources(closed, variables, len(weights))

    def backward(
        weights: Leaves, x: Leaves, extra: Leaves, residuals: Leaves, *cotangents: Any
    ) -> Any:
        pullback = jax.tree.unflatten(
            structure, source.gather([*weights, *x, *extra], residuals)
        )
        if is_loss:
            cotangents = tuple(jnp.ones((), out.dtype) for out in outputs)
        return pullback(list(cotangents))

    specs = [held[i] for i in source.residuals]
    cotangents = [] if is_loss else outputs
    traced, _ = _jaxpr.trace(backward, weights, x, extra, specs, *cotangents)
    outvars = [
        *closed.jaxpr.outvars[:count],
        *(variables[i] for i in source.residuals),
    ]
    program = core.ClosedJaxpr(closed.jaxpr.replace(outvars=outvars), closed.consts)
    return Cut(program, traced)


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


class _Sources:
    """Where the backward finds what its pullback holds: see the head of this file."""

    def __init__(
        self, closed: core.ClosedJaxpr, variables: Sequence[Any], num_weights: int
    ) -> None:
        invars = closed.jaxpr.invars
        self._input = {var: i for i, var in enumerate(invars)}
        is_data = [i >= num_weights for i in range(len(invars))]
        data = _jaxpr.depending_on(closed, is_data)
        self._variables = list(variables)
        again = [
            var
            for var in self._variables
            if not self._is_input(var)
            and (isinstance(var, core.Literal) or var not in data)
        ]
        # By identity: literals are not hashable. The jaxpr keeps the variables alive.
        self._again = {id(var): i for i, var in enumerate(again)}
        self._recompute = _jaxpr.evaluate(closed, again)
        self.residuals: list[int] = []
        self._place: dict[Any, int] = {}
        for i, var in enumerate(self._variables):
            known = self._is_input(var) or id(var) in self._again
            if not known and var not in self._place:
                self._place[var] = len(self.residuals)
                self.residuals.append(i)

    def _is_input(self, var: Any) -> bool:
        return not isinstance(var, core.Literal) and var in self._input

    def gather(self, inputs: Leaves, residuals: Leaves) -> list[Any]:
        """All of it, given the inputs of the forward and its residuals."""
        recomputed = self._recompute(*inputs)

        def find(var: Any) -> Any:
            if self._is_input(var):
                return inputs[self._input[var]]
            if id(var) in self._again:
                return recomputed[self._again[id(var)]]
            return residuals[self._place[var]]

        return [find(var) for var in self._variables]
