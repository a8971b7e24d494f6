"""What the actions of a schedule cost: time, transfers, bytes."""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, NamedTuple

from ._action import INPUT, OPS, Action

# One number for all stages, one per stage, or one per stage and micro-batch.
Numbers = Any
_PLAIN = (int, float)

_OF_ALL = ("latency", "bandwidth")
_OF_STAGES = ("parameter_bytes", "accumulator_bytes", "shared_bytes", "exchange")
_TIMES = ("forward", "backward", "input_grad", "weight_grad")
# The field with the time of each op.
FIELDS: dict[str, str] = dict(zip(OPS, _TIMES, strict=True))
_CHUNKED = (
    *_TIMES,
    "residual_bytes",
    "pending_bytes",
    "parameter_bytes",
    "accumulator_bytes",
    "exchange",
)


class Skip(NamedTuple):
    """What goes from one stage straight to a later one.

    Attributes:
      source: the stage that sends it.
      target: the stage that waits for it; its gradient goes the other way.
      bytes: of one micro-batch; one number, or one for each.
      cotangent_bytes: of its gradient, likewise.
    """

    source: int
    target: int
    bytes: Numbers
    cotangent_bytes: Numbers


@dataclass(frozen=True)
class Costs:
    """What one action costs, in time and in memory.

    Every field but ``latency`` and ``bandwidth`` is one number for all stages, a
    sequence with one per stage, or a sequence of sequences with one per stage and
    micro-batch; of ``parameter_bytes``, ``accumulator_bytes``, ``shared_bytes`` and
    ``exchange`` micro-batches have none of their own. By default times are in units of
    a forward and bytes in units of what a stage stores of one micro-batch.

    Attributes:
      forward: time of F, in any unit; seconds where bandwidth is bytes per second.
      backward: time of B, recomputation included.
      input_grad: time of I; default: half of ``backward``.
      weight_grad: time of W; default: the rest of ``backward``.
      latency: time that a transfer between two ranks takes whatever its size.
      bandwidth: bytes per unit of time between two ranks.
      boundary_bytes: the input of a stage, of one micro-batch.
      cotangent_bytes: the gradient of that input; default: ``boundary_bytes``.
      residual_bytes: what a stage holds of one micro-batch between F and B, its input
        included where it is stored.
      pending_bytes: what it holds between I and W.
      parameter_bytes: its parameters, and all else that stays.
      accumulator_bytes: its sums of gradients.
      extra_bytes: what one micro-batch brings to it besides the input, such as targets.
      shared_bytes: what all micro-batches bring to it together, such as keys.
      emitted_bytes: what one forward of it leaves until the end of the step.
      skips: the long skip connections.
      exchange: time in which the ranks that share a stage add up its gradients, once
        all of them are there.
      in_seconds: whether times are seconds and sizes bytes, as measured ones are, and
        printed and drawn as such; else they are in units of their own.

    Example:
      >>> Costs(forward=[1.0, 1.5], backward=3.0).of(Action("I", 1, 0))
      1.5
    """

    forward: Numbers = 1.0
    backward: Numbers = 2.0
    input_grad: Numbers | None = None
    weight_grad: Numbers | None = None
    latency: float = 0.0
    bandwidth: float = math.inf
    boundary_bytes: Numbers = 0
    cotangent_bytes: Numbers | None = None
    residual_bytes: Numbers = 1
    pending_bytes: Numbers = 1
    parameter_bytes: Numbers = 0
    accumulator_bytes: Numbers = 0
    extra_bytes: Numbers = 0
    shared_bytes: Numbers = 0
    emitted_bytes: Numbers = 0
    skips: "tuple[Skip, ...]" = ()
    exchange: Numbers = 0.0
    in_seconds: bool = False

    def of(self, action: Action) -> float:
        """The time of one action."""
        op, *where = action
        given = getattr(self, FIELDS[op])
        if given is not None:
            return at(given, *where)
        backward = at(self.backward, *where)
        if op == INPUT:
            return backward / 2
        return max(backward - self.of(action._replace(op=INPUT)), 0.0)

    @property
    def is_uniform(self) -> bool:
        """Whether all micro-batches cost the same."""
        listed = [value for _, value in self._listed]
        of_stages = [x for value in listed for x in value]
        of_skips = [x for s in self.skips for x in (s.bytes, s.cotangent_bytes)]
        return not any(isinstance(x, Sequence) for x in of_stages + of_skips)

    def links(self, num_stages: int) -> list[Skip]:
        """All that goes from stage to stage: from each to the next, and the skips."""
        neighbours = (
            Skip(s - 1, s, at(self.boundary_bytes, s), self.cotangent(s))
            for s in range(1, num_stages)
        )
        return [*neighbours, *self.skips]

    def cotangent(self, *where: int) -> Numbers:
        """The bytes of the gradient of the input of a stage, and of a micro-batch."""
        given = self.cotangent_bytes
        return at(self.boundary_bytes if given is None else given, *where)

    @property
    def _listed(self) -> list[tuple[str, Sequence[Any]]]:
        """The fields that are given by stages, by name."""
        fields = vars(self).items()
        return [(n, v) for n, v in fields if n != "skips" and isinstance(v, Sequence)]

    @property
    def num_stages(self) -> int | None:
        """For how many stages costs are given; ``None`` if one number serves all.

        Raises:
          ValueError: if the fields disagree.
        """
        given = {name: len(value) for name, value in self._listed}
        if len(set(given.values())) > 1:
            listed = ", ".join(f"{name}: {count}" for name, count in given.items())
            raise ValueError(f"costs are for different numbers of stages: {listed}")
        return next(iter(given.values()), None)

    def per_chunk(self, num_chunks: float) -> "Costs":
        """The costs of one of the equal chunks that a rank's layers are cut in.

        Args:
          num_chunks: how many stages each rank runs; less than one where ranks share a
            stage.

        Returns:
          Times, residuals, parameters and their sums of gradients divided by it; a
          boundary is as large as before.

        Raises:
          ValueError: if the costs are given per stage, so that they fit one number of
            stages only.
        """
        if num_chunks == 1:
            return self
        if listed := [name for name, value in self._listed if value]:
            raise ValueError(
                f"costs per stage ({', '.join(listed)}) do not give what the stages of "
                f"a schedule with {num_chunks} stages per rank cost: give one number "
                f"per field, for the layers of one rank"
            )
        whole = {name: getattr(self, name) for name in _CHUNKED}
        parts = {n: v / num_chunks for n, v in whole.items() if v is not None}
        return dataclasses.replace(self, **parts)


