"""Chooses the cuts of a program: at marks, or where it balances and few bytes cross.

A cut is a *gap* between two equations. The index of the one behind it, with which a
stage begins, is the *stage start*. Without marks, the candidates are the gaps that
fewer bytes cross than gaps nearby. Among these an exact dynamic program finds the cuts
whose largest stage is smallest, and of several such cuts the ones that fewest bytes
cross. With C the cost of the equations before each candidate,

    best[s + 1, j] = min over i < j of max(best[s, i], C[j] - C[i])

is the largest cost of a stage if the equations before candidate j are s + 1 stages.
"""

import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from jax.extend import core

from .._jaxprs import _eqn_source, _jaxpr, _min_cut, _work
from .._messages import WarnOnce
from .._trace import _boundaries
from .._trace._layer_scans import find_mixed_layers
from .._trace._traced_function import EqnKind, TracedFunction

# A section of a plan is at least one of so many parts of a stage: so there are at most
# so many times the stages, however many equations a model has.
_SECTIONS_OF_STAGE = 8
# Gaps are neighbours up to this part of a stage apart: by so much a cut may move, and
# stages be uneven, so that fewer bytes cross.
_NEIGHBOURHOOD = 1 / 4
# So much more than an even share of the work is worth a warning. No cut depends on it.
_UNEVEN = 1.25
# An equation of fewer operations takes less than the start of the program that it is
# in: there is nothing to balance. On one core `jax.jit(lambda x: x + 1)(jnp.ones(8))`
# takes 3.7 microseconds, by `timeit`: about so many operations at 1e10 a second.
_LEAST_WORK = 2**15
# Gaps that so much more bytes cross than the best gap nearby are as good: a loss that
# adds a number of each layer, such as an expert's, has one more cross each later gap.
_AS_FEW_BYTES = 1.01


def choose_stage_starts(
    traced: TracedFunction,
    num_stages: int | None,
    *,
    most_stages: int,
    warnings: WarnOnce,
) -> list[int]:
    """Chooses the equations with which the stages but the first begin.

    Args:
      traced: the function that is cut.
      num_stages: the number of stages; ``None``: as many as marks make.
      most_stages: the largest number of stages where there are no marks either.
      warnings: the warnings of the pipeline.

    Returns:
      The indices of these equations.

    Raises:
      ValueError: if the program cannot be cut into so many stages.
    """
    marks = _boundaries.boundary_positions(traced.closed)
    if not marks:
        limit = most_stages if num_stages is None else num_stages
        if limit == 1:
            return []
        gaps = _Gaps.find(traced, limit)
        if num_stages not in (None, gaps.num_stages):
            raise ValueError(_too_many_stages(traced, num_stages, gaps.num_stages))
        return _balance_stages(traced, gaps, warnings)
    if num_stages not in (None, len(marks) + 1):
        advice = ""
        if find_scans(traced, 1 / num_stages):
            advice = (
                ", or leave out jpipe.boundary: beside marks a scan is not divided "
                "between its iterations"
            )
        raise ValueError(
            f"num_stages={num_stages}: jpipe.boundary marks {len(marks)} places, so "
            f"that there are {len(marks) + 1} stages; leave out num_stages{advice}"
        )
    return marks


def find_scans(traced: TracedFunction, least_share: float) -> list[int]:
    """Finds the scans that are at least a share of the work.

    Returns:
      The indices of these equations.
    """
    costs = _stage_costs(traced)
    least_cost = least_share * sum(costs)
    return [
        index
        for index, eqn in enumerate(traced.closed.jaxpr.eqns)
        if eqn.primitive.name == "scan" and costs[index] >= least_cost
    ]


def largest_stage_cost(traced: TracedFunction, stage_starts: Sequence[int]) -> float:
    """The operations of the stage that has most of them."""
    cost_before = [0, *accumulate(_stage_costs(traced))]
    ends = [0, *stage_starts, len(cost_before) - 1]
    return max(
        cost_before[end] - cost_before[begin] for begin, end in itertools.pairwise(ends)
    )


