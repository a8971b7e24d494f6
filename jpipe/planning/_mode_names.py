"""Remat modes by their names: profiles and plans hold names and numbers only.

A profile may count bytes under other names too: these are taken for modes that store
residuals, and compute the rest again.
"""

from collections.abc import Collection

from .._partition._remat_mode import MIN_CUT, MODES, RematMode, Stored
from ..schedules._choose import format_argument

# Those that store the fewest bytes first.
MODE_NAMES = tuple(mode.name for mode in MODES)
# The modes that a search tries: from fast and large to slow and small.
TRIED_MODES = tuple(mode.name for mode in reversed(MODES) if mode.is_tried_by_plan)
# name -> mode
_BY_NAME: dict[str, RematMode] = {mode.name: mode for mode in MODES}


def stores_only_inputs(name: str) -> bool:
    """True if a stage stores only its inputs, so that forwards are computed again."""
    return name in _BY_NAME and _BY_NAME[name].stores is Stored.INPUTS


def mode_between_halves(name: str) -> str:
    """The mode of what the first half of a backward stores for the second."""
    return _BY_NAME.get(name, MIN_CUT).between_halves.name


def sort_modes(names: Collection[str]) -> tuple[str, ...]:
    """The modes of these names, each once: those that store the most bytes first."""
    return tuple(name for name in reversed(MODE_NAMES) if name in names)


def format_unknown_mode(name: object) -> str:
    """The fault of a remat mode that there is not, with those that there are."""
    listed = ", ".join(map(repr, MODE_NAMES))
    return f"remat: {format_argument(name)} is unknown: choose {listed}"
