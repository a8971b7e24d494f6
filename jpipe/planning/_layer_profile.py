"""What one layer and one skip connection cost, and what no cost can be."""

import dataclasses
import numbers
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..schedules._choose import format_argument

# Remat modes that have a name, from the fewest bytes on.
MODES = ("full", "min_cut", "dots", "none")


@dataclass(frozen=True)
class LayerProfile:
    """One layer, on one micro-batch.

    Attributes:
      name: of the layer, as `Pipeline.plan` calls it.
      forward: seconds of its forward.
      backward: seconds of its backward from residuals, nothing computed again.
      input_grad: the part of ``backward`` that the gradient of its input takes;
        ``None`` if the parts are not known.
      weight_grad: the part for its parameters, likewise.
      num_params: how many parameters it owns; of tied layers the first owns them.
      param_bytes: their bytes.
      state_bytes: of its other collections, such as batch statistics.
      output_bytes: what it gives to the next layer.
      cotangent_bytes: the gradient of that, which comes back.
      residual_bytes: of its residuals, by remat mode.
      workspace_bytes: the most that one of its programs needs while it runs, besides
        arguments and results; ``None`` if it is not known.
      flops: of its forward; ``None`` if it is not known.
    """

    name: str
    forward: float
    backward: float
    input_grad: float | None = None
    weight_grad: float | None = None
    num_params: int = 0
    param_bytes: int = 0
    state_bytes: int = 0
    output_bytes: int = 0
    cotangent_bytes: int = 0
    residual_bytes: Mapping[str, int] = field(default_factory=dict)
    workspace_bytes: int | None = None
    flops: float | None = None

    @property
    def has_backward(self) -> bool:
        """Whether anything follows its forward, be it of no time."""
        return self.backward > 0 or any(self.residual_bytes.values())

    @property
    def halves(self) -> tuple[float, float]:
        """Seconds of I and W; half of a backward each if they are not known."""
        if self.input_grad is None or self.weight_grad is None:
            return self.backward / 2, self.backward / 2
        return self.input_grad, self.weight_grad

    @property
    def least_seconds(self) -> float:
        """Seconds of a micro-batch, the backward whole or in halves."""
        return self.forward + min(self.backward, sum(self.halves))


@dataclass(frozen=True)
class SkipProfile:
    """A long skip connection, on one micro-batch.

    Attributes:
      name: under which it was stashed.
      source: the number of the layer that stashes it.
      target: the number of the layer that pops it.
      bytes: what is carried.
      cotangent_bytes: its gradient, which comes back.
      is_output: whether it is what its source gives to the next layer, which a cut
        right behind the source sends once.
    """

    name: str
    source: int
    target: int
    bytes: int
    cotangent_bytes: int
    is_output: bool = False


def faults(layers: Sequence[LayerProfile], **others: float) -> Iterator[str]:
    """Which numbers of a profile are none, a line for each.

    Args:
      layers: of the profile.
      **others: its other fields that are numbers.
    """
    if not layers:
        yield "layers is empty; needs at least one"
    for i, layer in enumerate(layers):
        where = f"layer {i} ({layer.name})"
        for own in dataclasses.fields(layer)[1:]:
            value = getattr(layer, own.name)
            if own.name != "residual_bytes" and not (value is own.default is None):
                yield from number_faults(f"{where}: {own.name}", value)
        for mode, value in layer.residual_bytes.items():
            yield from number_faults(f"{where}: residual_bytes[{mode!r}]", value)
    for name, value in others.items():
        yield from number_faults(name, value)


def unknown_mode(mode: object) -> str:
    """That there is no such remat mode, and which there are."""
    modes = ", ".join(map(repr, MODES))
    return f"remat: {format_argument(mode)} is unknown: choose {modes}"


def count_faults(what: str, value: Any) -> Iterator[str]:
    """Why something is no number of things."""
    if isinstance(value, bool) or not hasattr(value, "__index__") or value < 1:
        yield f"{what}={value!r}: needs an int of at least 1"


def number_faults(what: str, value: Any) -> Iterator[str]:
    """Why something is neither a time nor a size."""
    number: Any = value
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not (is_number and 0 <= number <= sys.float_info.max):
        yield f"{what}={value!r}; needs a number, finite and not negative"
