"""The costs of a layer, a skip connection and a link, and checks of numbers."""

import math
import numbers
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ._origin import is_measured_on_cpu


@dataclass(frozen=True)
class LayerProfile:
    """One layer, on one micro-batch.

    Attributes:
      name: the name of the layer in `Pipeline.plan`.
      forward: seconds of its forward.
      backward: seconds of its backward from residuals, nothing computed again.
      input_grad: the part of ``backward`` that the gradient of its input takes;
        ``None`` if the parts are unknown.
      weight_grad: the part for its parameters, likewise.
      num_params: the number of parameters that it owns; the first of tied layers owns
        theirs.
      param_bytes: their bytes.
      state_bytes: bytes of its other collections, such as batch statistics.
      output_bytes: bytes of its output to the next layer.
      cotangent_bytes: bytes of the gradient of that output.
      residual_bytes: bytes of its residuals, by remat mode.
      workspace_bytes: the most that one of its programs needs while it runs, besides
        arguments and results; ``None`` if it is unknown.
      flops: floating-point operations of its forward; ``None`` if unknown.
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
        """True if a backward follows its forward, even one that takes no time."""
        return self.backward > 0 or any(self.residual_bytes.values())

    @property
    def halves(self) -> tuple[float, float]:
        """Seconds of I and of W; half of a backward for each if they are unknown."""
        if self.input_grad is None or self.weight_grad is None:
            return self.backward / 2, self.backward / 2
        return self.input_grad, self.weight_grad

    def backward_seconds(self, split_share: float | None) -> float:
        """Mean seconds of backwards, of which this share runs in halves.

        ``None``: the fewest of any share.
        """
        split_seconds = sum(self.halves)
        if split_share is None:
            return min(self.backward, split_seconds)
        return (1 - split_share) * self.backward + split_share * split_seconds


class ProgramCosts(NamedTuple):
    """One program of a layer.

    Attributes:
      seconds: the seconds that it takes.
      workspace_bytes: the most that it needs while it runs, besides arguments and
        results; ``None`` if it is unknown.
    """

    seconds: float
    workspace_bytes: int | None


@dataclass(frozen=True)
class SkipProfile:
    """A long skip connection, on one micro-batch.

    Attributes:
      name: the name under which it is stashed, or of the entry of a dictionary.
      source: the index of the layer that computes it.
      target: the index of a layer that reads it, behind the next one.
      bytes: the bytes of the array.
      cotangent_bytes: the bytes of its gradient, which goes from target to source.
      is_output: True if it is also the output of its source to the next layer, so that
        a cut right behind the source sends it once.
    """

    name: str
    source: int
    target: int
    bytes: int
    cotangent_bytes: int
    is_output: bool = False


class MeasuredLink(NamedTuple):
    """The measured speed of transfers between two devices.

    Attributes:
      latency: seconds of a transfer, whatever its size.
      bandwidth: bytes per second.
      source: the name of the device that sent.
      target: the name of the device that received.
    """

    latency: float
    bandwidth: float
    source: str
    target: str


@dataclass(frozen=True)
class Link:
    """The transfers between two ranks, as all forecasts take them.

    Attributes:
      latency: seconds that a transfer takes whatever its size.
      bandwidth: bytes per second; infinite: transfers take no time but ``latency``.
      overlap: True if ranks compute while they send and receive; False if a transfer
        keeps both ranks from computing, each for half of its time.
      origin_text: the devices between which latency, bandwidth or both were measured,
        in words; empty if none was.
    """

    latency: float = 0.0
    bandwidth: float = math.inf
    overlap: bool = True
    origin_text: str = ""

    def seconds(self, num_bytes: float) -> float:
        """The time of a transfer."""
        return self.latency + num_bytes / self.bandwidth


class LinkOptions(NamedTuple):
    """The options of public functions that describe a link; ``None``: left out.

    Attributes:
      bandwidth: bytes per second.
      latency: seconds that a transfer takes whatever its size.
      overlap: True if ranks compute while they send and receive.
    """

    bandwidth: Any
    latency: Any
    overlap: Any

    def find_faults(self) -> Iterator[str]:
        """The faults of the options, one line each."""
        if self.latency is not None:
            yield from find_number_faults("latency", self.latency)
        number: Any = self.bandwidth
        is_number = isinstance(self.bandwidth, numbers.Real)
        if number is not None and not (is_number and number > 0):
            yield f"bandwidth={number!r}; needs bytes per second, more than 0"
        if self.overlap is not None and not isinstance(self.overlap, bool):
            yield f"overlap={self.overlap!r}; needs True or False"

    def choose_link(
        self, origin: Mapping[str, str], *, measured: MeasuredLink | None = None
    ) -> Link:
        """The link of these options: what is left out is as it was measured.

        Transfers overlap, unless layers were measured on a CPU: its cores copy
        themselves.

        Args:
          origin: the origin of the costs of layers.
          measured: a link; ``None``: none was measured, and transfers take no time
            but what the options say.
        """
        latency = self.latency
        bandwidth = self.bandwidth
        overlap = self.overlap
        if overlap is None:
            overlap = not is_measured_on_cpu(origin)
        origin_text = ""
        if measured is not None and (latency is None or bandwidth is None):
            origin_text = f"measured from {measured.source} to {measured.target}"
            if latency is not None:
                origin_text = f"the latter {origin_text}"
            elif bandwidth is not None:
                origin_text = f"the former {origin_text}"
            latency = measured.latency if latency is None else latency
            bandwidth = measured.bandwidth if bandwidth is None else bandwidth
        return Link(
            latency=0.0 if latency is None else latency,
            bandwidth=math.inf if bandwidth is None else bandwidth,
            overlap=overlap,
            origin_text=origin_text,
        )


def find_count_faults(name: str, value: Any) -> Iterator[str]:
    """A fault if a value is no positive integer."""
    if isinstance(value, bool) or not hasattr(value, "__index__") or value < 1:
        yield f"{name}={value!r}: needs an int of at least 1"


def find_number_faults(name: str, value: Any) -> Iterator[str]:
    """A fault if a value is neither a time nor a size."""
    number: Any = value
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not (is_number and 0 <= number <= sys.float_info.max):
        yield f"{name}={value!r}; needs a number, finite and not negative"
