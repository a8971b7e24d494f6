"""Arrays of all processes brought to the first, where they are written to a file."""

import hashlib
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from ._elsewhere import is_copied, is_elsewhere, own_copy
from ._group import group
from ._keys import as_numbers
from ._transport import Crossing, on_one, start

# Of an array of more numbers a digest is compared.
_FEW = 8


def agree_on(leaves: Sequence[tuple[str, Any]]) -> int:
    """Checks that all processes have the same tree, of which each has a part.

    Args:
      leaves: those of the tree, with what to call them.

    Returns:
      The number by which `at_first` brings them.

    Raises:
      ValueError: with what differs: what a leaf is like, or the value of one of which
        each process has a copy, such as the number of the step.
      TimeoutError: with the processes that do not come.
    """
    number = group().next_number()
    start()
    facts = {name: _told(leaf) for name, leaf in leaves}
    group().agree(f"gather/{number}", facts, "what is saved")
    return number


def at_first(leaves: Sequence[tuple[str, Any]], number: int) -> list[Any]:
    """The leaves of a tree on which all agree.

    Returns:
      In the first process arrays of NumPy; in others what is no matter.
    """
    return [_brought(number, i, *leaf) for i, leaf in enumerate(leaves)]


def _told(leaf: Any) -> str:
    """What a leaf is like, and what each process has a copy of."""
    like = f"{leaf.dtype}{list(leaf.shape)}"
    if isinstance(leaf, jax.Array) and not is_copied(leaf):
        return like
    value = _as_numpy(own_copy(leaf))
    if value.size <= _FEW:
        return f"{like} {value.tolist()}"
    return f"{like} {hashlib.sha256(value.tobytes()).hexdigest()[:12]}"


def _brought(number: int, index: int, name: str, leaf: Any) -> Any:
    first = _head(jax.devices())
    if not isinstance(leaf, jax.Array) or is_copied(leaf):
        return _as_numpy(own_copy(leaf))
    source = _head(leaf.sharding.device_set)
    if source.process_index == first.process_index:
        return None if is_elsewhere(leaf) else _as_numpy(leaf)
    spec = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
    shardings = [SingleDeviceSharding(device) for device in (source, first)]
    crossing = Crossing(
        source, first, [spec], shardings[:1], shardings[1:], index, f"saved {name}"
    )
    if not crossing.concerns:
        return None
    crossing.open(number)
    found = crossing(*([] if is_elsewhere(leaf) else [on_one(leaf, source)]))
    return _as_numpy(found[0]) if crossing.is_received else None


def _head(devices: Any) -> Any:
    return min(devices, key=lambda device: device.id)


def _as_numpy(leaf: Any) -> Any:
    return np.asarray(as_numbers(leaf))
