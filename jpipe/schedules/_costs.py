"""The costs of the actions of a schedule: time, transfers, bytes."""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, NamedTuple

from ._action import INPUT, OPS, Action
from ._formats import format_type

# One number for all stages, one per stage, or one per stage and micro-batch.
Numbers = Any
_NUMBER_TYPES = (int, float)

# Fields with one number for all stages, and with one number per stage at most.
_OF_ALL = ("latency", "bandwidth")
_FLAGS = ("in_seconds", "overlap")
_OF_STAGES = ("parameter_bytes", "accumulator_bytes", "shared_bytes", "exchange")
_TIMES = ("forward", "backward", "input_grad", "weight_grad")
# op -> the field with its time.
TIME_FIELDS: dict[str, str] = dict(zip(OPS, _TIMES, strict=True))
# Fields that are divided among the chunks of a rank.
_CHUNKED = (
    *_TIMES,
    "residual_bytes",
    "pending_bytes",
    "parameter_bytes",
    "accumulator_bytes",
    "exchange",
)


class Skip(NamedTuple):
    """A skip connection: a value that one stage sends straight to a later one.

    Attributes:
      source: the stage that sends it.
      target: the stage that reads it; its gradient goes the other way.
      bytes: its size for one micro-batch; one number, or one per micro-batch.
      cotangent_bytes: the size of its gradient, likewise.
    """

    source: int
    target: int
    bytes: Numbers
    cotangent_bytes: Numbers


