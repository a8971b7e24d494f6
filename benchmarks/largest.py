"""The largest model that devices of a given memory can train, from compiled bytes."""

import dataclasses
from collections.abc import Callable

from .compiled import Peak, Way, peak
from .experiment import Experiment, Setting
from .published.benchmark import Benchmark
from .results import COMPILED, Cell

GIB = 1 << 30

# Memory of each device in bytes.
_LIMITS = {
    "full": {"amoebanet": 8 * GIB, "transformer": 16 * GIB},
    "small": {"amoebanet": GIB // 8, "transformer": GIB // 16},
    "tiny": {"amoebanet": GIB // 64, "transformer": GIB // 2048},
}


def largest(
    benchmark: Benchmark, row: Experiment, scale: str, tell: Callable[[str], None]
) -> dict[str, Cell]:
    """Searches the largest size of which no device holds more than it has.

    AmoebaNet grows in filters, by 16, with its layers as published; the Transformer
    by one block on every device.

    Args:
      benchmark: the table.
      row: the experiment, which says the number of devices.
      scale: ``"full"``, ``"small"`` or ``"tiny"``.
      tell: called with a line for each size that was tried.

    Returns:
      The size (filters or blocks), parameters, model and activations.
    """
    limit = _LIMITS[scale][row.group]
    found: dict[int, tuple[int, Peak]] = {}

    def most(units: int) -> int:
        setting, size = _setting(benchmark, row, scale, units)
        result = peak(setting, Way("gpipe", row.remat))
        found[units] = size, result
        held = max(result.devices)
        tell(f"{row.name}: size {size} takes {held / GIB:.2f} GiB on a device")
        return held

    units = search(most, limit, _first_guess(row, scale))
    if units == 0:  # even the smallest is too large
        return {"size": Cell(0, COMPILED)}
    size, result = found[units]
    detail = {"limit of a device, bytes": limit, "bytes": result.devices}
    return {
        "size": Cell(size, COMPILED, "", detail=detail),
        "parameters": Cell(result.parameters, COMPILED),
        "model": Cell(result.model / GIB, COMPILED, "GiB"),
        "activations": Cell(result.activations / GIB, COMPILED, "GiB"),
    }


def search(most: Callable[[int], int], limit: int, guess: int) -> int:
    """The largest positive int of which an increasing function is within a limit.

    Args:
      most: the function; costly.
      limit: what it may not exceed.
      guess: where to begin.

    Returns:
      The int; 0 if even 1 exceeds the limit.

    Example:
      >>> search(lambda n: 100 + 7 * n * n, 1000, 3)
      11
    """
    low, high = (0, 0), (0, 0)  # the largest that fits, the smallest that does not
    width = 0
    tried = max(guess, 1)
    while high[0] != low[0] + 1:
        value = most(tried)
        if value <= limit:
            low = tried, value
        else:
            high = tried, value
        if not high[0]:  # nothing exceeded it yet: in proportion, at most twice
            tried = min(max(tried + 1, tried * limit // max(value, 1)), 2 * tried)
        elif high[0] > low[0] + 1:
            share = (limit - low[1]) / (high[1] - low[1])
            before, width = width, high[0] - low[0]
            if before and width > before / 2:  # the guess by proportion did not help
                share = 0.5
            inside = low[0] + int(share * width)
            tried = min(max(inside, low[0] + 1), high[0] - 1)
    return low[0]


def _first_guess(row: Experiment, scale: str) -> int:
    if scale != "full":
        return 2
    if row.group == "amoebanet":
        return row.model[1] // 16
    return max(round(row.model[0] / row.num_stages), 1)


def _setting(
    benchmark: Benchmark, row: Experiment, scale: str, units: int
) -> tuple[Setting, int]:
    """A size in units as a setting."""
    if row.group == "amoebanet":
        size = units * (16 if scale == "full" else 8)
        # Other scales divide the filters by sixteen.
        model = row.model[0], size if scale == "full" else 16 * size
    else:
        # Embedding and projection take the place of a block: as many layers each.
        size = units * row.num_stages - 2 if row.num_stages > 1 else units
        model = (size,)
    return benchmark.setting(dataclasses.replace(row, model=model), scale), size
