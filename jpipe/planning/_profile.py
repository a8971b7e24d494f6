"""The costs of each layer of a model: times and bytes of one micro-batch."""

import dataclasses
import functools
import itertools
import json
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

from ..schedules import Costs
from ..schedules._json import decode, parse_json
from . import _layer_profile
from ._layer_profile import LayerProfile as LayerProfile
from ._layer_profile import Link
from ._layer_profile import SkipProfile as SkipProfile
from ._origin import can_overlap
from ._stage_costs import StageCosts
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

    def __str__(self) -> str:
        return format_profile(self)

    @functools.cached_property
    def _stage_costs(self) -> StageCosts:
        return StageCosts(
            self.layers,
            input_bytes=self.input_bytes,
            skips=self.skips,
            ties=self.ties,
            action_seconds=self.action_seconds,
        )

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
        modes = modes_of_stages(remat, len(sizes))
        if overlap is None:
            overlap = can_overlap(self.origin)
        stage_costs = self._stage_costs
        faults = [
            *find_speed_faults(bandwidth, latency),
            *_layer_profile.find_flag_faults("overlap", overlap),
            *stage_costs.find_remat_faults(modes),
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
            return [
                int(stage_costs.residual_bytes[mode][stage]) for mode, stage in pairs
            ]

        param_bytes = [int(stage_costs.param_bytes[stage]) for stage in stages]
        state_bytes = [int(stage_costs.state_bytes[stage]) for stage in stages]
        return dataclasses.replace(
            stage_costs.times(
                ends, modes, bandwidth=bandwidth, latency=latency, overlap=overlap
            ),
            residual_bytes=residual_bytes(modes),
            pending_bytes=residual_bytes(map(stage_costs.pending_mode, modes)),
            parameter_bytes=list(map(operator.add, param_bytes, state_bytes)),
            accumulator_bytes=param_bytes,
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
            if faults := find_profile_faults(profile):
                raise ValueError("; ".join(faults))
            str(profile)  # it needs some entries of the origin
        return profile


def costs_of_stages(profile: Profile) -> StageCosts:
    """The costs of every stage of a profile, which are computed once."""
    return profile._stage_costs


def modes_of_stages(remat: Any, num_stages: int) -> tuple[Any, ...]:
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


def find_profile_faults(profile: Profile) -> list[str]:
    """The faults in the numbers of a profile, one line each."""
    faults = [
        *_layer_profile.find_layer_faults(
            profile.layers,
            input_bytes=profile.input_bytes,
            microbatch_size=profile.microbatch_size,
            action_seconds=profile.action_seconds,
        )
    ]
    if profile.microbatch_size == 0:
        faults.append("microbatch_size=0; needs at least one example")
    last = len(profile.layers) - 1
    for i, skip in enumerate(profile.skips):
        if not 0 <= skip.source < skip.target <= last:
            faults.append(
                f"skips[{i}] goes from layer {skip.source} to {skip.target}, needs "
                f"a later one; the last is {last}"
            )
        sizes = {"bytes": skip.bytes, "cotangent_bytes": skip.cotangent_bytes}
        for name, number in sizes.items():
            faults += _layer_profile.find_number_faults(f"skips[{i}].{name}", number)
    for i, group in enumerate(profile.ties):
        if not group or not all(0 <= layer <= last for layer in group):
            faults.append(
                f"ties[{i}]={tuple(group)}: needs numbers of layers, 0 to {last}"
            )
    if profile.link is not None:
        speed_faults = find_speed_faults(profile.link.bandwidth, profile.link.latency)
        faults += [f"link.{fault}" for fault in speed_faults]
    if profile.larger is not None:
        faults += [f"larger: {fault}" for fault in find_profile_faults(profile.larger)]
        faults += _find_larger_faults(profile, profile.larger)
    return faults


def _find_larger_faults(profile: Profile, larger: Profile) -> Iterator[str]:
    """Faults of the profile of more examples, which is of the same model."""
    if larger.microbatch_size <= profile.microbatch_size:
        yield (
            f"larger.microbatch_size={larger.microbatch_size}: needs more than "
            f"{profile.microbatch_size}"
        )
    if _modes_of_layers(larger) != _modes_of_layers(profile):
        yield "larger has other layers or remat modes"


def check_fingerprint(profile: Profile, fingerprint: Mapping[str, str]) -> None:
    """Refuses a profile of another model.

    Args:
      profile: the profile.
      fingerprint: the fingerprint of the model that it is used for.

    Raises:
      ValueError: if anything differs; the message names all of it.

    Example:
      >>> profile = Profile((), fingerprint={"layer 0": "a"})
      >>> check_fingerprint(profile, {"layer 0": "b"})
      Traceback (most recent call last):
      ValueError: the profile is of another model:
        * layer 0: 'a' in the profile, 'b' here
      Make a profile of this one; ...
    """
    differences = [
        f"{name}: {profile.fingerprint.get(name)!r} in the profile, "
        f"{fingerprint.get(name)!r} here"
        for name in dict.fromkeys([*profile.fingerprint, *fingerprint])
        if profile.fingerprint.get(name) != fingerprint.get(name)
    ]
    if differences:
        listed = "".join(f"\n  * {line}" for line in differences)
        raise ValueError(
            f"the profile is of another model:{listed}\nMake a profile of this "
            f"one; give jpipe.profile the same loss_fn=, targets=, trainable= and "
            f"train= as jpipe.plan"
        )


def _modes_of_layers(profile: Profile) -> list[tuple[str, set[str]]]:
    """The name and remat modes of each layer, as in profiles of any size."""
    return [(layer.name, set(layer.residual_bytes)) for layer in profile.layers]


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