@dataclass(frozen=True)
class Costs:
    """The costs of each action, in time and in memory.

    Every field but ``latency``, ``bandwidth``, ``in_seconds`` and ``overlap`` is one
    number for all stages, a sequence with one per stage, or a sequence of sequences
    with one per stage and micro-batch; ``parameter_bytes``, ``accumulator_bytes``,
    ``shared_bytes`` and ``exchange`` are not per micro-batch. By default times are in
    units of a forward and bytes in units of what a stage stores of one micro-batch.

    Attributes:
      forward: time of F, in any unit; seconds where bandwidth is bytes per second.
      backward: time of B, recomputation included.
      input_grad: time of I; default: half of ``backward``.
      weight_grad: time of W; default: ``backward`` less the time of I.
      latency: time of a transfer between two ranks, whatever its size.
      bandwidth: bytes per unit of time between two ranks.
      boundary_bytes: the input of a stage, for one micro-batch.
      cotangent_bytes: the gradient of that input; default: ``boundary_bytes``.
      residual_bytes: bytes that a stage stores of one micro-batch from F to B, its
        input included if it is stored.
      pending_bytes: bytes that a stage stores of one micro-batch from I to W.
      parameter_bytes: the parameters of a stage, and all else that stays.
      accumulator_bytes: its sums of gradients.
      extra_bytes: its inputs from one micro-batch besides activations, such as targets.
      shared_bytes: its inputs that all micro-batches share, such as keys.
      emitted_bytes: the outputs of one forward that stay until the end of the step.
      skips: the long skip connections.
      exchange: time in which the ranks that share a stage add up its gradients, after
        the last of them.
      in_seconds: True if times are seconds and sizes bytes, as measured ones are, and
        are printed and drawn as such; False if they are in other units.
      overlap: True if ranks compute while they send and receive. False if a transfer
        keeps both ranks from computing, each for half of its time: the sender after its
        action, the receiver before its own. In a timeline these halves are parts of the
        actions.

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
    overlap: bool = True

    def of(self, action: Action) -> float:
        """The time of one action, without transfers."""
        op, stage, microbatch = action
        time = getattr(self, TIME_FIELDS[op])
        if time is not None:
            return look_up(time, stage, microbatch)
        backward = look_up(self.backward, stage, microbatch)
        if op == INPUT:
            return backward / 2
        return max(backward - self.of(action._replace(op=INPUT)), 0.0)

    @property
    def is_uniform(self) -> bool:
        """True if all micro-batches cost the same."""
        numbers = list(itertools.chain.from_iterable(self._fields_per_stage.values()))
        for skip in self.skips:
            numbers += [skip.bytes, skip.cotangent_bytes]
        return not any(isinstance(number, Sequence) for number in numbers)

    def links(self, num_stages: int) -> list[Skip]:
        """All that stages send: each to the next one, and the skips."""
        cotangent_bytes = self.cotangent_bytes
        if cotangent_bytes is None:
            cotangent_bytes = self.boundary_bytes
        neighbours = [
            Skip(
                source=stage - 1,
                target=stage,
                bytes=look_up(self.boundary_bytes, stage),
                cotangent_bytes=look_up(cotangent_bytes, stage),
            )
            for stage in range(1, num_stages)
        ]
        return [*neighbours, *self.skips]

    @property
    def _fields_per_stage(self) -> dict[str, Sequence[Any]]:
        """The fields with a number per stage, by name."""
        return {
            name: value
            for name, value in vars(self).items()
            if name != "skips" and isinstance(value, Sequence)
        }

    @property
    def num_stages(self) -> int | None:
        """The number of stages of the costs; ``None`` if one number serves all.

        Raises:
          ValueError: if the fields disagree.
        """
        counts = {name: len(value) for name, value in self._fields_per_stage.items()}
        if len(set(counts.values())) > 1:
            listed = ", ".join(f"{name}: {count}" for name, count in counts.items())
            raise ValueError(f"costs are for different numbers of stages: {listed}")
        return next(iter(counts.values()), None)

    def per_chunk(self, num_chunks: float) -> "Costs":
        """The costs of one of the equal chunks that a rank's layers are cut in.

        Args:
          num_chunks: the stages per rank; less than one if ranks share a stage.

        Returns:
          Times, residuals, parameters and their sums of gradients divided by it; a
          boundary is as large as before.

        Raises:
          ValueError: if the costs are per stage, so that they are for one number of
            stages only.
        """
        if num_chunks == 1:
            return self
        names = [name for name, value in self._fields_per_stage.items() if value]
        if names:
            raise ValueError(
                f"costs per stage ({', '.join(names)}) do not give what the stages of "
                f"a schedule with {num_chunks} stages per rank cost: give one number "
                f"per field, for the layers of one rank"
            )
        rank_costs = {name: getattr(self, name) for name in _CHUNKED}
        chunk_costs = {
            name: value / num_chunks
            for name, value in rank_costs.items()
            if value is not None
        }
        return dataclasses.replace(self, **chunk_costs)


def look_up(numbers: Numbers, *indices: int) -> float:
    """The number of a stage, or of a stage and a micro-batch, in a field of `Costs`.

    Args:
      numbers: one number, a number per stage, or numbers per stage and micro-batch.
      *indices: the stage, and the micro-batch.
    """
    for index in indices:
        # Most are plain numbers; the first test is ten times as fast as the second.
        if numbers.__class__ in _NUMBER_TYPES or not isinstance(numbers, Sequence):
            return numbers
        numbers = numbers[index]
    return numbers


def find_faults(
    costs: Costs, num_microbatches: int, num_stages: int | None = None
) -> list[str]:
    """Finds what cannot be used: no numbers, below 0, infinite, for other stages.

    Args:
      costs: the costs.
      num_microbatches: the number of micro-batches, of which each stage needs a number,
        or one for all.
      num_stages: the number of stages; default: any.

    Returns:
      A line for each fault, with the field and the stage.
    """
    faults: list[str] = []

    def check(name: str, value: Any, min_lengths: tuple[int, ...]) -> None:
        """Checks a number, or lists in lists down to the depth of ``min_lengths``."""
        is_list = isinstance(value, Sequence) and not isinstance(value, str)
        if is_list and min_lengths:
            if len(value) < min_lengths[0]:
                faults.append(
                    f"{name} has {len(value)} entries, for {min_lengths[0]} "
                    f"micro-batches"
                )
            for index, inner in enumerate(value):
                check(f"{name}[{index}]", inner, min_lengths[1:])
        elif not isinstance(value, Real) or isinstance(value, bool):
            lists = " or a list of them" if min_lengths else ""
            faults.append(f"{name} is {format_type(value)}, needs a number{lists}")
        elif not float(value) >= 0 or (value == math.inf and name != "bandwidth"):
            faults.append(f"{name}={float(value):g} is not 0 or more and finite")
        elif name == "bandwidth" and not value:
            faults.append("bandwidth=0 moves nothing")

    for field in dataclasses.fields(costs):
        name = field.name
        value = getattr(costs, name)
        is_default = value is None and field.default is None
        if name == "skips" or is_default:
            continue
        if name in _FLAGS:
            if not isinstance(value, bool):
                faults.append(f"{name} is {value!r}, needs True or False")
        elif name in _OF_ALL:
            check(name, value, ())
        elif name in _OF_STAGES:
            check(name, value, (0,))
        else:
            check(name, value, (0, num_microbatches))

    try:
        costs_stages = costs.num_stages
    except ValueError as error:
        costs_stages = None
        faults.append(str(error))
    if costs_stages is not None and num_stages not in (None, costs_stages):
        faults.append(f"they are for {costs_stages} stages, there are {num_stages}")

    last = math.inf if num_stages is None else num_stages - 1
    for index, skip in enumerate(costs.skips):
        name = f"skips[{index}]"
        if not 0 <= skip.source < skip.target <= last:
            faults.append(
                f"{name} goes from stage {skip.source} to {skip.target}, needs a later "
                f"stage" + (f" of {num_stages}" if num_stages else "")
            )
        check(f"{name}.bytes", skip.bytes, (num_microbatches,))
        check(f"{name}.cotangent_bytes", skip.cotangent_bytes, (num_microbatches,))
    return faults
