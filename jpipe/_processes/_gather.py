"""Arrays of all processes brought to the first, where they are written to a file."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from ._elsewhere import is_copied, is_elsewhere, own_copy
from ._group import group
from ._keys import as_numbers
from ._transport import Crossing, on_one, start


def at_first(leaves: Sequence[tuple[str, Any]]) -> list[Any]:
    """The leaves of a tree of which each process has a part.

    Args:
      leaves: them, the same in all processes, with what to call them.

    Returns:
      In the first process arrays of NumPy; in others what is no matter.
    """
    number = group().next_number()
    start()
    group().meet(f"gather/{number}", {"leaves": str(len(leaves))}, "save")
    return [_brought(number, i, *leaf) for i, leaf in enumerate(leaves)]


def _brought(number: int, index: int, name: str, leaf: Any) -> Any:
    first = _head(jax.devices())
    if not isinstance(leaf, jax.Array) or is_copied(leaf):
        return _as_numpy(own_copy(leaf))
    source = _head(leaf.sharding.device_set)
    if source.process_index == first.process_index:
        return None if is_elsewhere(leaf) else _as_numpy(leaf)
    spec = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
    lie = [SingleDeviceSharding(device) for device in (source, first)]
    crossing = Crossing(source, first, [spec], lie[:1], lie[1:], index, f"saved {name}")
    if not crossing.concerns:
        return None
    crossing.open(number)
    found = crossing([] if is_elsewhere(leaf) else [on_one(leaf, source)])
    return _as_numpy(found[0]) if crossing.is_received else None


def _head(devices: Any) -> Any:
    return min(devices, key=lambda device: device.id)


def _as_numpy(leaf: Any) -> Any:
    return np.asarray(as_numbers(leaf))
