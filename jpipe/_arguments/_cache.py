"""A cache of programs for the newest signatures of arguments."""

from typing import TypeVar

_K = TypeVar("_K")
_V = TypeVar("_V")

# The number of entries that are kept. A loop whose batches all differ in size, or a
# function that is defined anew at each call, would keep each of its programs alive.
MAX_ENTRIES = 64


class RecentCache(dict[_K, _V]):
    """A dict that drops the oldest entry when there are more than `MAX_ENTRIES`."""

    def __setitem__(self, key: _K, value: _V) -> None:
        super().__setitem__(key, value)
        if len(self) > MAX_ENTRIES:
            del self[next(iter(self))]
