"""What was built for the newest kinds of arguments."""

from typing import TypeVar

_K = TypeVar("_K")
_V = TypeVar("_V")

# So many entries are kept. A loop whose batches all differ in size, or a function that
# is defined anew at each call, would keep each of its programs alive.
MOST = 64


class Recent(dict[_K, _V]):
    """A dict that forgets the oldest entry where there are more than `MOST`."""

    def __setitem__(self, key: _K, value: _V) -> None:
        super().__setitem__(key, value)
        if len(self) > MOST:
            del self[next(iter(self))]
