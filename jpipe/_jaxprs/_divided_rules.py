"""Operations with a derivative of their own, on arrays in pieces: one for each piece.

    y = f(x)       y0 = f(x0)                y1 = f(x1)
    dx = df(x, dy)       dx0 = df(x0, dy0)         dx1 = df(x1, dy1)

JAX holds the rule of such an operation for the shapes that it was called with, not for
those of pieces. So both of its sides are traced, the values and what `jax.vjp` gives;
both are rewritten for pieces; and each piece becomes a `jax.custom_vjp` of the two. Its
backward computes again what the rule stores. If a piece of either side needs several
pieces, the operation stays one.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend import core

from . import _custom_rules, _jaxpr
from ._divided_bodies import DividedBodies, PiecesOf, flat_parts
from ._pieces import AlignedAxis, Pieces, trace_axes_back


def divide_rule(
    eqn: core.JaxprEqn,
    operand_pieces: PiecesOf,
    run_in_pieces: Callable[..., Any],
    *,
    bind: Callable[[Sequence[Any]], list[Any]],
    is_differentiated: Sequence[bool],
) -> DividedBodies | None:
    """Divides an operation with a derivative of its own into one for each piece.

    Args:
      eqn: the equation.
      operand_pieces: index of an operand -> its pieces.
      run_in_pieces: rewrites a jaxpr: see `_piecewise`, which imports this file.
      bind: ``operands -> results`` of the equation as it is.
      is_differentiated: one bool per operand; True if it may have a gradient.

    Returns:
      The operations; ``None`` if it cannot be divided.
    """
    values = _custom_rules.trace_values(eqn)
    computed = run_in_pieces(values, operand_pieces, {}, keeps_pieces=True)
    result_pieces: dict[int, Pieces] = computed.output_pieces
    num_pieces = {len(pieces.sizes) for pieces in result_pieces.values()}
    if len(result_pieces) < len(eqn.outvars) or len(num_pieces) != 1:
        return None
    input_pieces = _find_input_pieces(values.jaxpr, operand_pieces, result_pieces)
    differentiated = [i for i, has_grad in enumerate(is_differentiated) if has_grad]
    if not input_pieces.keys() >= {*differentiated}:
        return None

    num_operands = len(eqn.invars)
    forward = _PieceRule(
        run_in_pieces(values, input_pieces, result_pieces).closed,
        flat_parts(num_operands, input_pieces),
        flat_parts(len(eqn.outvars), result_pieces),
    )
    inexact = [i for i, x in enumerate(values.out_avals) if _jaxpr.is_inexact(x)]
    pullback_pieces = dict(input_pieces)
    for i, result_index in enumerate(inexact, start=num_operands):
        pullback_pieces[i] = result_pieces[result_index]
    grad_pieces = {k: input_pieces[i] for k, i in enumerate(differentiated)}
    pullback = _custom_rules.trace_pullback(eqn, bind, differentiated)
    backward = _PieceRule(
        run_in_pieces(pullback, pullback_pieces, grad_pieces).closed,
        flat_parts(num_operands + len(inexact), pullback_pieces),
        flat_parts(len(differentiated), grad_pieces),
    )
    operations = list[Callable[..., list[Any]]]()
    for index in range(*num_pieces):
        values_of_piece = forward.select(index)
        pullback_of_piece = backward.select(index)
        if values_of_piece is None or pullback_of_piece is None:
            return None
        operations.append(
            _make_operation(values_of_piece, pullback_of_piece, is_differentiated)
        )

    def bind_pieces(operands: Sequence[Any]) -> list[Any]:
        columns = [
            operation(*forward.of_piece(operands, index))
            for index, operation in enumerate(operations)
        ]
        return [x for results in zip(*columns, strict=True) for x in results]

    return DividedBodies(input_pieces, result_pieces, bind_pieces)


def _find_input_pieces(
    jaxpr: core.Jaxpr, operand_pieces: PiecesOf, result_pieces: PiecesOf
) -> dict[int, Pieces]:
    """The pieces of inputs that belong to those of the results.

    They are those from which the results follow; and those of operands that are read
    for the gradient alone.
    """
    axes: dict[core.Var, AlignedAxis] = {}
    for i, pieces in result_pieces.items():
        result = jaxpr.outvars[i]
        if not isinstance(result, core.Literal):
            axes[result] = AlignedAxis(pieces.axis)
    axes = trace_axes_back(jaxpr, axes)
    for i, pieces in operand_pieces.items():
        axes.setdefault(jaxpr.invars[i], AlignedAxis(pieces.axis))
    input_pieces: dict[int, Pieces] = {}
    for i, var in enumerate(jaxpr.invars):
        pieces = result_pieces[0].align(var, axes[var]) if var in axes else None
        if pieces is not None:
            input_pieces[i] = pieces
    return input_pieces


class _PieceRule(NamedTuple):
    """A jaxpr of pieces, as one for each piece.

    Attributes:
      closed: the jaxpr.
      input_parts: the index of the piece that each input is; ``None``: it is whole.
      output_parts: the index of the piece that each result is.
    """

    closed: core.ClosedJaxpr
    input_parts: Sequence[int | None]
    output_parts: Sequence[int | None]

    def of_piece(self, inputs: Sequence[Any], index: int) -> list[Any]:
        """The inputs that are a piece, or whole."""
        pairs = zip(inputs, self.input_parts, strict=True)
        return [array for array, part in pairs if part in (None, index)]

    def select(self, index: int) -> core.ClosedJaxpr | None:
        """The jaxpr of a piece; ``None`` if its results need other pieces."""
        jaxpr = self.closed.jaxpr
        outvars = [
            var
            for var, part in zip(jaxpr.outvars, self.output_parts, strict=True)
            if part == index
        ]
        part = _jaxpr.dce_jaxpr(self.closed, outvars)
        invars = self.of_piece(jaxpr.invars, index)
        used = itertools.compress(jaxpr.invars, _jaxpr.used_inputs(part))
        if not {*used} <= {*invars}:
            return None
        return core.ClosedJaxpr(part.jaxpr.replace(invars=invars), part.consts)


def _make_operation(
    values: core.ClosedJaxpr,
    pullback: core.ClosedJaxpr,
    is_differentiated: Sequence[bool],
) -> Callable[..., list[Any]]:
    """The operation on a piece.

    Args:
      values: ``(*operands) -> results``.
      pullback: ``(*operands, *cotangents of inexact results) -> gradients``.
      is_differentiated: one bool per operand; True if it has a gradient.
    """
    run_values = _jaxpr.as_traced(values)
    run_pullback = _jaxpr.as_traced(pullback)
    operation = jax.custom_vjp(run_values)

    def forward(*operands: Any) -> Any:
        return run_values(*operands), operands

    def backward(operands: Any, cotangents: Any) -> tuple[Any, ...]:
        pairs = zip(cotangents, values.out_avals, strict=True)
        inexact = [x for x, aval in pairs if _jaxpr.is_inexact(aval)]
        grads = iter(run_pullback(*operands, *inexact))
        return tuple(next(grads) if is_one else None for is_one in is_differentiated)

    operation.defvjp(forward, backward)
    return operation