def find_sections(traced: TracedFunction, num_stages: int) -> list[int]:
    """Finds the ends of sections: marks, or else gaps that few bytes cross.

    Between two gaps there is something to compute, at least a part of a stage.
    """
    if marks := _boundaries.boundary_positions(traced.closed):
        return marks
    cost_before = [0, *accumulate(_stage_costs(traced))]
    total_cost = cost_before[-1]
    least_cost = total_cost / num_stages / _SECTIONS_OF_STAGE
    section_starts = [0]
    candidates = _find_candidates(
        traced,
        crossing=crossing_bytes(traced),
        cost_before=cost_before,
        num_stages=num_stages,
    )
    for index in candidates:
        cost_of_section = cost_before[index] - cost_before[section_starts[-1]]
        cost_after = total_cost - cost_before[index]
        if cost_of_section >= least_cost and cost_after >= least_cost:
            section_starts.append(index)
    return section_starts[1:]


def crossing_bytes(traced: TracedFunction) -> list[int]:
    """The bytes that cross each gap: made by stages before it, read behind it.

    Returns:
      One number per equation, for the gap before it, and one for the end.
    """
    eqns = traced.closed.jaxpr.eqns
    producer: dict[core.Var, int] = {}  # variable -> the stage equation that makes it
    last_reader: dict[core.Var, int] = {}  # variable -> the last equation that reads it
    for index, (eqn, eqn_kind) in enumerate(zip(eqns, traced.eqn_kinds, strict=True)):
        for var in _jaxpr.variables(eqn.invars):
            if var in producer:
                last_reader[var] = index
        if eqn_kind == EqnKind.STAGE:
            producer.update(dict.fromkeys(eqn.outvars, index))

    change = [0] * (len(eqns) + 2)
    for var, reader in last_reader.items():
        change[producer[var] + 1] += _min_cut.nbytes(var)
        change[reader + 1] -= _min_cut.nbytes(var)
    return [*accumulate(change)][: len(eqns) + 1]


@dataclass(frozen=True)
class _StageDivision:
    """Stages of the equations before some gap.

    Attributes:
      largest_cost: the cost of the most expensive stage.
      num_bytes: the bytes that cross the cuts.
      stage_starts: the index of the first equation of each stage but the first.
    """

    largest_cost: float
    num_bytes: int = 0
    stage_starts: tuple[int, ...] = ()

    @property
    def key(self) -> tuple[float, int, tuple[int, ...]]:
        """The order of preference: balance, then bytes, then the earliest cuts."""
        return self.largest_cost, self.num_bytes, self.stage_starts

    def with_last_stage(
        self, start: int, cost: float, num_bytes: int
    ) -> "_StageDivision":
        """The same stages, and one more behind them from an equation on."""
        return _StageDivision(
            largest_cost=max(self.largest_cost, cost),
            num_bytes=self.num_bytes + num_bytes,
            stage_starts=(*self.stage_starts, start),
        )


_IMPOSSIBLE = _StageDivision(largest_cost=np.inf)


@dataclass(frozen=True)
class _Gaps:
    """The gaps among which the cuts of a program are chosen.

    Attributes:
      num_stages: the number of stages.
      candidates: the gaps that may be cuts, at least as many as there are cuts.
      crossing: the bytes that cross each gap of the program.
    """

    num_stages: int
    candidates: Sequence[int]
    crossing: Sequence[int]

    @classmethod
    def find(cls, traced: TracedFunction, most_stages: int) -> "_Gaps":
        """The gaps for a number of stages, or for as many fewer as there have to be.

        Fewer stages are larger, so that gaps are compared with more of their
        neighbours, and fewer of them are candidates.
        """
        crossing = crossing_bytes(traced)
        cost_before = [0, *accumulate(_stage_costs(traced))]
        num_stages = most_stages
        while True:
            candidates = _find_candidates(
                traced,
                crossing=crossing,
                cost_before=cost_before,
                num_stages=num_stages,
            )
            if len(candidates) + 1 >= num_stages:
                return cls(num_stages, candidates, crossing)
            num_stages = len(candidates) + 1


