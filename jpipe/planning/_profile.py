"""What each layer of a model costs: times and bytes of one micro-batch."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from ._table import table


@dataclass(frozen=True)
class LayerProfile:
    """One layer, on one micro-batch.

    Attributes:
      name: of the layer, as `Pipeline.plan` calls it.
      forward: seconds of its forward.
      backward: seconds of its backward from residuals, nothing computed again.
      input_grad: the part of ``backward`` that the gradient of its input takes;
        ``None`` if it is not known.
      weight_grad: the part for its parameters; ``None`` if it is not known.
      num_params: how many parameters it owns; of tied layers the first owns them.
      param_bytes: their bytes.
      state_bytes: of its other collections, such as batch statistics.
      output_bytes: what it gives to the next layer.
      cotangent_bytes: the gradient of that, which comes back.
      kept_bytes: what it keeps between forward and backward, by remat mode.
      workspace_bytes: the most that one of its programs needs while it runs, beside
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
    kept_bytes: Mapping[str, int] = field(default_factory=dict)
    workspace_bytes: int | None = None
    flops: float | None = None


@dataclass(frozen=True)
class SkipProfile:
    """A long skip connection, on one micro-batch.

    Attributes:
      name: under which it was stashed.
      source: the number of the layer that stashes it.
      target: the number of the layer that pops it.
      bytes: what is carried.
      cotangent_bytes: its gradient, which comes back.
    """

    name: str
    source: int
    target: int
    bytes: int
    cotangent_bytes: int


@dataclass(frozen=True)
class Profile:
    """What the layers of a model cost; made by `jpipe.profile`, or read from a file.

    Attributes:
      layers: one entry per layer, in order.
      input_bytes: what the first layer is given.
      skips: the long skip connections.
      ties: groups of numbers of layers that use the same parameters.
      microbatch_size: how many examples a micro-batch has.
      made: what it was made on, by name: shapes, dtypes, device, versions, and how.
    """

    layers: tuple[LayerProfile, ...]
    input_bytes: int = 0
    skips: tuple[SkipProfile, ...] = ()
    ties: tuple[tuple[int, ...], ...] = ()
    microbatch_size: int = 1
    made: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return table(self)
