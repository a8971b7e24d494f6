"""The costs of every stage that the layers of a profile can make.

Bytes are matrices: entry [i, j] is of the stage of layers i to j - 1. Each is computed
when it is first read, and kept with its profile: see
`_profile_record.costs_of_stages`.
"""

import functools
import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from .._partition._remat_mode import NONE
from ..schedules import Costs, Skip
from ..schedules._choose import format_argument
from ._layer_profile import LayerProfile, Link, SkipProfile
from ._mode_names import MODE_NAMES, mode_between_halves, stores_only_inputs
from ._sums import Matrix, add_copies, sum_stages


class StageCosts:
    """Seconds and bytes of one micro-batch in any stage.

    Args:
      layers: the layers of a profile.
      input_bytes: the bytes of the input of the first.
      skips: the long skip connections.
      ties: groups of indices of layers that use the same parameters.
      action_seconds: seconds that any action takes, whatever it computes.
    """

    def __init__(
        self,
        layers: Sequence[LayerProfile],
        *,
        input_bytes: int,
        skips: Sequence[SkipProfile],
        ties: Sequence[Sequence[int]],
        action_seconds: float,
    ) -> None:
        self._layers = layers
        self._input_bytes = input_bytes
        self._skips = skips
        self._ties = ties
        self._action_seconds = action_seconds

    @functools.cached_property
    def param_bytes(self) -> Matrix:
        """Bytes of the parameters of each stage.

        A stage without the first of some tied layers has a copy of its parameters.
        """
        param_bytes = sum_stages([layer.param_bytes for layer in self._layers])
        for group in self._ties:
            owner, *readers = sorted(set(group))
            add_copies(
                param_bytes,
                first_layer=owner + 1,
                readers=readers,
                num_bytes=self._layers[owner].param_bytes,
            )
        return param_bytes

    @functools.cached_property
    def state_bytes(self) -> Matrix:
        """Bytes of the other state of each stage."""
        return sum_stages([layer.state_bytes for layer in self._layers])

    @functools.cached_property
    def residual_bytes(self) -> dict[str, Matrix]:
        """Bytes that each stage stores between forward and backward, by remat mode."""
        layers = [layer.residual_bytes for layer in self._layers]
        modes = set[str]().union(*layers[:1]).intersection(*layers)
        residuals: dict[str, Matrix] = {}
        for mode in sorted(modes):
            residuals[mode] = sum_stages([sizes[mode] for sizes in layers])
        for mode in filter(stores_only_inputs, MODE_NAMES):
            residuals[mode] = self._stage_input_bytes
        return residuals

    @functools.cached_property
    def _stage_input_bytes(self) -> Matrix:
        """Bytes of the inputs of each stage: from the one before it, and by skips."""
        num_layers = len(self._layers)
        boundary_bytes = [self.boundary_bytes(begin) for begin in range(num_layers)]
        column = np.array([*boundary_bytes, 0], float)[:, None]
        input_bytes = np.triu(np.repeat(column, num_layers + 1, axis=1), 1)

        # skip connections of one array -> the layers that read it
        readers: dict[tuple[int, str, int, bool], list[int]] = {}
        for skip in self._skips:
            key = skip.source, skip.name, skip.bytes, skip.is_output
            readers.setdefault(key, []).append(skip.target)
        for (source, _, num_bytes, is_output), targets in readers.items():
            # A stage right behind the source has its output already.
            add_copies(
                input_bytes,
                first_layer=source + 2 if is_output else source + 1,
                readers=sorted(targets),
                num_bytes=num_bytes,
            )
        return input_bytes

    def boundary_bytes(self, begin: int) -> int:
        """The bytes of the input of a stage that begins with a layer."""
        return self._layers[begin - 1].output_bytes if begin else self._input_bytes

    def times(self, ends: Sequence[int], modes: Sequence[str], link: Link) -> Costs:
        """The times of `Profile.costs`, without the bytes that stages hold.

        Args:
          ends: the layers at which stages begin and end.
          modes: the remat mode of each stage.
          link: the transfers between ranks.
        """
        stages = list(itertools.pairwise(ends))
        seconds = [
            self._stage_seconds(begin, end, recomputes=stores_only_inputs(mode))
            for (begin, end), mode in zip(stages, modes, strict=True)
        ]
        forward, backward, input_grad, weight_grad = map(
            list, zip(*seconds, strict=True)
        )
        cotangent_bytes = [
            self._layers[begin - 1].cotangent_bytes if begin else 0
            for begin, _ in stages
        ]
        return Costs(
            forward=forward,
            backward=backward,
            input_grad=input_grad,
            weight_grad=weight_grad,
            latency=link.latency,
            bandwidth=link.bandwidth,
            overlap=link.overlap,
            boundary_bytes=[self.boundary_bytes(begin) for begin, _ in stages],
            cotangent_bytes=cotangent_bytes,
            skips=tuple(self._stage_skips(ends)),
            in_seconds=True,
        )

    def find_remat_faults(self, modes: Sequence[str]) -> list[str]:
        """The faults of remat modes that are not in the profile, one line each."""
        listed = ", ".join(map(repr, sorted(self.residual_bytes)))
        return [
            f"what remat={format_argument(mode)} keeps is not in the profile: choose "
            f"{listed}"
            for mode in dict.fromkeys(modes)
            if mode not in self.residual_bytes
        ]

    def pending_mode(self, mode: str) -> str:
        """The mode that stores about as much as the first half of a backward leaves."""
        for pending_mode in (mode_between_halves(mode), NONE.name):
            if pending_mode in self.residual_bytes:
                return pending_mode
        return mode

    def _stage_seconds(
        self, begin: int, end: int, *, recomputes: bool
    ) -> tuple[float, float, float, float]:
        """Seconds of F, B, I and W of a stage; halves are equal if they are unknown.

        Args:
          begin: the first layer of the stage.
          end: the first layer behind it.
          recomputes: True if a backward computes the forward again.
        """
        layers = self._layers[begin:end]
        forward = sum(layer.forward for layer in layers)
        backward = sum(layer.backward for layer in layers)
        halves = [layer.halves for layer in layers]
        input_grad = sum(first for first, _ in halves)
        weight_grad = sum(second for _, second in halves)
        recomputed = forward if recomputes else 0.0
        # Where nothing is trained there are no actions after the forward.
        has_backward = any(layer.has_backward for layer in layers)
        backward_call = self._action_seconds if has_backward else 0.0
        return (
            forward + self._action_seconds,
            backward + recomputed + backward_call,
            input_grad + recomputed + backward_call,
            weight_grad + backward_call,
        )

    def _stage_skips(self, ends: Sequence[int]) -> Iterator[Skip]:
        """Skip connections between stages; one array goes to a stage once."""
        stage_of: list[int] = []  # layer -> stage
        for stage, (begin, end) in enumerate(itertools.pairwise(ends)):
            stage_of += [stage] * (end - begin)
        # (source layer, name, target stage) -> the skip connection of stages
        skips: dict[tuple[int, str, int], Skip] = {}
        for skip in self._skips:
            source = stage_of[skip.source]
            target = stage_of[skip.target]
            is_boundary = skip.is_output and skip.source == ends[target] - 1
            if source != target and not is_boundary:
                skips[skip.source, skip.name, target] = Skip(
                    source, target, skip.bytes, skip.cotangent_bytes
                )
        yield from skips.values()
