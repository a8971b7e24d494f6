"""A state read from a folder, and compared with the digests of what was written."""

import contextlib
import json
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from etils import epath

from .._arguments import _variables
from .._arguments._stacked import Stacked
from .._messages import raise_all
from .._processes._arrays import is_non_addressable
from ._leaf_entries import (
    digest_values,
    leaves_by_path,
    path_text,
    read_entries,
    types_by_path,
)
from ._state_writer import make_handler

PyTree = Any
# The file in which Orbax keeps the tree of a state.
_METADATA = "_METADATA"
# The folder of a state below that of its step.
_ITEM = "default"


class DamagedError(ValueError):
    """A file of a state is missing, or is not what was written."""


def is_state(folder: epath.Path) -> bool:
    """True if a folder is one state, and holds none of several steps."""
    return (folder / _METADATA).exists()


def list_steps(folder: epath.Path) -> list[int]:
    """The steps of which a folder holds a state, in order."""
    import orbax.checkpoint as ocp

    if not folder.exists():
        return []
    return sorted(
        int(path.name)
        for path in folder.iterdir()
        if path.name.isdecimal() and ocp.path.step.is_path_finalized(path)
    )


def read_leaves(folder: epath.Path, like: PyTree = None) -> dict[str, np.ndarray]:
    """Path -> values of each leaf of a state, which are those that were saved.

    Args:
      folder: the folder of the state, or of a step.
      like: a state whose leaves it must have; those without a part in this process are
        not read. ``None`` for all leaves that are there.

    Raises:
      FileNotFoundError: if the folder does not exist.
      ValueError: if `like` has other leaves.
      DamagedError: if the folder cannot be read, or other values are read than saved.
    """
    if not folder.exists():
        raise FileNotFoundError(f"{folder} is not there")
    item = folder / _ITEM if (folder / _ITEM).exists() else folder
    if not (item / _METADATA).exists():
        advice = ""
        if list_steps(folder):
            advice = f"; type restore_latest({str(folder)!r}, like)"
        raise DamagedError(
            f"{folder} holds no state that jpipe.checkpoint.save wrote: it has no file "
            f"{_METADATA}{advice}"
        )
    with contextlib.closing(make_handler()) as handler:
        try:
            metadata = handler.metadata(item)
            entries = read_entries(metadata.custom_metadata, metadata.tree)
        except Exception as error:
            raise _damaged(folder, item, error) from error
        read_paths = set(entries)
        if like is not None:
            types = {path: text for path, (text, _) in entries.items()}
            _check_equal(folder, saved=types, like=types_by_path(like))
            read_paths = {
                x for x, y in leaves_by_path(like).items() if _has_part_here(y)
            }
        try:
            return _read_values(handler, item, metadata.tree, read_paths, entries)
        except Exception as error:
            raise _damaged(folder, item, error) from error


def _read_values(
    handler: Any,
    item: epath.Path,
    tree: PyTree,
    read_paths: set[str],
    entries: Mapping[str, tuple[str, str]],
) -> dict[str, np.ndarray]:
    """Path -> values of some leaves.

    Args:
      handler: the handler of Orbax.
      item: the folder with the files.
      tree: their tree, with the shape and dtype of each leaf.
      read_paths: the paths of these leaves.
      entries: path -> (shape and dtype, digest); no digest: no comparison.

    Raises:
      ValueError: if other values are read than were saved.
    """
    import orbax.checkpoint as ocp

    targets = jax.tree_util.tree_map_with_path(
        lambda path, leaf: (
            np.empty(leaf.shape, leaf.dtype)
            if path_text(path) in read_paths
            else ocp.PLACEHOLDER
        ),
        tree,
    )
    restore_args = ocp.checkpoint_utils.construct_restore_args(targets)
    args = ocp.args.PyTreeRestore(targets, restore_args)
    restored = leaves_by_path(handler.restore(item, args=args))
    values: dict[str, np.ndarray] = {}
    for path in sorted(read_paths):
        values[path] = np.asarray(restored[path])
        _, digest = entries[path]
        if digest and digest_values(values[path]) != digest:
            raise ValueError(f"{path} has other values than were saved")
    return values


def _has_part_here(leaf: Any) -> bool:
    """True if a leaf, or some of it, is in this process."""
    arrays = leaf.arrays if isinstance(leaf, Stacked) else [leaf]
    return not all(map(is_non_addressable, arrays))


def _check_equal(
    folder: epath.Path, *, saved: Mapping[str, str], like: Mapping[str, str]
) -> None:
    """Checks that a folder holds the leaves of `like`.

    Args:
      folder: the folder.
      saved: path -> shape and dtype of the leaf in the folder.
      like: path -> those of the leaf of `like`.

    Raises:
      ValueError: with every leaf that is missing, surplus, or different.
    """
    raise_all(
        f"{folder} holds another state than like=; make like= with the model and the "
        f"optimizer of the state that was saved",
        _variables.differences(like, saved, "{path} is {actual}, like= has {expected}"),
    )


def _damaged(folder: epath.Path, item: epath.Path, error: Exception) -> DamagedError:
    """The error for a folder that cannot be read, which names files that are no JSON.

    Args:
      folder: the folder.
      item: the folder with the files: the same, or below it.
      error: the error of Orbax, which names other files.
    """
    damaged_files = list[str]()
    for name in (_METADATA, "_sharding", "array_metadatas/*"):
        for path in item.glob(name):
            try:
                json.loads(path.read_text())
            except ValueError:
                damaged_files.append(f"{path} is no JSON")
    cause, _, _ = str(error).partition(" [tensorstore_spec=")
    if not isinstance(error, ValueError):
        cause = f"{type(error).__name__}: {cause}"
    return DamagedError(f"{folder} is damaged: {', '.join(damaged_files) or cause}")
