"""What each layer of a model costs: times and bytes of one micro-batch."""

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

from ..schedules import Costs, Skip
from ..schedules._choose import format_argument
from ..schedules._json import decode, parse_json
from . import _layer_profile
from ._layer_profile import LayerProfile as LayerProfile
from ._layer_profile import SkipProfile as SkipProfile
from ._sums import Matrix, copied, sums
from ._table import table


@dataclass(frozen=True)
class Profile:
    """What the layers of a model cost; made by `jpipe.profile`.

    Attributes:
      layers: one entry per layer, in order.
      input_bytes: what the first layer is given.
      skips: the long skip connections.
      ties: groups of numbers of layers that use the same parameters.
      microbatch_size: how many examples a micro-batch has.
      fingerprint: what it is of and where it was made, by name: whether it was measured
        or estimated, the device or its rates, versions, shapes, and a digest of each
        layer.
      action_seconds: what an action takes whatever it computes: to have a program run
        from Python.
    """

    layers: tuple[LayerProfile, ...]
    input_bytes: int = 0
    skips: tuple[SkipProfile, ...] = ()
    ties: tuple[tuple[int, ...], ...] = ()
    microbatch_size: int = 1
    fingerprint: Mapping[str, str] = field(default_factory=dict)
    action_seconds: float = 0.0

    def __str__(self) -> str:
        return table(self)

    def faults(self) -> list[str]:
        """What is wrong with the numbers, a line for each fault."""
        names = "input_bytes", "microbatch_size", "action_seconds"
        others = {name: getattr(self, name) for name in names}
        faults = list(_layer_profile.faults(self.layers, **others))
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
                faults += _layer_profile.number_faults(f"skips[{i}].{name}", number)
        for i, group in enumerate(self.ties):
            if not group or not all(0 <= layer <= last for layer in group):
                faults.append(
                    f"ties[{i}]={tuple(group)}: needs numbers of layers, 0 to {last}"
                )
        return faults

    def costs(
        self,
        balance: Sequence[int],
        *,
        remat: str | Sequence[str] = "min_cut",
        bandwidth: float | None = None,
        latency: float = 0.0,
    ) -> Costs:
        """What the stages of a cut cost, for the simulation of schedules.

        A stage takes the time of its layers and ``action_seconds``, in each of its
        actions, and stores what they store. With
        ``remat="full"`` it stores its input and what skip connections bring to it, and
        its backward computes the forward again; what other modes compute again is
        taken to cost nothing. Between the halves of a backward a stage stores what
        ``"min_cut"`` stores, if that is known: an estimate.

        Args:
          balance: how many layers each stage has.
          remat: what is stored between forward and backward, one mode or one per stage:
            ``"full"``, or one that ``residual_bytes`` of the layers names.
          bandwidth: bytes per second between two ranks; ``None``: as many as there are.
          latency: seconds that a transfer takes whatever its size.

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
        faults = [*speed_faults(bandwidth, latency), *self.remat_faults(modes)]
        count = len(self.layers)
        if min(sizes, default=0) < 1 or sum(sizes) != count:
            faults.append(
                f"balance={sizes}: its sum is {sum(sizes)}, there are {count} layers, "
                f"of which every stage needs at least one"
            )
        if faults:
            raise ValueError(f"profile: {'; '.join(faults)}")
        ends = [0, *itertools.accumulate(sizes)]
        stages = list(itertools.pairwise(ends))

        def of_stages(modes: Iterable[str]) -> list[int]:
            pairs = zip(modes, stages, strict=True)
            return [int(self.residuals_of[mode][stage]) for mode, stage in pairs]

        params = [int(self.params_of[stage]) for stage in stages]
        state = [int(self.state_of[stage]) for stage in stages]
        return dataclasses.replace(
            self.times(ends, modes, bandwidth, latency),
            residual_bytes=of_stages(modes),
            pending_bytes=of_stages(map(self.pending_mode, modes)),
            parameter_bytes=[a + b for a, b in zip(params, state, strict=True)],
            accumulator_bytes=params,
        )

    def times(
        self,
        ends: Sequence[int],
        modes: Sequence[str],
        bandwidth: float | None,
        latency: float,
    ) -> Costs:
        """`costs` without what stages hold: of the layers between two ends each."""
        stages = list(itertools.pairwise(ends))
        times = [
            self._seconds(*stage, mode == "full")
            for stage, mode in zip(stages, modes, strict=True)
        ]
        forward, backward, first_half, second_half = map(list, zip(*times, strict=True))
        return Costs(
            forward=forward,
            backward=backward,
            input_grad=first_half,
            weight_grad=second_half,
            latency=latency,
            bandwidth=math.inf if bandwidth is None else bandwidth,
            boundary_bytes=[self.boundary_bytes(first) for first, _ in stages],
            cotangent_bytes=[
                self.layers[first - 1].cotangent_bytes if first else 0
                for first, _ in stages
            ],
            skips=tuple(self._skips(ends)),
            in_seconds=True,
        )

    def modes(self, remat: Any, num_stages: int) -> tuple[Any, ...]:
        """One mode per stage, from one for all or a sequence of them.

        Raises:
          ValueError: if there are not as many.
        """
        several = isinstance(remat, Iterable) and not isinstance(remat, str)
        modes = tuple(remat) if several else (remat,) * num_stages
        if len(modes) != num_stages:
            raise ValueError(
                f"remat has {len(modes)} entries for {num_stages} stages; give one for "
                f"all or one per stage"
            )
        return modes

    def remat_faults(self, modes: Sequence[str]) -> list[str]:
        """The remat modes whose residuals are not known, a line for each."""
        listed = ", ".join(map(repr, sorted(self.residuals_of)))
        return [
            f"what remat={format_argument(mode)} keeps is not in the profile: choose "
            f"{listed}"
            for mode in dict.fromkeys(modes)
            if mode not in self.residuals_of
        ]

    def boundary_bytes(self, first: int) -> int:
        """What a stage that begins at a layer is given."""
        return self.layers[first - 1].output_bytes if first else self.input_bytes

    @functools.cached_property
    def params_of(self) -> Matrix:
        """Bytes of the parameters of each stage.

        A stage without the first of some tied layers has a copy of its parameters.
        """
        found = sums([layer.param_bytes for layer in self.layers])
        for group in self.ties:
            owner, *others = sorted(set(group))
            copied(found, owner + 1, others, self.layers[owner].param_bytes)
        return found

    @functools.cached_property
    def state_of(self) -> Matrix:
        """Bytes of the other state of each stage."""
        return sums([layer.state_bytes for layer in self.layers])

    @functools.cached_property
    def residuals_of(self) -> dict[str, Matrix]:
        """By mode, what each stage stores between forward and backward."""
        count, modes = len(self.layers), [layer.residual_bytes for layer in self.layers]
        known = set[str]().union(*modes[:1]).intersection(*modes)
        found = {mode: sums([own[mode] for own in modes]) for mode in sorted(known)}
        given = [*map(self.boundary_bytes, range(count)), 0]
        entering = np.triu(np.repeat(np.array(given, float)[:, None], count + 1, 1), 1)
        readers: dict[tuple[int, str, int, bool], list[int]] = {}
        for skip in self.skips:
            key = skip.source, skip.name, skip.bytes, skip.is_output
            readers.setdefault(key, []).append(skip.target)
        for (source, _, size, is_output), targets in readers.items():
            copied(entering, source + 1 + is_output, sorted(targets), size)
        return {**found, "full": entering}

    def pending_mode(self, mode: str) -> str:
        """The mode that stores about what the first half of a backward leaves."""
        if mode == "none":
            return mode
        return next((m for m in ("min_cut", "none") if m in self.residuals_of), mode)

    def check(self, fingerprint: Mapping[str, str]) -> None:
        """Refuses a profile that was made on something else.

        Args:
          fingerprint: that of what it is to be used for.

        Raises:
          ValueError: if anything differs; the message names all of it.

        Example:
          >>> Profile((), fingerprint={"device": "a"}).check({"device": "b"})
          Traceback (most recent call last):
          ValueError: the profile was made on something else:
            * device: 'a' in the profile, 'b' here
          Measure again, or use the profile where it was made; ...
        """
        differ = [
            f"{name}: {self.fingerprint.get(name)!r} in the profile, "
            f"{fingerprint.get(name)!r} here"
            for name in dict.fromkeys([*self.fingerprint, *fingerprint])
            if self.fingerprint.get(name) != fingerprint.get(name)
        ]
        if differ:
            listed = "".join(f"\n  * {line}" for line in differ)
            raise ValueError(
                f"the profile was made on something else:{listed}\nMeasure again, or "
                f"use the profile where it was made; give jpipe.profile the same "
                f"num_microbatches=, loss=, targets= and trainable= as jpipe.plan"
            )

    def to_json(self) -> str:
        """All of it as a JSON object; `from_json` reads it."""
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
            str(profile)  # which needs some of what it was made on
        return profile

    def _seconds(self, first: int, stop: int, again: bool) -> tuple[float, ...]:
        """Of F, B, I and W of a stage; what is not known is half of a backward."""
        layers = self.layers[first:stop]
        forward = sum(layer.forward for layer in layers)
        backward = sum(layer.backward for layer in layers)
        inputs, weights = map(sum, zip(*(x.halves for x in layers), strict=True))
        more = forward if again else 0.0
        call = self.action_seconds
        # Where nothing is trained there are no actions after the forward.
        after = call if any(layer.has_backward for layer in layers) else 0.0
        return (
            forward + call,
            backward + more + after,
            inputs + more + after,
            weights + after,
        )

    def _skips(self, ends: Sequence[int]) -> Iterator[Skip]:
        """Skip connections between stages; one array goes to a stage once."""
        stage_of = [
            s for s, (a, b) in enumerate(itertools.pairwise(ends)) for _ in range(a, b)
        ]
        sent: dict[tuple[int, str, int], Skip] = {}
        for skip in self.skips:
            source, target = stage_of[skip.source], stage_of[skip.target]
            with_boundary = skip.is_output and skip.source == ends[target] - 1
            if source != target and not with_boundary:
                key = skip.source, skip.name, target
                sent[key] = Skip(source, target, skip.bytes, skip.cotangent_bytes)
        yield from sent.values()


def _plain(number: Any) -> int | float:
    """A number of NumPy as one of Python."""
    return operator.index(number) if hasattr(number, "__index__") else float(number)


def check_profile(what: str, profile: Any) -> None:
    """Checks that something is a profile.

    Args:
      what: how errors call the function that was given it.
      profile: what the caller passed.

    Raises:
      TypeError: if it is none.
    """
    if not isinstance(profile, Profile):
        raise TypeError(
            f"{what} needs a jpipe.Profile, such as jpipe.profile(layers, x) returns; "
            f"this is a {type(profile).__name__}"
        )


def speed_faults(bandwidth: float | None, latency: float) -> Iterator[str]:
    """Why links of such speed there are not, a line for each fault."""
    yield from _layer_profile.number_faults("latency", latency)
    if bandwidth is not None and not (isinstance(bandwidth, Real) and bandwidth > 0):
        yield f"bandwidth={bandwidth!r}; needs bytes per second, more than 0"
