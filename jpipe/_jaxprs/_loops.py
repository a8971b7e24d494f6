"""Loops whose iterations store the fewest bytes for their backward.

    scan(body)  ->  scan(jax.checkpoint(named_body, save_only_these_names(residuals)))

JAX differentiates a `jax.lax.scan` by differentiating its body, and stores the
residuals of each iteration. So the body is differentiated here first, with a name on
the results of each equation; `_min_cut` chooses the residuals among them, and a
checkpoint policy stores these alone.
"""

from collections.abc import Callable, Container, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.extend import core

from . import _jaxpr, _min_cut, _scans
from ._explicit_dtypes import make_jaxpr

# A name that begins so ends with the index of an equation of the body.
_PREFIX = "jpipe residual"
Body = Callable[..., Sequence[Any]]


def keep_fewest(closed: core.ClosedJaxpr) -> core.ClosedJaxpr:
    """The same computation, whose loops store the fewest bytes where differentiated.

    The body of a loop that calls `jax.checkpoint` itself stays as it is.
    """

    def rule(eqn: core.JaxprEqn) -> _jaxpr.Rule | None:
        if eqn.primitive.name != "scan":
            return None
        return lambda operands: _evaluate_scan(eqn, operands)

    if not _jaxpr.contains(closed, "scan"):
        return closed
    return _jaxpr.rewrite(closed, rule)


def _evaluate_scan(eqn: core.JaxprEqn, operands: Sequence[Any]) -> list[Any]:
    """Evaluates a scan, with a body that stores chosen residuals."""
    body: Any = eqn.params["jaxpr"]
    carry_slice = _jaxpr.carry_slice(eqn)
    indices = range(len(operands))
    return _scans.run_scan(
        _with_fewest_residuals(body, carry_slice),
        operands,
        carried=indices[carry_slice],
        along=indices[carry_slice.stop :],
        like=eqn,
    )


def _with_fewest_residuals(body: core.ClosedJaxpr, carry_slice: slice) -> Body:
    """The body of a loop under `jax.checkpoint`, with the fewest bytes for residuals.

    It stays as it is, if it calls `jax.checkpoint` itself, has effects, which would
    come twice, cannot be differentiated, where JAX raises, or computes with complex
    numbers, which no policy of JAX can save. If its backward reads a value without a
    name in its forward, such as residuals of a loop inside, it stores products.
    """
    eqns = body.jaxpr.eqns
    plain_body = core.jaxpr_as_fun(body)
    has_checkpoint = any(eqn.primitive.name in _jaxpr.CHECKPOINTS for eqn in eqns)
    if has_checkpoint or body.effects:
        return plain_body
    try:
        forward = _trace_forward(_with_names(body, range(len(eqns))), body.in_avals)
    except Exception:
        return plain_body
    if any(map(_is_complex, forward.jaxpr.eqns)):
        return plain_body

    # named result in `forward` -> the index of its equation in the body
    eqn_index: dict[core.Var, int] = {}
    for eqn in forward.jaxpr.eqns:
        if eqn.primitive.name == "name" and eqn.params["name"].startswith(_PREFIX):
            (var,) = eqn.outvars
            eqn_index[var] = int(eqn.params["name"].removeprefix(_PREFIX))

    num_inputs = len(body.in_avals)
    carry_indices = range(num_inputs)[carry_slice]
    try:
        residuals = _min_cut.find_residuals(
            forward,
            forward.jaxpr.outvars,
            is_recomputable=[False] * num_inputs,
            # The loop stores constants and the arrays that it goes along as a whole.
            is_stored=[i not in carry_indices for i in range(num_inputs)],
            storable=eqn_index,
        )
    except _min_cut.NoCutError:
        policy = jax.checkpoint_policies.dots_saveable
        return jax.checkpoint(plain_body, policy=policy, prevent_cse=False)
    residual_eqns = {eqn_index[var] for var in residuals}
    policy = jax.checkpoint_policies.save_only_these_names(
        *(f"{_PREFIX}{index}" for index in residual_eqns)
    )
    named_body = _with_names(body, residual_eqns)
    return jax.checkpoint(named_body, policy=policy, prevent_cse=False)


def _with_names(body: core.ClosedJaxpr, eqn_indices: Container[int]) -> Body:
    """The body, with names on the results of some of its equations."""
    index_of = {id(eqn): index for index, eqn in enumerate(body.jaxpr.eqns)}

    def rule(eqn: core.JaxprEqn) -> _jaxpr.Rule | None:
        index = index_of[id(eqn)]
        if index not in eqn_indices:
            return None
        return lambda operands: [
            checkpoint_name(result, f"{_PREFIX}{index}")
            for result in _jaxpr.bind(body.jaxpr, eqn, operands)
        ]

    return lambda *args: _jaxpr.evaluate(body, args, rule)


def _trace_forward(body: Body, avals: Sequence[Any]) -> core.ClosedJaxpr:
    """``(*inputs) -> all that the backward of the body reads``."""

    def forward(*args: Any) -> list[Any]:
        _, pullback = _jaxpr.vjp(body, args)
        return jax.tree.leaves(pullback)

    return make_jaxpr(forward)(*map(_jaxpr.spec, avals))


def _is_complex(eqn: core.JaxprEqn) -> bool:
    specs = [_jaxpr.spec(var.aval) for var in eqn.outvars]
    return any(jnp.issubdtype(spec.dtype, jnp.complexfloating) for spec in specs)
