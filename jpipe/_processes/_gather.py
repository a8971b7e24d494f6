"""The arrays of all processes brought to the first, which writes them to a file."""

import itertools
from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from ._digest import fingerprint
from ._elsewhere import is_copied, is_elsewhere, own_copy
from ._group import group
from ._keys import as_numbers
from ._transport import Crossing, on_one

PyTree = Any


def agree_on(tree: PyTree) -> None:
    """Checks that all processes have the same tree, of which each has a part.

    Raises:
      ValueError: with each leaf that differs in shape, dtype or, where each process
        has a copy, such as of the number of the step, in value.
      TimeoutError: with the processes that are late.
    """
    flat = jax.tree_util.tree_leaves_with_path(tree)
    facts = {
        jax.tree_util.keystr(path): fingerprint(leaf)
        if _is_everywhere(leaf)
        else f"{leaf.dtype}{list(leaf.shape)}"
        for path, leaf in flat
    }
    group().agree(facts, "what is saved")


def at_first(tree: PyTree) -> PyTree:
    """A tree on which all agree, as arrays of NumPy in the first process."""
    number, moves = group().next_number(), itertools.count()
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: _brought(number, next(moves), path, leaf), tree
    )


def _is_everywhere(leaf: Any) -> bool:
    """Whether each process has its values."""
    return not isinstance(leaf, jax.Array) or is_copied(leaf)


def _brought(number: int, index: int, path: Any, leaf: Any) -> Any:
    """A leaf in the first process; in the others anything."""
    if _is_everywhere(leaf):
        return _as_numpy(own_copy(leaf))
    source = min(leaf.sharding.device_set, key=lambda device: device.id)
    if source.process_index == 0:
        return None if is_elsewhere(leaf) else _as_numpy(leaf)
    first = jax.local_devices(process_index=0)[0]
    before, after = map(SingleDeviceSharding, (source, first))
    spec = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=after)
    name = f"saved {jax.tree_util.keystr(path)}"
    crossing = Crossing(source, first, [spec], [before], index, name)
    if not crossing.concerns:
        return None
    run = crossing.opened(number)
    found = run(*([] if is_elsewhere(leaf) else [on_one(leaf, source)]))
    return _as_numpy(found[0]) if crossing.is_received else None


def _as_numpy(leaf: Any) -> Any:
    return np.asarray(as_numbers(leaf))