def _balance_stages(
    traced: TracedFunction, gaps: _Gaps, warnings: WarnOnce
) -> list[int]:
    """The starts of the stages whose largest one is smallest: see the head."""
    costs = _stage_costs(traced)
    cost_before = [0, *accumulate(costs)]
    ends = [*gaps.candidates, len(costs)]
    # best[j]: the best division of the equations before ends[j], at first as one stage
    best = [_StageDivision(largest_cost=cost_before[end]) for end in ends]
    for _ in range(1, gaps.num_stages):
        best_with_one_more = list[_StageDivision]()
        for j, end in enumerate(ends):
            divisions = list[_StageDivision]()
            for i, begin in enumerate(ends[:j]):
                divisions.append(
                    best[i].with_last_stage(
                        start=begin,
                        cost=cost_before[end] - cost_before[begin],
                        num_bytes=gaps.crossing[begin],
                    )
                )
            best_with_one_more.append(
                min(divisions, key=lambda division: division.key, default=_IMPOSSIBLE)
            )
        best = best_with_one_more

    stage_starts = list(best[-1].stage_starts)
    _warn_of_large_equation(traced, costs, stage_starts, warnings)
    return stage_starts


def _stage_costs(traced: TracedFunction) -> list[float]:
    """The operations that each equation adds to a stage: none if it is in all."""
    pairs = zip(traced.closed.jaxpr.eqns, traced.eqn_kinds, strict=True)
    return [
        _work.estimate_eqn_work(eqn) if eqn_kind == EqnKind.STAGE else 0
        for eqn, eqn_kind in pairs
    ]


def _find_candidates(
    traced: TracedFunction,
    *,
    crossing: Sequence[int],
    cost_before: Sequence[float],
    num_stages: int,
) -> list[int]:
    """The gaps that no more bytes cross than their neighbours.

    Of neighbours that are equal the first is taken, right behind the equation that
    makes the value that crosses: so equal blocks are cut alike. Around a large call,
    such as a loop over time, gaps are too far apart to be neighbours. Around a
    piece of a scan they are not compared either: results of all its layers may cross,
    so that each gap between two pieces is crossed by more bytes than the one before.

    Args:
      traced: the function that is cut.
      crossing: the bytes that cross each gap.
      cost_before: the cost of the equations before each gap.
      num_stages: the number of stages.
    """
    eqns = traced.closed.jaxpr.eqns
    kinds = traced.eqn_kinds
    of_stages = [i for i, eqn_kind in enumerate(kinds) if eqn_kind == EqnKind.STAGE]
    if not of_stages:
        return []
    first = of_stages[0] + 1
    last = of_stages[-1]
    reach = _NEIGHBOURHOOD * cost_before[-1] / num_stages
    scans = [i for i, eqn in enumerate(eqns) if _is_piece(traced, eqn)]

    candidates: list[int] = []
    for index in range(first, last + 1):
        if kinds[index - 1] != EqnKind.STAGE:
            continue
        begin = max(bisect_left(cost_before, cost_before[index] - reach), first)
        end = min(bisect_right(cost_before, cost_before[index] + reach), last + 1)
        next_scan = bisect_left(scans, index)
        if next_scan > 0:
            begin = max(begin, scans[next_scan - 1] + 1)
        if next_scan < len(scans):
            end = min(end, scans[next_scan] + 1)
        nearby = crossing[begin:end] if begin < end else [crossing[index]]
        if crossing[index] > _AS_FEW_BYTES * min(nearby):
            continue
        follows_equal = (
            candidates[-1:] == [index - 1] and crossing[index] == crossing[index - 1]
        )
        cost_of_eqn = cost_before[index] - cost_before[index - 1]
        is_behind_call = _is_piece(traced, eqns[index - 1]) or (
            bool(_jaxpr.bodies(eqns[index - 1])) and cost_of_eqn > reach
        )
        if is_behind_call or not follows_equal:
            candidates.append(index)
    return candidates


