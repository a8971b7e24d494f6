"""What `jpipe.partition` is given, checked: every fault found before any work."""

import functools
import math
import numbers
import operator
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..schedules import Schedule
from ..schedules._choose import choose_schedule
from ..schedules._simulate import TOO_LONG
from ._chain import Chain
from ._in_flight import Held, of_one_f_one_b, of_schedule
from ._layer import MODES, LayerProfile, misfit, unknown_mode
from ._profile import Profile, mode_faults, speed_faults

OBJECTIVES = ("max", "step")


@dataclass(frozen=True)
class Pins:
    """Where a cut has to be, and where it may not.

    Attributes:
      groups: layers that are to be on one rank.
      cuts: layers that a stage must begin with, in order.
    """

    groups: tuple[tuple[int, ...], ...] = ()
    cuts: tuple[int, ...] = ()

    def allowed(self, num_layers: int, apart: bool = False) -> npt.NDArray[np.bool_]:
        """Which stages, by where they begin and end, the pins allow.

        Args:
          num_layers: the number of layers.
          apart: whether layers that belong together may be in several stages.
        """
        cut = np.ones(num_layers + 1, bool)
        for group in () if apart else self.groups:
            cut[min(group) + 1 : max(group) + 1] = False
        allowed = cut[:, None] & cut[None, :]
        for place in self.cuts:
            allowed[:place, place + 1 :] = False
        return allowed


@dataclass(frozen=True, eq=False)
class Given:
    """The arguments, once they make sense.

    Attributes:
      chain: the layers.
      objective: ``"max"`` or ``"step"``.
      num_microbatches: of one step, if it is known.
      schedule: what will run the stages, if that is known.
      max_bytes: of each rank; ``None`` if it is no matter.
      pins: where to cut and where not.
    """

    chain: Chain
    objective: str
    num_microbatches: int | None
    schedule: Schedule | None
    max_bytes: tuple[float, ...] | None
    pins: Pins

    @functools.cached_property
    def placement(self) -> tuple[int, ...]:
        """The rank of each stage."""
        if self.schedule is not None:
            return self.schedule.placement
        return tuple(range(self.chain.num_stages))

    @functools.cached_property
    def num_ranks(self) -> int:
        """The number of ranks."""
        schedule = self.schedule
        return self.chain.num_stages if schedule is None else schedule.num_ranks

    @functools.cached_property
    def held(self) -> tuple[Held, ...]:
        """What each rank has in flight."""
        if self.schedule is not None:
            return of_schedule(self.schedule)
        return of_one_f_one_b(self.chain.num_stages, self.num_microbatches)


def understood(costs: Any, num_stages: Any, arguments: Mapping[str, Any]) -> Given:
    """The arguments of `partition`.

    Args:
      costs: its first.
      num_stages: its second.
      arguments: the others, by name.

    Raises:
      ValueError: with every fault.
    """
    faults: list[str] = []
    profile = _profile(costs, faults)
    num_layers = len(profile.layers)
    count = _count("num_stages", num_stages, faults)
    if count and 0 < num_layers < count:
        faults.append(
            f"num_stages={count} is more than the {num_layers} layers; each stage "
            f"needs one"
        )
    if arguments["objective"] not in OBJECTIVES:
        listed = " or ".join(map(repr, OBJECTIVES))
        faults.append(f"objective={arguments['objective']!r}; needs {listed}")
    faults += speed_faults(arguments["bandwidth"], arguments["latency"])
    modes = profile.modes(arguments["remat"], count or 1)
    faults += mode_faults(modes, count) if count else ()
    known = [*MODES, *(mode for x in profile.layers for mode in x.kept_bytes)]
    faults += dict.fromkeys(unknown_mode(mode) for mode in modes if mode not in known)
    if not isinstance(costs, Profile):
        faults += _too_much(modes, arguments)
    elif arguments["max_bytes"] is not None:
        faults += profile.unknown(modes)
    microbatches, schedule = _schedule(arguments, count, faults)
    several = schedule is not None and schedule.num_ranks < schedule.num_stages
    pins = _pins(arguments, num_layers, faults)
    if pins and count and not faults:
        faults += _contradictions(pins, num_layers, count, several)
    ranks = schedule.num_ranks if schedule else count
    most = _max_bytes(arguments["max_bytes"], ranks, faults)
    chain = Chain(profile, modes, arguments["bandwidth"], arguments["latency"])
    if not faults and not math.isfinite(chain.total * (microbatches or 1)):
        faults.append(TOO_LONG)
    if faults:
        listed = "".join(f"\n  * {fault}" for fault in faults)
        raise ValueError(f"partition cannot cut this:{listed}")
    assert pins is not None
    return Given(chain, arguments["objective"], microbatches, schedule, most, pins)


def _profile(costs: Any, faults: list[str]) -> Profile:
    """The layers; of a number, a third is taken to be forward."""
    if isinstance(costs, Profile):
        faults += costs.faults()
        return costs
    if isinstance(costs, str | Mapping) or not hasattr(costs, "__iter__"):
        says = "needs the time of each layer, or a Profile"
        faults.append(f"costs={costs!r} is a {type(costs).__name__}; {says}")
        return Profile(())
    times = costs.tolist() if hasattr(costs, "tolist") else list(costs)
    if times and not any(isinstance(time, numbers.Number) for time in times):
        kind = type(times[0]).__name__
        faults.append(
            f"costs[0] is a {kind}; needs the time of each layer, or a Profile, as of "
            f"jpipe.profile(layers, sample)"
        )
        return Profile(())
    wrong = [fault for i, t in enumerate(times) for fault in misfit(f"costs[{i}]", t)]
    faults += wrong if times else ["costs is empty; needs the time of each layer"]
    layers = [
        LayerProfile(str(i), 0.0 if wrong else t / 3, 0.0 if wrong else t - t / 3)
        for i, t in enumerate(times)
    ]
    return Profile(tuple(layers))


