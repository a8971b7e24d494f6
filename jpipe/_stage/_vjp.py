"""A function split in two programs: a forward and the backward that completes it.

    forward:   inputs                        -> outputs, residuals
    backward:  inputs, residuals, cotangents -> gradients

`jax.vjp` inside `jax.jit` returns what its pullback holds as outputs: fresh copies of
whatever the backward reads, the weights above all, once per micro-batch in flight. Here
that is read off the jaxpr of the forward:

* a value that *is* an input (a weight, the stage's input, a target) is passed to the
  backward again;
* a value that follows from the weights alone (a cast to bfloat16, a broadcast scale) is
  computed again from them;
* all others are stored, or the fewest bytes from which they follow cheaply: these are
  the *residuals*, which the forward returns for the backward.

Forward and backward are different programs, so XLA cannot undo the recomputation by
finding common subexpressions. Where one call runs both, see `RematMode.when_fused`.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import core

from .._jaxprs import _inlining, _jaxpr, _min_cut
from .._partition._remat_mode import RematMode, Stored

Leaves = Sequence[Any]
# f(differentiated, fixed) -> (differentiated outputs, other outputs): flat leaves in,
# flat leaves out. Differentiated outputs have cotangents.
Function = Callable[[Leaves, Leaves], tuple[list[Any], list[Any]]]


class ForwardBackward(NamedTuple):
    """The two halves of one function, as jaxprs over flat leaves.

    Attributes:
      forward: ``(differentiated, fixed) -> (outputs, residuals)``.
      pullback_leaves: the forward with other results, ``(differentiated, fixed) -> all
        that the backward reads``: the leaves of the pullback of `jax.vjp`.
      residual_vars: the residuals, variables of `forward` and `pullback_leaves`, which
        have the same equations.
      backward: ``(differentiated, fixed, residuals, cotangents) -> gradients`` of the
        differentiated leaves. That of a loss takes its divisors in place of cotangents.
    """

    forward: core.ClosedJaxpr
    pullback_leaves: core.ClosedJaxpr
    residual_vars: list[core.Var]
    backward: core.ClosedJaxpr


def split_vjp(
    function: Function,
    differentiated: Leaves,
    fixed: Leaves,
    *,
    is_weight: Sequence[bool],
    is_stored: Sequence[bool],
    mode: RematMode,
    is_loss: bool = False,
    divisors: Leaves = (),
) -> ForwardBackward:
    """Splits a function in a forward and a backward.

    Args:
      function: the function to differentiate.
      differentiated: specs of the leaves that have a gradient.
      fixed: specs of the leaves that have none.
      is_weight: one bool per leaf of both; True for a weight.
      is_stored: one bool per leaf of both; True for a leaf of one micro-batch that is
        stored anyway: targets, keys.
      mode: tells what the backward reads, and which residuals are stored for that.
      is_loss: True if the only output is the loss. Its cotangent is 1, so that its
        backward takes none.
      divisors: specs of what the backward of a loss takes instead: the sum of loss
        weights, by which it divides, or nothing.

    Returns:
      The two halves.
    """
    pullback_trees: list[Any] = []

    def run_forward(differentiated: Leaves, fixed: Leaves) -> Any:
        checkpointed = _checkpoint(function, mode)
        outputs, pullback, other_outputs = jax.vjp(
            lambda leaves: checkpointed(leaves, fixed), differentiated, has_aux=True
        )
        pullback_leaves, pullback_tree = jax.tree.flatten(pullback)
        pullback_trees.append(pullback_tree)
        return outputs, other_outputs, pullback_leaves

    closed, results = _inlining.trace(run_forward, differentiated, fixed)
    outputs, other_outputs, _ = results
    pullback_tree = pullback_trees[-1]
    num_outputs = len(outputs) + len(other_outputs)
    pullback_vars = closed.jaxpr.outvars[num_outputs:]
    if mode.stores is Stored.FEWEST_BYTES:
        residual_vars = _min_cut.find_residuals(
            closed, pullback_vars, is_recomputable=is_weight, is_stored=is_stored
        )
    else:
        residual_vars = _all_residuals(closed, pullback_vars, is_weight)
    recomputation = _jaxpr.recomputation(closed, pullback_vars, residual_vars)
    recompute = _jaxpr.as_traced(recomputation)

    def run_backward(
        differentiated: Leaves, fixed: Leaves, residuals: Leaves, *cotangents: Any
    ) -> Any:
        pullback_leaves = recompute(*differentiated, *fixed, *residuals)
        pullback = jax.tree.unflatten(pullback_tree, pullback_leaves)
        if not is_loss:
            return pullback(list(cotangents))
        (loss,) = outputs
        return pullback([_loss_cotangent(loss.dtype, *cotangents)])

    backward, _ = _inlining.trace(
        run_backward,
        differentiated,
        fixed,
        _jaxpr.specs(residual_vars),
        *(divisors if is_loss else outputs),
    )
    outvars = [*closed.jaxpr.outvars[:num_outputs], *residual_vars]
    return ForwardBackward(
        forward=_with_outvars(closed, outvars),
        pullback_leaves=_with_outvars(closed, pullback_vars),
        residual_vars=residual_vars,
        backward=backward,
    )


def _loss_cotangent(dtype: Any, divisor: Any = None) -> Any:
    if divisor is None:
        return jnp.ones((), dtype)
    return (1 / divisor).astype(dtype)


def _with_outvars(closed: core.ClosedJaxpr, outvars: Sequence[Any]) -> core.ClosedJaxpr:
    return core.ClosedJaxpr(closed.jaxpr.replace(outvars=outvars), closed.consts)


def _all_residuals(
    closed: core.ClosedJaxpr, pullback_vars: Sequence[Any], is_weight: Sequence[bool]
) -> list[core.Var]:
    """The results of equations on the micro-batch that the backward reads.

    Args:
      closed: the jaxpr of the forward.
      pullback_vars: the variables that the backward reads.
      is_weight: one bool per input.
    """
    is_of_microbatch = [not weight for weight in is_weight]
    microbatch_vars = _jaxpr.depending_on(closed, is_of_microbatch)
    computed = microbatch_vars.difference(closed.jaxpr.invars)
    read = [var for var in pullback_vars if not isinstance(var, core.Literal)]
    return [var for var in dict.fromkeys(read) if var in computed]


def _checkpoint(function: Callable[..., Any], mode: RematMode) -> Callable[..., Any]:
    """The function of which `jax.vjp` stores what the policy of a mode says.

    XLA needs no barrier against finding common subexpressions: forward and backward are
    different programs, or `RematMode.when_fused` recomputes nothing.
    """
    policy = mode.policy
    if policy is None:
        return function
    if isinstance(policy, str):
        policy = getattr(jax.checkpoint_policies, policy)
    return jax.checkpoint(function, policy=policy, prevent_cse=False)
