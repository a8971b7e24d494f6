"""The entry of each leaf of a state in its metadata: path, type, digest.

Orbax keeps the entries in the file in which it keeps the tree, with a digest of them
all, so that a state has all of this or is damaged:

    _METADATA   {"custom_metadata": {"jpipe": {"leaves": {path: [type, digest]},
                                               "digest": digest of the leaves}}, ...}
"""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from .._layers._text import shape_text
from .._processes._arrays import as_numbers, is_key

PyTree = Any
_KEY = "jpipe"


def path_text(path: jax.tree_util.KeyPath) -> str:
    """The keys of a path, as one text, another for each path."""
    keys = [jax.tree_util.keystr((key,), simple=True) for key in path]
    return "/".join(key.replace("/", r"\/") for key in keys)


def leaves_by_path(tree: PyTree) -> dict[str, Any]:
    """Path -> leaf. It does not tell containers apart: they are not saved."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {path_text(path): leaf for path, leaf in leaves}


def types_by_path(tree: PyTree) -> dict[str, str]:
    """Path -> shape and dtype of a leaf; a key is saved as its numbers."""
    return {
        path: shape_text(jax.eval_shape(as_numbers, leaf) if is_key(leaf) else leaf)
        for path, leaf in leaves_by_path(tree).items()
    }


def digest_values(values: np.ndarray) -> str:
    """The SHA-256 of the values of an array."""
    flat = np.ascontiguousarray(values).reshape(-1)
    return hashlib.sha256(flat.view(np.uint8).data).hexdigest()


def write_entries(state: PyTree) -> dict[str, Any]:
    """The entries of the leaves of a state, all arrays of NumPy, as JSON."""
    types = types_by_path(state)
    leaves = {
        path: [types[path], digest_values(leaf)]
        for path, leaf in leaves_by_path(state).items()
    }
    return {_KEY: {"leaves": leaves, "digest": _digest_entries(leaves)}}


def read_entries(
    metadata: Mapping[str, Any] | None, tree: PyTree
) -> dict[str, tuple[str, str]]:
    """Path -> shape and dtype of a leaf, and its digest.

    Args:
      metadata: the JSON that `write_entries` made. Without it, as in files that others
        wrote, there are no digests: they are empty.
      tree: the tree of the file, with the shape and dtype of each leaf.

    Raises:
      ValueError: if the entries are not those that were written, or of another tree.
    """
    types = types_by_path(tree)
    if not metadata or _KEY not in metadata:
        return {path: (text, "") for path, text in types.items()}
    saved = metadata[_KEY]
    entries = {path: (text, digest) for path, (text, digest) in saved["leaves"].items()}
    is_intact = _digest_entries(saved["leaves"]) == saved["digest"]
    if not is_intact or types != {path: text for path, (text, _) in entries.items()}:
        raise ValueError("its metadata are not what was saved")
    return entries


def _digest_entries(leaves: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(leaves, sort_keys=True).encode()).hexdigest()