def _too_much(modes: Sequence[str], arguments: Mapping[str, Any]) -> Iterator[str]:
    """What numbers alone do not say."""
    for name, meant in (
        ("max_bytes", arguments["max_bytes"] is not None),
        ("bandwidth", arguments["bandwidth"] is not None),
        ("remat", "full" in modes),
    ):
        if meant:
            yield (
                f"{name}={arguments[name]!r} needs a Profile; the costs are numbers, "
                f"which say no bytes and no forwards"
            )


def _count(name: str, value: Any, faults: list[str]) -> int:
    """A number of at least 1; 0 if it is none."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        faults.append(f"{name}={value!r} is a {type(value).__name__}; needs an int")
        return 0
    number = operator.index(value)
    if number < 1:
        faults.append(f"{name}={number}; needs at least 1")
    return max(number, 0)


def _schedule(
    arguments: Mapping[str, Any], num_stages: int, faults: list[str]
) -> tuple[int | None, Schedule | None]:
    """How many micro-batches there are, and what runs them, as far as is said."""
    given, number = arguments["schedule"], arguments["num_microbatches"]
    if number is None and isinstance(given, Schedule):
        number = given.num_microbatches
    if number is None:
        needing = "schedule" if given is not None else "objective"
        if given is not None or arguments["objective"] == "step":
            faults.append(f"{needing}={arguments[needing]!r} needs num_microbatches=")
        return None, None
    number = _count("num_microbatches", number, faults)
    if given is None or not number or not num_stages:
        return number, None
    try:
        schedule = choose_schedule(given, num_stages, number)
    except (ValueError, TypeError) as error:
        faults.append(str(error))
        return number, None
    if schedule.forward_only:
        faults.append(f"schedule {schedule.name!r} has no backward; needs one to train")
    return number, schedule


def _pins(
    arguments: Mapping[str, Any], num_layers: int, faults: list[str]
) -> Pins | None:
    """The pins; none if they make no sense."""
    before = len(faults)
    groups, cuts = [], []
    inside = f"needs layers from 0 to {num_layers - 1}"
    for group in _listed("together", arguments["together"], faults):
        layers = _listed("together", group, faults)
        if not all(_is_layer(i, num_layers) for i in layers) or len({*layers}) < 2:
            faults.append(f"together: {group!r}; {inside}, at least two")
        else:
            groups.append(tuple(map(operator.index, layers)))
    for place in _listed("cuts", arguments["cuts"], faults):
        if not _is_layer(place, num_layers):
            faults.append(f"cuts: {place!r}; {inside}")
        else:
            cuts.append(operator.index(place))
    if len(faults) > before:
        return None
    return Pins(tuple(groups), tuple(sorted({*cuts} - {0})))


def _listed(name: str, value: Any, faults: list[str]) -> list[Any]:
    if isinstance(value, str) or not hasattr(value, "__iter__"):
        example = "[(0, 5)]" if name == "together" else "[7]"
        faults.append(f"{name}: {value!r}; needs a sequence, such as {name}={example}")
        return []
    return list(value)


def _is_layer(value: Any, num_layers: int) -> bool:
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        return False
    return 0 <= operator.index(value) < num_layers


def _contradictions(
    pins: Pins, num_layers: int, num_stages: int, several: bool
) -> Iterator[str]:
    """Pins that no cut into so many stages can keep."""
    if len(pins.cuts) >= num_stages:
        yield (
            f"cuts={list(pins.cuts)} make {len(pins.cuts) + 1} stages, "
            f"num_stages={num_stages}"
        )
    if several:
        # Which ranks layers share depends on the placement: the search finds out.
        return
    for group in pins.groups:
        inside = [c for c in pins.cuts if min(group) < c <= max(group)]
        if inside:
            yield (
                f"together: {group} and cuts={inside}: with one stage per rank layers "
                f"{min(group)} to {max(group)} have to be one stage"
            )
    places = (
        num_layers
        - 1
        - len({i for g in pins.groups for i in range(min(g) + 1, max(g) + 1)})
    )
    if places + 1 < num_stages:
        yield (
            f"together={list(pins.groups)} leave {places + 1} stages at most, "
            f"num_stages={num_stages}; take fewer, or a schedule with several stages "
            f"per rank, such as 'zb_v', whose first and last are on the same"
        )


def _max_bytes(
    value: Any, num_ranks: int, faults: list[str]
) -> tuple[float, ...] | None:
    """One number per rank."""
    if value is None or not num_ranks:
        return None
    several = hasattr(value, "__iter__") and not isinstance(value, str)
    each: list[Any] = list(value) if several else [value] * num_ranks
    if len(each) != num_ranks:
        faults.append(
            f"max_bytes has {len(each)} entries for {num_ranks} ranks; give one for "
            f"all or one per rank"
        )
    for number in dict.fromkeys(map(str, each)):
        wrong = [n for n in each if str(n) == number and not _is_size(n)]
        if wrong:
            faults.append(f"max_bytes={wrong[0]!r}; needs bytes, more than 0")
    return tuple(map(_finite, each)) if all(map(_is_size, each)) else None


def _finite(size: Any) -> float:
    """A size as a float; of infinity no difference would be known."""
    return min(size if isinstance(size, int) else float(size), sys.float_info.max)


def _is_size(value: Any) -> bool:
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    return is_number and value > 0  # pyright: ignore[reportOperatorIssue]