def _is_piece(traced: TracedFunction, eqn: core.JaxprEqn) -> bool:
    """True if an equation may be a piece of a scan over layers.

    A scan over time goes along arrays of the batch alone.
    """
    if not traced.has_pieces or eqn.primitive.name != "scan":
        return False
    xs = _jaxpr.variables(eqn.invars[_jaxpr.carry_slice(eqn).stop :])
    return not xs <= traced.vars_of_batch


def _too_many_stages(traced: TracedFunction, num_stages: int, most_stages: int) -> str:
    """The error of a program that has too few gaps for so many stages.

    It names a loop or a call of more than an even share, in which there is no gap.

    Args:
      traced: the function that is cut.
      num_stages: the number of stages that was typed.
      most_stages: the largest number that is possible.
    """
    costs = _stage_costs(traced)
    costs_of_calls = [
        (eqn, cost)
        for eqn, cost in zip(traced.closed.jaxpr.eqns, costs, strict=True)
        if _jaxpr.inner_jaxprs(eqn) and not _is_piece(traced, eqn)
    ]
    total_cost = sum(costs)
    eqn, cost = max(costs_of_calls, key=lambda pair: pair[1], default=(None, 0))
    reason = "; "
    if eqn is not None and cost * num_stages > total_cost:
        reason = (
            f": one operation, {_eqn_source.describe_eqn(eqn)} is "
            f"{cost / total_cost:.0%} of the work and cannot be divided"
            f"{_explain_indivisible(traced, eqn)}"
        )
    return (
        f"num_stages={num_stages}: the program can be divided in {most_stages} at "
        f"most{reason}type num_stages={most_stages}"
    )


def _explain_indivisible(traced: TracedFunction, eqn: core.JaxprEqn) -> str:
    """The reason why an equation is in one stage, and what to type instead."""
    # A scan of length 1 is one layer.
    name = eqn.primitive.name
    is_loop = name == "while" or (name == "scan" and eqn.params["length"] > 1)
    loop = "write the loop in Python, or " if is_loop else ""
    mixing_eqn = find_mixed_layers(traced, eqn) if name == "scan" else None
    if mixing_eqn is None:
        return f"; {loop}"
    advice = "scan along the parameter itself"
    if mixing_eqn.primitive.name == "rev":
        advice += ", with reverse=True"
    return (
        f", since {_eqn_source.describe_eqn(mixing_eqn)} moves or "
        f"mixes the layers before; {advice}, {loop}"
    )


def _warn_of_large_equation(
    traced: TracedFunction,
    costs: Sequence[float],
    stage_starts: Sequence[int],
    warnings: WarnOnce,
) -> None:
    """Warns of one equation because of which a stage has more than its share."""
    ends = [0, *stage_starts, len(costs)]
    stages = [range(begin, end) for begin, end in itertools.pairwise(ends)]
    stage_costs = [sum(costs[stage.start : stage.stop]) for stage in stages]
    fullest = max(range(len(stages)), key=stage_costs.__getitem__)
    largest = max(stages[fullest], key=costs.__getitem__)
    share = stage_costs[fullest] / max(sum(stage_costs), 1)

    is_uneven = share * len(stages) > _UNEVEN
    is_because_of_one = costs[largest] > stage_costs[fullest] / 2
    if not is_uneven or not is_because_of_one or costs[largest] < _LEAST_WORK:
        return

    eqn = traced.closed.jaxpr.eqns[largest]
    if _is_piece(traced, eqn):
        return  # there is no smaller one
    fewer_stages = max(int(_UNEVEN / share), 1)
    warnings(
        "balance",
        f"stage {fullest} has {share:.0%} of the estimated work, where "
        f"an even share of {len(stages)} stages is {1 / len(stages):.0%}: one "
        f"operation, {_eqn_source.describe_eqn(eqn)} is "
        f"{costs[largest] / max(sum(stage_costs), 1):.0%} and cannot be divided"
        f"{_explain_indivisible(traced, eqn)}take fewer stages: "
        f"num_stages={fewer_stages}",
    )
