"""What stages keep, by their layers together: less than each of them by itself.

What one layer gives to the next is kept once, or not at all where it follows by cheap
operations from what is kept before it.
"""

import dataclasses
import itertools
from collections.abc import Sequence

from .._instructions import _bytes
from .._instructions._transfer import OnPaper
from ._forecast import Candidate
from ._partition import partition
from ._profile import Profile
from ._request import Request
from ._search import Space, ranked

# So many of the best are lowered until the best of all is one of them.
_MOST = 8


def beside_neighbours(
    profile: Profile, request: Request, num_stages: int, remats: Sequence[str]
) -> Profile:
    """A profile whose layers keep about what they do in stages.

    Args:
      profile: of layers by themselves.
      request: what it answers.
      num_stages: of the cut, an even one, by which that is told.
      remats: the modes that stages may have.

    Returns:
      The profile.
    """
    if num_stages >= len(profile.layers):
        return profile
    balance = partition(profile, num_stages)
    ends = [0, *itertools.accumulate(balance)]
    layers = list(profile.layers)
    # What "full" keeps, the input of a stage, is no sum of what layers keep.
    for mode in set(remats) - {"full"}:
        for stage, kept in zip(
            itertools.pairwise(ends), request.kept(balance, mode), strict=True
        ):
            alone = profile.kept_bytes(*stage, mode)
            for at in range(*stage):
                own = layers[at].kept_bytes
                part = own[mode] * kept // alone if alone else 0
                layers[at] = dataclasses.replace(
                    layers[at], kept_bytes={**own, mode: part}
                )
    return dataclasses.replace(profile, layers=tuple(layers))


def confirmed(
    candidates: Sequence[Candidate], space: Space, request: Request
) -> list[Candidate]:
    """The candidates, of which the first has the bytes of its list of instructions.

    Args:
      candidates: the best first.
      space: what they were chosen from.
      request: what the profiles answer.

    Returns:
      The best first.
    """
    found, exact = list(candidates), []
    while len(exact) < _MOST and not any(found[0] is own for own in exact):
        exact.append(_exactly(found[0], request))
        found = ranked([exact[-1], *found[1:]], space.hardware)
    return found


def _exactly(candidate: Candidate, request: Request) -> Candidate:
    """A candidate with the bytes that its list of instructions holds."""
    schedule = candidate.schedule
    asked = dataclasses.replace(request, num_microbatches=schedule.num_microbatches)
    program = asked.lowered(candidate.balance, candidate.remat, schedule)
    peaks = dict(zip(program.devices, _bytes.peaks(program), strict=True))
    return dataclasses.replace(
        candidate,
        memory=tuple(
            dataclasses.replace(own, held=peaks[OnPaper(rank)] - own.lasting)
            for rank, own in enumerate(candidate.memory)
        ),
        held=tuple(_bytes.most_residuals(program, schedule.num_stages)),
    )
