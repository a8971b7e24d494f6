"""The arrays of all processes brought to the first, which writes them to a file."""

import itertools
from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from ._arrays import as_numbers, is_non_addressable, is_replicated, local_copy
from ._digest import array_digest
from ._group import group
from ._transport import Crossing, put_whole

PyTree = Any


def agree_on_tree(tree: PyTree) -> None:
    """Checks that all processes have the same tree, of which each has a part.

    Raises:
      ValueError: with each leaf that differs in shape, dtype or, where each process
        has a copy, such as of the number of the step, in value.
      TimeoutError: with the processes that are late.
    """
    flat = jax.tree_util.tree_leaves_with_path(tree)
    facts = {
        jax.tree_util.keystr(path): array_digest(leaf)
        if _has_all_values(leaf)
        else f"{leaf.dtype}{list(leaf.shape)}"
        for path, leaf in flat
    }
    group().agree(facts, "what is saved")


def gather_to_first(tree: PyTree) -> PyTree:
    """Brings a tree, on which all agree, to the first process, as NumPy arrays."""
    program = group().next_number()
    moves = itertools.count()

    def gather_leaf(path: Any, leaf: Any) -> Any:
        return _gather_leaf(
            leaf,
            name=f"saved {jax.tree_util.keystr(path)}",
            program=program,
            move=next(moves),
        )

    return jax.tree_util.tree_map_with_path(gather_leaf, tree)


def _has_all_values(leaf: Any) -> bool:
    """True if each process has the values of a leaf."""
    return not isinstance(leaf, jax.Array) or is_replicated(leaf)


def _gather_leaf(leaf: Any, *, name: str, program: int, move: int) -> Any:
    """A leaf as a NumPy array in the first process; in the others anything.

    Args:
      leaf: the leaf, of which each process has a part, a copy or nothing.
      name: the name of the leaf in messages.
      program: the number of the move's program, the same in all processes.
      move: the index of the move in that program.
    """
    if _has_all_values(leaf):
        return _as_numpy(local_copy(leaf))
    source = min(leaf.sharding.device_set, key=lambda device: device.id)
    if source.process_index == 0:
        return None if is_non_addressable(leaf) else _as_numpy(leaf)

    target = jax.local_devices(process_index=0)[0]
    target_sharding = SingleDeviceSharding(target)
    crossing = Crossing(
        source=source,
        target=target,
        specs=[jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=target_sharding)],
        source_shardings=[SingleDeviceSharding(source)],
        index=move,
        label=name,
    )
    if not crossing.is_local_part:
        return None
    run = crossing.connect(program)
    sent = [] if is_non_addressable(leaf) else [put_whole(leaf, source)]
    received = run(*sent)
    return _as_numpy(received[0]) if crossing.is_received else None


def _as_numpy(leaf: Any) -> Any:
    return np.asarray(as_numbers(leaf))
