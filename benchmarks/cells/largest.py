"""The largest model that devices of a given memory can train, from compiled bytes."""

import dataclasses
import math
from collections.abc import Callable, Mapping

from ..experiment import Experiment, Setting
from ..published.benchmark import Benchmark
from ..result import COMPILED, GIB, Cell
from .compiled import Peak, Way, peak

# Memory of each device in bytes.
_LIMITS = {
    "full": {"amoebanet": 8 * GIB, "transformer": 16 * GIB},
    "small": {"amoebanet": GIB // 8, "transformer": GIB // 16},
    "tiny": {"amoebanet": GIB // 64, "transformer": GIB // 2048},
}


class Largest:
    """Searches the largest size of which no device holds more than it has.

    AmoebaNet grows in filters, by 16, with its layers as published; the Transformer
    by one block on every device. As many of these units fit on a device of every
    pipeline, or nearly so: a search begins where the one before ended.

    Args:
      benchmark: the table.
      scale: ``"full"``, ``"small"`` or ``"tiny"``.
    """

    def __init__(self, benchmark: Benchmark, scale: str) -> None:
        self._benchmark = benchmark
        self._scale = scale
        self._ended: dict[tuple[str, str], int] = {}

    def find(self, row: Experiment) -> dict[str, Cell]:
        """The largest model of a row.

        Args:
          row: the experiment, which says the number of devices.

        Returns:
          The size (filters or blocks), parameters, model and activations.
        """
        limit = _LIMITS[self._scale][row.group]
        found: dict[int, tuple[int, Peak]] = {}

        def most(units: int) -> int:
            setting, size = _setting(self._benchmark, row, self._scale, units)
            result = peak(setting, Way("gpipe", row.remat))
            found[units] = size, result
            held = max(result.devices)
            took = f"size {size} takes {held / GIB:.2f} GiB on a device"
            print(f"  {row.name}: {took}", flush=True)
            return held

        kind = row.group, row.remat
        guess = self._ended.get(kind) or _first_guess(row, self._scale)
        units = self._ended[kind] = search(most, limit, guess)
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
    low, high = 0, None  # the largest that fits, the smallest that does not
    tried: dict[int, int] = {}
    size = max(guess, 1)
    while high is None or high > low + 1:
        tried[size] = most(size)
        if tried[size] <= limit:
            low = size
        else:
            high = size
        size = _by_power_law(tried, limit)
        if high is None:
            size = min(max(size, low + 1), 4 * low)
        elif len(tried) % 4:
            size = min(max(size, low + 1), high - 1)
        else:  # where a power law is far off, halving ends
            size = (low + high) // 2
    return low


def _by_power_law(tried: Mapping[int, int], limit: int) -> int:
    """Where the limit would be reached, by the two values that are closest to it."""
    points = [(math.log(max(v, 1) / limit), math.log(n)) for n, v in tried.items()]
    (value, size), *others = sorted(points, key=lambda point: abs(point[0]))
    power = 1.5  # between the weights of wider layers and those of more layers
    if others:
        power = (others[0][0] - value) / (others[0][1] - size)
    return int(math.exp(size - value / max(power, 0.5)))


def _first_guess(row: Experiment, scale: str) -> int:
    """What was published, in units of this scale."""
    if scale == "tiny":
        return 2
    if row.group == "amoebanet":
        # At small scale a sixteenth of the filters in units of eight, and twice as
        # many: the limit is four times what as many squares of them would need.
        return row.model[1] // (16 if scale == "full" else 64)
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
