"""What stages keep, by their layers together: less than each of them by itself.

What one layer gives to the next is kept once, or not at all where it follows by cheap
operations from what is kept before it.
"""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from .._instructions import _bytes
from .._instructions._transfer import OnPaper
from ._better import ranked
from ._forecast import Candidate
from ._layer import LayerProfile
from ._partition import partition
from ._profile import Profile
from ._request import Request
from ._search import Space

# So many are lowered, until one fits.
_MOST = 8


def beside_neighbours(
    profiles: Mapping[int, Profile],
    request: Request,
    num_stages: int,
    remats: Sequence[str],
) -> dict[int, Profile]:
    """Profiles whose layers keep about what they do in stages.

    How much less that is than what they keep by themselves is told by one number of
    micro-batches, and taken to be the same for all.

    Args:
      profiles: of layers by themselves, by the number of micro-batches.
      request: what they answer.
      num_stages: of the cut, an even one, by which that is told.
      remats: the modes that stages may have.

    Returns:
      The profiles.
    """
    number = max(profiles)
    profile = profiles[number]
    if num_stages >= len(profile.layers):
        return dict(profiles)
    balance = partition(profile, num_stages)
    stages = list(itertools.pairwise([0, *itertools.accumulate(balance)]))
    asked = dataclasses.replace(request, num_microbatches=number)
    # By mode, for each layer: what its stage keeps, and its layers by themselves. What
    # "full" keeps, the input of a stage, is no sum.
    shares: dict[str, list[tuple[int, int]]] = {}
    for mode in dict.fromkeys(mode for mode in remats if mode != "full"):
        pairs = zip(stages, asked.kept(balance, mode), strict=True)
        shares[mode] = [
            (kept, profile.kept_bytes(*stage, mode))
            for stage, kept in pairs
            for _ in range(*stage)
        ]
    return {number: _shared(own, shares) for number, own in profiles.items()}


def _shared(
    profile: Profile, shares: Mapping[str, Sequence[tuple[int, int]]]
) -> Profile:
    """A profile whose layers keep a share of what they keep by themselves."""

    def kept(at: int, layer: LayerProfile) -> dict[str, int]:
        parts = {mode: own[at] for mode, own in shares.items()}
        return dict(layer.kept_bytes) | {
            mode: layer.kept_bytes[mode] * part // whole if whole else 0
            for mode, (part, whole) in parts.items()
        }

    return dataclasses.replace(
        profile,
        layers=tuple(
            dataclasses.replace(layer, kept_bytes=kept(at, layer))
            for at, layer in enumerate(profile.layers)
        ),
    )


def confirmed(
    candidates: Sequence[Candidate], space: Space, request: Request
) -> list[Candidate]:
    """The candidates, the first with the bytes that its list of instructions holds.

    Where one turns out to need more than was taken for it, so may others: those come
    next that would fit even so, and then the one that needs least.

    Args:
      candidates: the best first.
      space: what they were chosen from.
      request: what the profiles answer.

    Returns:
      First one that fits, as its instructions say; if none was found that does, the one
      of those that were lowered which needs least.
    """
    limit = space.hardware.memory_limit
    left = list({_cut_and_order(each): each for each in reversed(candidates)}.values())
    left.reverse()
    exact: list[Candidate] = []
    more = 1.0
    while left and len(exact) < _MOST:
        likely = [c for c in left if limit is None or c.most_bytes * more <= limit]
        guess = likely.pop(0) if likely else min(left, key=lambda c: c.most_bytes)
        found = _exactly(guess, request)
        if found.fits(space.hardware):
            # It takes the time that it took before.
            return [found, *exact, *likely]
        exact.append(found)
        left.remove(guess)
        more = max(more, found.most_bytes / guess.most_bytes)
    return [*ranked(exact, space.hardware), *left]


def _cut_and_order(candidate: Candidate) -> tuple[Any, ...]:
    """What tells a candidate from others."""
    return candidate.schedule, candidate.balance, candidate.remat, candidate.data


def _exactly(candidate: Candidate, request: Request) -> Candidate:
    """A candidate with the bytes that its list of instructions holds."""
    schedule = candidate.schedule
    asked = dataclasses.replace(request, num_microbatches=schedule.num_microbatches)
    data = candidate.data
    gradient = asked.lowered(candidate.balance, candidate.remat, schedule, data)
    program = gradient.program
    peaks = dict(zip(program.devices, _bytes.peaks(program), strict=True))
    return dataclasses.replace(
        candidate,
        memory=tuple(
            dataclasses.replace(own, held=peaks[OnPaper(rank, data)] - own.lasting)
            for rank, own in enumerate(candidate.memory)
        ),
        held=tuple(_bytes.most_residuals(program, schedule.num_stages)),
        kept=tuple(map(gradient.kept, range(schedule.num_stages))),
    )
