"""The costs of each layer of a model: times and bytes of one micro-batch."""

import dataclasses
import functools
import itertools
import json
import math
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

import numpy as np

from .._partition._remat_mode import NONE
from ..schedules import Costs, Skip
from ..schedules._choose import format_argument
from ..schedules._json import decode, parse_json
from . import _layer_profile
from ._layer_profile import LayerProfile as LayerProfile
from ._layer_profile import Link
from ._layer_profile import SkipProfile as SkipProfile
from ._mode_names import MODE_NAMES, mode_between_halves, stores_only_inputs
from ._origin import is_measured_on_cpu
from ._sums import Matrix, add_copies, sum_stages
from ._table import format_profile


@dataclass(frozen=True)
class Profile:
    """The costs of the layers of a model; made by `jpipe.profile`.

    Attributes:
      layers: one entry per layer, in order.
      input_bytes: the bytes of the input of the first layer.
      skips: the long skip connections.
      ties: groups of indices of layers that use the same parameters.
      microbatch_size: the number of examples of a micro-batch.
      fingerprint: the model, by name: the shapes of its inputs, and a digest of each
        layer.
      origin: how and where the profile was made, by name: measured or estimated, the
        device or its rates, and versions.
      action_seconds: seconds that any action takes, whatever it computes: to have a
        program run from Python.
      link: the measured speed of transfers between two devices; ``None`` if there was
        one device, or nothing was measured.
      larger: the profile of a larger micro-batch, if several sizes were profiled: from
        both follow the costs of other sizes.
    """

    layers: tuple[LayerProfile, ...]
    input_bytes: int = 0
    skips: tuple[SkipProfile, ...] = ()
    ties: tuple[tuple[int, ...], ...] = ()
    microbatch_size: int = 1
    fingerprint: Mapping[str, str] = field(default_factory=dict)
    origin: Mapping[str, str] = field(default_factory=dict)
    action_seconds: float = 0.0
    link: Link | None = None
    larger: "Profile | None" = None

    @property
    def sizes(self) -> list[int]:
        """The numbers of examples of the micro-batches that were profiled."""
        larger_sizes = [] if self.larger is None else self.larger.sizes
        return [self.microbatch_size, *larger_sizes]

    @property
    def overlap(self) -> bool:
        """True if devices are taken to compute while they send and receive.

        The cores of a CPU, on which it may have been measured, copy themselves.
        """
        return not is_measured_on_cpu(self.origin)

    def __str__(self) -> str:
        return format_profile(self)

    def faults(self) -> list[str]:
        """The faults in the numbers, one line each."""
        faults = [
            *_layer_profile.find_layer_faults(
                self.layers,
                input_bytes=self.input_bytes,
                microbatch_size=self.microbatch_size,
                action_seconds=self.action_seconds,
            )
        ]
        if self.microbatch_size == 0:
            faults.append("microbatch_size=0; needs at least one example")
        last = len(self.layers) - 1
        for i, skip in enumerate(self.skips):
            if not 0 <= skip.source < skip.target <= last:
                faults.append(
                    f"skips[{i}] goes from layer {skip.source} to {skip.target}, needs "
                    f"a later one; the last is {last}"
                )
            sizes = {"bytes": skip.bytes, "cotangent_bytes": skip.cotangent_bytes}
            for name, number in sizes.items():
                faults += _layer_profile.find_number_faults(
                    f"skips[{i}].{name}", number
                )
        for i, group in enumerate(self.ties):
            if not group or not all(0 <= layer <= last for layer in group):
                faults.append(
                    f"ties[{i}]={tuple(group)}: needs numbers of layers, 0 to {last}"
                )
        if self.link is not None:
            speed_faults = find_speed_faults(self.link.bandwidth, self.link.latency)
            faults += [f"link.{fault}" for fault in speed_faults]
        if self.larger is not None:
            faults += [f"larger: {fault}" for fault in self.larger.faults()]
            faults += self._larger_faults(self.larger)
        return faults

    def _larger_faults(self, larger: "Profile") -> Iterator[str]:
        """Faults of the profile of more examples, which is of the same model."""
        if larger.microbatch_size <= self.microbatch_size:
            yield (
                f"larger.microbatch_size={larger.microbatch_size}: needs more than "
                f"{self.microbatch_size}"
            )
        if _outline(larger) != _outline(self):
            yield "larger has other layers, remat modes or skip connections"

    def costs(
        self,
        balance: Sequence[int],
        *,
        remat: str | Sequence[str] = "min_cut",
        bandwidth: float | None = None,
        latency: float = 0.0,
        overlap: bool | None = None,
    ) -> Costs:
        """The costs of the stages of a cut, for the simulation of schedules.

        Each action of a stage takes the time of its layers and ``action_seconds``, and
        a stage stores what its layers store. With ``remat="full"`` it stores its input
        and what skip connections bring to it, and its backward computes the forward
        again; what other modes compute again is taken to cost nothing. Between the
        halves of a backward a stage is taken to store what ``"min_cut"`` stores, if the
        profile has that mode.

        Args:
          balance: the number of layers of each stage.
          remat: the residuals between forward and backward, one mode or one per stage:
            ``"full"``, or one that ``residual_bytes`` of the layers names.
          bandwidth: bytes per second between two ranks; ``None``: transfers take no
            time but ``latency``.
          latency: seconds that a transfer takes whatever its size.
          overlap: True if ranks compute while they send and receive; False if a
            transfer keeps both ranks from computing, each for half of its time.
            Default: False if the profile was measured on a CPU, else True.

        Returns:
          Costs with one entry per stage, in seconds and bytes of one micro-batch.

        Raises:
          ValueError: with every fault of the arguments.

        Example:
          >>> layers = (LayerProfile("a", 1.0, 2.0), LayerProfile("b", 2.0, 4.0))
          >>> Profile(layers).costs([1, 1], remat="full").backward
          [3.0, 6.0]
        """
        sizes = list(balance)
        modes = self.modes(remat, len(sizes))
        if overlap is None:
            overlap = self.overlap
        faults = [
            *find_speed_faults(bandwidth, latency),
            *_layer_profile.find_flag_faults("overlap", overlap),
            *self.remat_faults(modes),
        ]
        num_layers = len(self.layers)
        if min(sizes, default=0) < 1 or sum(sizes) != num_layers:
            faults.append(
                f"balance={sizes}: its sum is {sum(sizes)}, there are {num_layers} "
                f"layers, of which every stage needs at least one"
            )
        if faults:
            raise ValueError(f"profile: {'; '.join(faults)}")

        ends = [0, *itertools.accumulate(sizes)]
        stages = list(itertools.pairwise(ends))

        def residual_bytes(modes: Iterable[str]) -> list[int]:
            pairs = zip(modes, stages, strict=True)
            return [int(self.residuals_of[mode][stage]) for mode, stage in pairs]

        param_bytes = [int(self.params_of[stage]) for stage in stages]
        state_bytes = [int(self.state_of[stage]) for stage in stages]
        return dataclasses.replace(
            self.times(
                ends, modes, bandwidth=bandwidth, latency=latency, overlap=overlap
            ),
            residual_bytes=residual_bytes(modes),
            pending_bytes=residual_bytes(map(self.pending_mode, modes)),
            parameter_bytes=list(map(operator.add, param_bytes, state_bytes)),
            accumulator_bytes=param_bytes,
        )

    def times(
        self,
        ends: Sequence[int],
        modes: Sequence[str],
        *,
        bandwidth: float | None,
        latency: float,
        overlap: bool,
    ) -> Costs:
        """The times of `costs`, without the bytes that stages hold.

        Args:
          ends: the layers at which stages begin and end.
          modes: the remat mode of each stage.
          bandwidth: as for `costs`.
          latency: as for `costs`.
          overlap: as for `costs`.
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
            self.layers[begin - 1].cotangent_bytes if begin else 0
            for begin, _ in stages
        ]
        return Costs(
            forward=forward,
            backward=backward,
            input_grad=input_grad,
            weight_grad=weight_grad,
            latency=latency,
            bandwidth=math.inf if bandwidth is None else bandwidth,
            overlap=overlap,
            boundary_bytes=[self.boundary_bytes(begin) for begin, _ in stages],
            cotangent_bytes=cotangent_bytes,
            skips=tuple(self._stage_skips(ends)),
            in_seconds=True,
        )

    def scaled(self, factor: float) -> "Profile":
        """The profile with layers that take so many times as long."""
        larger = None if self.larger is None else self.larger.scaled(factor)
        layers = tuple(layer.scaled(factor) for layer in self.layers)
        return dataclasses.replace(self, layers=layers, larger=larger)

    def modes(self, remat: Any, num_stages: int) -> tuple[Any, ...]:
        """One mode per stage, from one for all or a sequence of them.

        Raises:
          ValueError: if there are not as many.
        """
        is_sequence = isinstance(remat, Iterable) and not isinstance(remat, str)
        modes = tuple(remat) if is_sequence else (remat,) * num_stages
        if len(modes) != num_stages:
            raise ValueError(
                f"remat has {len(modes)} entries for {num_stages} stages; give one for "
                f"all or one per stage"
            )
        return modes

    def remat_faults(self, modes: Sequence[str]) -> list[str]:
        """The faults of remat modes that are not in the profile, one line each."""
        listed = ", ".join(map(repr, sorted(self.residuals_of)))
        return [
            f"what remat={format_argument(mode)} keeps is not in the profile: choose "
            f"{listed}"
            for mode in dict.fromkeys(modes)
            if mode not in self.residuals_of
        ]

    def boundary_bytes(self, begin: int) -> int:
        """The bytes of the input of a stage that begins with a layer."""
        return self.layers[begin - 1].output_bytes if begin else self.input_bytes

    @functools.cached_property
    def params_of(self) -> Matrix:
        """Bytes of the parameters of each stage.

        A stage without the first of some tied layers has a copy of its parameters.
        """
        param_bytes = sum_stages([layer.param_bytes for layer in self.layers])
        for group in self.ties:
            owner, *readers = sorted(set(group))
            add_copies(
                param_bytes,
                first_layer=owner + 1,
                readers=readers,
                num_bytes=self.layers[owner].param_bytes,
            )
        return param_bytes

    @functools.cached_property
    def state_of(self) -> Matrix:
        """Bytes of the other state of each stage."""
        return sum_stages([layer.state_bytes for layer in self.layers])

    @functools.cached_property
    def residuals_of(self) -> dict[str, Matrix]:
        """Bytes that each stage stores between forward and backward, by remat mode."""
        layers = [layer.residual_bytes for layer in self.layers]
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
        num_layers = len(self.layers)
        boundary_bytes = [self.boundary_bytes(begin) for begin in range(num_layers)]
        column = np.array([*boundary_bytes, 0], float)[:, None]
        input_bytes = np.triu(np.repeat(column, num_layers + 1, axis=1), 1)

        # skip connections of one array -> the layers that read it
        readers: dict[tuple[int, str, int, bool], list[int]] = {}
        for skip in self.skips:
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

    def pending_mode(self, mode: str) -> str:
        """The mode that stores about as much as the first half of a backward leaves."""
        for pending_mode in (mode_between_halves(mode), NONE.name):
            if pending_mode in self.residuals_of:
                return pending_mode
        return mode

    def check(self, fingerprint: Mapping[str, str]) -> None:
        """Refuses a profile of another model.

        Args:
          fingerprint: the fingerprint of the model that it is used for.

        Raises:
          ValueError: if anything differs; the message names all of it.

        Example:
          >>> Profile((), fingerprint={"layer 0": "a"}).check({"layer 0": "b"})
          Traceback (most recent call last):
          ValueError: the profile is of another model:
            * layer 0: 'a' in the profile, 'b' here
          Make a profile of this one; ...
        """
        differences = [
            f"{name}: {self.fingerprint.get(name)!r} in the profile, "
            f"{fingerprint.get(name)!r} here"
            for name in dict.fromkeys([*self.fingerprint, *fingerprint])
            if self.fingerprint.get(name) != fingerprint.get(name)
        ]
        if differences:
            listed = "".join(f"\n  * {line}" for line in differences)
            raise ValueError(
                f"the profile is of another model:{listed}\nMake a profile of this "
                f"one; give jpipe.profile the same loss_fn=, targets=, trainable= and "
                f"train= as jpipe.plan"
            )

    def to_json(self) -> str:
        """The profile as a JSON object; `from_json` reads it."""
        return json.dumps(dataclasses.asdict(self), indent=1, default=_plain)

    @classmethod
    def from_json(cls, text: str) -> "Profile":
        """Reads what `to_json` wrote.

        Raises:
          ValueError: if the text is something else.

        Example:
          >>> profile = Profile((LayerProfile("a", 1.0, 2.0),))
          >>> Profile.from_json(profile.to_json()) == profile
          True
        """
        with parse_json("no profile as Profile.to_json writes it", text) as fields:
            profile: Profile = decode(cls, fields)
            if faults := profile.faults():
                raise ValueError("; ".join(faults))
            str(profile)  # it needs some entries of the origin
        return profile

    def _stage_seconds(
        self, begin: int, end: int, *, recomputes: bool
    ) -> tuple[float, float, float, float]:
        """Seconds of F, B, I and W of a stage; halves are equal if they are unknown.

        Args:
          begin: the first layer of the stage.
          end: the first layer behind it.
          recomputes: True if a backward computes the forward again.
        """
        layers = self.layers[begin:end]
        forward = sum(layer.forward for layer in layers)
        backward = sum(layer.backward for layer in layers)
        halves = [layer.halves for layer in layers]
        input_grad = sum(first for first, _ in halves)
        weight_grad = sum(second for _, second in halves)
        recomputed = forward if recomputes else 0.0
        # Where nothing is trained there are no actions after the forward.
        has_backward = any(layer.has_backward for layer in layers)
        backward_call = self.action_seconds if has_backward else 0.0
        return (
            forward + self.action_seconds,
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
        for skip in self.skips:
            source = stage_of[skip.source]
            target = stage_of[skip.target]
            is_boundary = skip.is_output and skip.source == ends[target] - 1
            if source != target and not is_boundary:
                skips[skip.source, skip.name, target] = Skip(
                    source, target, skip.bytes, skip.cotangent_bytes
                )
        yield from skips.values()


def _outline(profile: Profile) -> list[Any]:
    """The layers and skip connections, as in profiles of micro-batches of any size."""
    layers = [(layer.name, set(layer.residual_bytes)) for layer in profile.layers]
    skips = [(skip.name, skip.source, skip.target) for skip in profile.skips]
    return [layers, skips]


def _plain(number: Any) -> int | float:
    """A number of NumPy as one of Python."""
    return operator.index(number) if hasattr(number, "__index__") else float(number)


def check_profile(function_name: str, profile: Any) -> None:
    """Checks that an argument is a profile.

    Args:
      function_name: the name of the called function, for errors.
      profile: the argument.

    Raises:
      TypeError: if it is none.
    """
    if not isinstance(profile, Profile):
        raise TypeError(
            f"{function_name} needs a jpipe.Profile, such as jpipe.profile(layers, x) "
            f"returns; this is a {type(profile).__name__}"
        )


def find_speed_faults(bandwidth: float | None, latency: float) -> Iterator[str]:
    """The faults in bandwidth and latency, one line each."""
    yield from _layer_profile.find_number_faults("latency", latency)
    if bandwidth is not None and not (isinstance(bandwidth, Real) and bandwidth > 0):
        yield f"bandwidth={bandwidth!r}; needs bytes per second, more than 0"