def at(value: Numbers, *where: int) -> float:
    """The number for a stage and a micro-batch, from what a field was given."""
    for index in where:
        # Most are plain numbers, which takes a tenth of the time to find out.
        if value.__class__ in _PLAIN or not isinstance(value, Sequence):
            return value
        value = value[index]
    return value


def faults_of(
    costs: Costs, num_microbatches: int, num_stages: int | None = None
) -> list[str]:
    """What is no cost: numbers below 0 or not finite, too few, of other stages.

    Args:
      costs: what is looked at.
      num_microbatches: for how many every stage needs a number, or one for all.
      num_stages: for how many stages; default: as many as there are.

    Returns:
      A line for each, with the field and the stage; none if all can be used.
    """
    found: list[str] = []

    def look(name: str, value: Any, fewest: tuple[int, ...]) -> None:
        """Of lists in lists, ``fewest`` entries each."""
        if isinstance(value, Sequence) and not isinstance(value, str) and fewest:
            if len(value) < fewest[0]:
                found.append(
                    f"{name} has {len(value)} entries, for {fewest[0]} micro-batches"
                )
            for at_index, inner in enumerate(value):
                look(f"{name}[{at_index}]", inner, fewest[1:])
        elif not isinstance(value, Real) or isinstance(value, bool):
            lists = " or a list of them" if fewest else ""
            found.append(f"{name} is a {type(value).__name__}, needs a number{lists}")
        elif not float(value) >= 0 or (value == math.inf and name != "bandwidth"):
            found.append(f"{name}={float(value):g} is not 0 or more and finite")
        elif name == "bandwidth" and not value:
            found.append("bandwidth=0 moves nothing")

    for field in dataclasses.fields(costs):
        name, value = field.name, getattr(costs, field.name)
        is_default = value is None and field.default is None
        if name not in ("skips", "in_seconds") and not is_default:
            each = () if name in _OF_STAGES else (num_microbatches,)
            look(name, value, () if name in _OF_ALL else (0, *each))
    try:
        given = costs.num_stages
    except ValueError as error:
        given, found = None, [*found, str(error)]
    if given is not None and num_stages not in (None, given):
        found.append(f"they are for {given} stages, there are {num_stages}")
    last = math.inf if num_stages is None else num_stages - 1
    for number, skip in enumerate(costs.skips):
        name = f"skips[{number}]"
        source, target = skip[:2]
        if not 0 <= source <= target <= last:
            found.append(
                f"{name} goes from stage {source} to {target}, needs a later stage"
                + (f" of {num_stages}" if num_stages else "")
            )
        look(f"{name}.bytes", skip.bytes, (num_microbatches,))
        look(f"{name}.cotangent_bytes", skip.cotangent_bytes, (num_microbatches,))
    return found
