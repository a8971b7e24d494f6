"""A computation on arrays in pieces, such as the stacked parameters of layers.

    x = concatenate([x0, x1, x2], axis)

A *concatenation* is this equation, not done yet. Each rule below is an equality, by
which it passes through an equation of a jaxpr:

    scan(f, c, concatenate([x0, x1]))   = scan(f, scan(f, c, x0), x1)
    f(concatenate([x0, x1]))            = concatenate([f(x0), f(x1)])
    sum(concatenate([x0, x1]), axis)    = sum(x0, axis) + sum(x1, axis)
    concatenate([x0, x1]) @ concatenate([y0, y1])       = x0 @ y0 + x1 @ y1
    concatenate([x0, x1])[i]            = x1[i - len(x0)]
    cond(p, f, g, concatenate([x0, x1]))
                        = concatenate([cond(p, f, g, x0), cond(p, f, g, x1)])

The second one is for an `f` that keeps the axis, such as one element by element: see
`_axis_maps`. The last one is for branches, and for bodies of loops, that do: see
`_divided_bodies`.

Where there is no rule the concatenation is done, and if it is of inputs, reported: no
device may have room for all of a stack. Results may be wanted in pieces too, and so may
be what scans go along. Then what makes them runs in pieces, so that a device makes no
more than it keeps:

    slice(broadcast(c, shape))      = broadcast(c, shape of the slice)
    slice(stack([a, b, c]))         = stack([b, c])
    slice(ys of a scan)             = ys of one scan of the row

All is evaluated under a new trace. Sums over pieces are added in another order than in
one reduction; nothing else differs.
"""

import itertools
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import core

from . import _jaxpr
from ._concatenation import Concatenation
from ._explicit_dtypes import make_jaxpr
from ._piece_evaluation import PieceEvaluation, WholeRead
from ._piece_slices import PieceSlices
from ._pieces import Pieces, find_target_pieces


class PiecewiseJaxpr(NamedTuple):
    """A jaxpr of pieces, computed from one of whole arrays.

    Attributes:
      closed: ``(*inputs, *starts) -> results``. Each input, or result, in pieces is as
        many as it has pieces.
      starts: the last inputs, where pieces of arrays begin that are cut here: so that
        computations on equal pieces are equal.
      output_pieces: index of a result -> its pieces, if it is in pieces.
      whole_reads: the inputs in pieces that are read as one array.
    """

    closed: core.ClosedJaxpr
    starts: list[int]
    output_pieces: dict[int, Pieces]
    whole_reads: list[WholeRead]


def run_in_pieces(
    closed: core.ClosedJaxpr,
    input_pieces: Mapping[int, Pieces],
    output_pieces: Mapping[int, Pieces | None],
    *,
    targets: Mapping[core.Var, Pieces] = MappingProxyType({}),
    keeps_pieces: bool = False,
    num_fixed: int | None = None,
) -> PiecewiseJaxpr:
    """Rewrites a jaxpr for inputs and results that are in pieces.

    Args:
      closed: the jaxpr.
      input_pieces: index of an input -> its pieces.
      output_pieces: index of a result -> its pieces; ``None`` if it is whole.
      targets: variable -> the pieces in which it is made, if it can be.
      keeps_pieces: True if all other results come in the pieces in which they are
        computed; False if they are put together.
      num_fixed: the number of first inputs that are parameters; the others are those
        of the batch. What follows from parameters alone, as a penalty does, is cut at
        constants: ``starts`` come with the batch. ``None``: all is cut at constants.
    """
    jaxpr = closed.jaxpr
    fixed_vars = _jaxpr.descendants(jaxpr, jaxpr.invars[:num_fixed])
    batch_vars = _jaxpr.descendants(jaxpr, jaxpr.invars[num_fixed:])
    target_pieces = find_target_pieces(jaxpr, output_pieces, targets)
    starts = list[int]()
    if num_fixed is not None:
        all_pieces = [*input_pieces.values(), *target_pieces.values()]
        starts = sorted({start for pieces in all_pieces for start in pieces.starts})
    whole_reads = list[WholeRead]()
    results_in_pieces: dict[int, Pieces] = {}

    input_specs = list[jax.ShapeDtypeStruct]()
    for i, var in enumerate(jaxpr.invars):
        spec = _jaxpr.spec(var.aval)
        pieces = input_pieces.get(i)
        input_specs += [spec] if pieces is None else pieces.specs(spec)
    start_specs = [jax.ShapeDtypeStruct((), jnp.int32)] * len(starts)

    def run(*args: jax.Array) -> list[jax.Array]:
        arrays = iter(args[: len(input_specs)])
        start_args = dict(zip(starts, args[len(input_specs) :], strict=True))
        values: dict[core.Var, Any] = dict(
            zip(jaxpr.constvars, closed.consts, strict=True)
        )
        for i, var in enumerate(jaxpr.invars):
            if (pieces := input_pieces.get(i)) is None:
                values[var] = next(arrays)
            else:
                parts = list(itertools.islice(arrays, len(pieces.sizes)))
                values[var] = Concatenation(parts, pieces.axis, frozenset([i]))

        evaluation = PieceEvaluation(
            closed,
            values,
            target_pieces=target_pieces,
            slices=PieceSlices(fixed_vars, batch_vars, start_args),
            run_in_pieces=run_in_pieces,
        )
        evaluation.run()
        results = list[jax.Array]()
        for i, atom in enumerate(jaxpr.outvars):
            pieces = output_pieces.get(i)
            if i not in output_pieces and keeps_pieces:
                pieces = evaluation.pieces_of(atom)
            if pieces is None:
                results.append(evaluation.whole(evaluation.read(atom), eqn=None))
            else:
                results_in_pieces[i] = pieces
                results += evaluation.cut(atom, pieces)
        whole_reads.extend(evaluation.whole_reads)
        return results

    new_closed = make_jaxpr(run)(*input_specs, *start_specs)
    return PiecewiseJaxpr(
        closed=new_closed,
        starts=starts,
        output_pieces=results_in_pieces,
        whole_reads=whole_reads,
    )
