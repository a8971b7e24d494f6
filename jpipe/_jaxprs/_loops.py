"""Loops whose iterations store the fewest bytes for their backward.

What a `jax.lax.scan` hands from its forward to its backward is decided where JAX
differentiates it, iteration by iteration. So its body is given to `jax.checkpoint`,
with a name on each value that may be a residual.
"""

from collections.abc import Callable, Container, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.extend import core

from . import _jaxpr, _min_cut

_RESIDUAL = "jpipe residual"
Body = Callable[..., Sequence[Any]]


def keep_fewest(closed: core.ClosedJaxpr) -> core.ClosedJaxpr:
    """The same computation, whose loops store the fewest bytes where differentiated.

    The body of a loop that calls `jax.checkpoint` itself stays as it is.
    """

    def rule(eqn: core.JaxprEqn) -> _jaxpr.Rule | None:
        if eqn.primitive.name != "scan":
            return None
        return lambda operands: _scan(eqn, operands)

    if not _jaxpr.contains(closed, "scan"):
        return closed
    return _jaxpr.rewrite(closed, rule)


def _scan(eqn: core.JaxprEqn, operands: Sequence[Any]) -> list[Any]:
    """A loop along arrays, with a body that stores what is chosen."""
    params: Any = eqn.params
    carried = _jaxpr.carry_slice(eqn)
    body = _keeping(params["jaxpr"], carried)
    count = carried.stop - carried.start
    consts, xs = list(operands[: carried.start]), list(operands[carried.stop :])

    def step(carry: Sequence[Any], x: Sequence[Any]) -> Any:
        results = body(*consts, *carry, *x)
        return results[:count], results[count:]

    carry, ys = jax.lax.scan(
        step,
        list(operands[carried]),
        xs,
        params["length"],
        params["reverse"],
        params["unroll"],
    )
    return [*carry, *ys]


def _keeping(body: core.ClosedJaxpr, carried: slice) -> Body:
    """The body of a loop under `jax.checkpoint`, with the fewest bytes for residuals.

    As it is, if it calls `jax.checkpoint` itself, has effects, which would come twice,
    cannot be differentiated, where JAX raises, or computes with complex numbers, which
    no policy of JAX can save. If its backward reads what has no name in its forward,
    such as residuals of a loop inside, it stores products.
    """
    eqns = body.jaxpr.eqns
    plain = core.jaxpr_as_fun(body)
    has_checkpoint = any(eqn.primitive.name in _jaxpr.CHECKPOINTS for eqn in eqns)
    if has_checkpoint or body.effects:
        return plain
    named = _named(body, range(len(eqns)))
    try:
        differentiated = _differentiated(named, body.in_avals)
    except Exception:
        return plain
    if any(map(_is_complex, differentiated.jaxpr.eqns)):
        return plain
    numbers = {
        var: int(eqn.params["name"].removeprefix(_RESIDUAL))
        for eqn in differentiated.jaxpr.eqns
        if eqn.primitive.name == "name" and eqn.params["name"].startswith(_RESIDUAL)
        for var in eqn.outvars
    }
    count = len(body.in_avals)
    # What it goes along, and what is the same each time, it has as a whole.
    stored = [i not in range(count)[carried] for i in range(count)]
    try:
        residuals = _min_cut.find_residuals(
            differentiated,
            differentiated.jaxpr.outvars,
            [False] * count,
            stored,
            numbers,
        )
    except _min_cut.NoCutError:
        policy = jax.checkpoint_policies.dots_saveable
        return jax.checkpoint(plain, policy=policy, prevent_cse=False)
    chosen = {numbers[var] for var in residuals}
    policy = jax.checkpoint_policies.save_only_these_names(
        *(f"{_RESIDUAL}{number}" for number in chosen)
    )
    return jax.checkpoint(_named(body, chosen), policy=policy, prevent_cse=False)


def _named(body: core.ClosedJaxpr, numbers: Container[int]) -> Body:
    """The body, with names on the results of some of its equations."""
    number = {id(eqn): i for i, eqn in enumerate(body.jaxpr.eqns)}

    def rule(eqn: core.JaxprEqn) -> _jaxpr.Rule | None:
        i = number[id(eqn)]
        if i not in numbers:
            return None
        return lambda operands: [
            checkpoint_name(made, f"{_RESIDUAL}{i}")
            for made in _jaxpr.bind(body.jaxpr, eqn, operands)
        ]

    return lambda *args: _jaxpr.evaluate(body, args, rule)


def _differentiated(body: Body, avals: Sequence[Any]) -> core.ClosedJaxpr:
    """What the forward of a body gives to its backward."""

    def forward(*args: Any) -> list[Any]:
        _, pullback = _jaxpr.vjp(body, args)
        return jax.tree.leaves(pullback)

    return jax.make_jaxpr(forward)(*map(_jaxpr.spec, avals))


def _is_complex(eqn: core.JaxprEqn) -> bool:
    specs = [_jaxpr.spec(var.aval) for var in eqn.outvars]
    return any(jnp.issubdtype(spec.dtype, jnp.complexfloating) for spec in specs)
