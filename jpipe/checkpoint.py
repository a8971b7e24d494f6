"""States on disk: saved by one pipeline, restored by any other.

A state is keyed by layer and knows nothing of stages, devices or meshes, so the state
of four stages goes on in two stages, on one device or on a mesh. Orbax writes the
files: all of a state or none of it, and other programs can read them.
"""

import os
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from ._arguments import _stacked, _variables
from ._arguments._stacked import Stacked
from ._layers._text import shape_text
from ._messages import raise_all
from ._processes._arrays import as_key, as_numbers, is_key, is_non_addressable
from ._processes._gather import agree_on_tree, gather_to_first
from ._processes._group import group

__all__ = ["restore", "save"]
PyTree = Any
_ARRAYS = jax.Array | np.ndarray
_NUMBERS = bool | int | float | complex | np.generic
# Seconds that a process waits while another one writes: a day.
_WRITE_TIMEOUT = 86_400.0


def save(
    path: str | os.PathLike[str], state: PyTree, *, overwrite: bool = False
) -> None:
    """Saves a state; returns when all of it is written.

    Args:
      path: a folder that does not exist yet.
      state: a `TrainState`, or variables, or any pytree of arrays and numbers, such as
        ``{"state": state, "position": 1200}`` with the position in the data.
      overwrite: True if a folder that exists is replaced.

    Raises:
      FileExistsError: if the folder exists.
      OSError: if it cannot be created.
      TypeError: with the leaves that are neither arrays nor numbers, or if there are no
        leaves; if ``path`` is no path.
      ValueError: if a step overwrote the state; if several processes are not at the
        same step, or save different states.
      RuntimeError: if one of several processes cannot do its part.

    Example:
      >>> import jax, jax.numpy as jnp, jpipe, optax, tempfile
      >>> from flax import linen as nn
      >>> layers, x, tx = [nn.Dense(3), nn.Dense(2)], jnp.ones((4, 5)), optax.adam(1e-3)
      >>> pipe = jpipe.sequential(layers)
      >>> state = pipe.init_train_state(jax.random.key(0), x, tx)
      >>> path = tempfile.mkdtemp() + "/state"
      >>> jpipe.checkpoint.save(path, state)
      >>> other = jpipe.pipeline(layers, num_microbatches=2, balance=[2])
      >>> like = other.init_train_state(jax.random.key(1), x, tx)
      >>> state = jpipe.checkpoint.restore(path, like)
      >>> int(state.step)
      0
    """
    folder = _folder(path, "save", "state")
    _variables.check_alive(jax.tree.leaves(state))
    is_multi_process = jax.process_count() > 1
    if is_multi_process:  # each piece is sent by the process that has it
        state = _stacked.open_placed(state)
    state = _as_arrays(_stacked.gather_tree(state), "state")

    exists = folder.exists()
    if is_multi_process:
        # Process 0 writes, so it decides.
        by_process = group().gather({"exists": exists}, "jpipe.checkpoint")
        exists = by_process[0]["exists"]
    if exists and not overwrite:
        raise FileExistsError(
            f"{folder} is there already; give another path, or overwrite=True"
        )
    if is_multi_process:
        agree_on_tree(state)
    _run_in_all_processes(
        lambda: _write(folder, state, overwrite=overwrite),
        participle="saved",
        timeout=_WRITE_TIMEOUT,
    )


def _write(folder: pathlib.Path, state: PyTree, *, overwrite: bool) -> None:
    import orbax.checkpoint as ocp  # takes a second, which a step does not need

    if jax.process_count() > 1:
        state = _stacked.close_tree(gather_to_first(state))
    if jax.process_index() == 0:
        with _checkpointer() as checkpointer:
            checkpointer.save(folder, ocp.args.PyTreeSave(state), force=overwrite)


def _run_in_all_processes(
    function: Callable[[], Any], *, participle: str, timeout: float = 0.0
) -> Any:
    """Runs this process's part; if any process fails, all raise.

    Args:
      function: the part of this process.
      participle: ``"saved"`` or ``"restored"``, for errors.
      timeout: seconds to wait for other processes; 0 for the timeout of the group.

    Raises:
      RuntimeError: with the error of each other process that failed.
    """
    if jax.process_count() == 1:
        return function()
    fault = ""
    try:
        result = function()
    except BaseException as error:
        fault = f"{type(error).__name__}: {error}"
        raise
    finally:
        purpose = f"jpipe.checkpoint, {participle}"
        by_process = group().gather({"fault": fault}, purpose, timeout)
    faults = [
        f"process {index}: {facts['fault']}"
        for index, facts in enumerate(by_process)
        if facts["fault"]
    ]
    raise_all(f"this could not be {participle}", faults, error=RuntimeError)
    return result


def _checkpointer() -> Any:
    """The checkpointer of Orbax, which does not wait for other processes."""
    import orbax.checkpoint as ocp

    process_index = jax.process_index()
    options = ocp.options.MultiprocessingOptions(
        primary_host=process_index,
        active_processes={process_index},
        barrier_sync_key_prefix=f"process{process_index}",
    )
    handler = ocp.PyTreeCheckpointHandler(multiprocessing_options=options)
    return ocp.Checkpointer(handler, multiprocessing_options=options)


def restore(path: str | os.PathLike[str], like: PyTree) -> PyTree:
    """Reads a state that `save` wrote, and puts it where another state is.

    Args:
      path: the folder.
      like: a state of the pipeline that goes on, such as the result of its
        `init_train_state`: its structure, shapes, dtypes and devices are taken, not its
        values.

    Returns:
      The state, in place.

    Raises:
      FileNotFoundError: if the folder does not exist.
      TypeError: with the leaves of ``like`` that are neither arrays nor numbers, or if
        there are no leaves; if ``path`` is no path.
      ValueError: if the folder holds another state: with every difference.
      RuntimeError: if one of several processes cannot do its part.
    """
    folder = _folder(path, "restore", "like")
    arrays = _as_arrays(like, "like")
    restored = _run_in_all_processes(
        lambda: _read(folder, arrays), participle="restored"
    )
    return jax.tree.map(_as_like, restored, like)


def _read(folder: pathlib.Path, like: PyTree) -> PyTree:
    """The leaves of a state with a part in this process; placeholders of all others."""
    import orbax.checkpoint as ocp

    if not folder.exists():
        raise FileNotFoundError(f"{folder} is not there")
    with _checkpointer() as checkpointer:
        try:
            tree = checkpointer.metadata(folder).item_metadata.tree
        except (AttributeError, ValueError, FileNotFoundError):
            raise ValueError(
                f"{folder} holds no state that jpipe.checkpoint.save wrote; give the "
                f"path that save was given"
            ) from None
        difference = "{path} is {actual}, like= has {expected}"
        raise_all(
            f"{folder} holds another state than like=",
            _variables.differences(_leaf_texts(like), _leaf_texts(tree), difference),
        )
        local_leaves = jax.tree.map(
            lambda leaf: ocp.PLACEHOLDER if _is_elsewhere(leaf) else _on_host(leaf),
            like,
        )
        restore_args = ocp.checkpoint_utils.construct_restore_args(local_leaves)
        return checkpointer.restore(
            folder, ocp.args.PyTreeRestore(local_leaves, restore_args)
        )


def _folder(path: Any, function: str, second: str) -> pathlib.Path:
    """The absolute path of a folder.

    Args:
      path: the first argument of the caller.
      function: the name of the function that was called.
      second: the name of its second argument.

    Raises:
      TypeError: if it is no path, as where the arguments are swapped.
    """
    if not isinstance(path, str | os.PathLike):
        raise TypeError(
            f"path is of type {type(path).__name__}; needs a str or a pathlib.Path, "
            f"which comes first: jpipe.checkpoint.{function}(path, {second})"
        )
    return pathlib.Path(path).expanduser().absolute()


def _as_arrays(tree: PyTree, name: str) -> PyTree:
    """The tree with an array of NumPy for each number.

    Args:
      tree: the argument of the caller.
      name: its name in errors.

    Raises:
      TypeError: with the leaves that are neither, or if there are no leaves.
    """
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    faults = [
        f"{name}{jax.tree_util.keystr(path)} is {leaf!r:.60}, a {type(leaf).__name__}"
        for path, leaf in leaves
        if not isinstance(leaf, _ARRAYS | _NUMBERS | Stacked)
    ]
    if not leaves:
        faults = [f"{name} is {tree!r:.60}, without any array"]
    raise_all(
        f"{name} must be a pytree of arrays and numbers, such as the state that "
        f"pipe.init_train_state or a step returned",
        faults,
        error=TypeError,
    )
    return jax.tree.map(
        lambda leaf: np.asarray(leaf) if isinstance(leaf, _NUMBERS) else leaf, tree
    )


def _is_elsewhere(leaf: Any) -> bool:
    """True if a leaf has no part in this process."""
    arrays = leaf.arrays if isinstance(leaf, Stacked) else [leaf]
    return all(map(is_non_addressable, arrays))


def _on_host(leaf: Any) -> Any:
    """An array of the host like a leaf in pieces; any other leaf as it is."""
    return np.empty(leaf.shape, leaf.dtype) if isinstance(leaf, Stacked) else leaf


def _as_like(restored: Any, like: Any) -> Any:
    """A leaf that was read, as a number or a key where the leaf of `like` is one."""
    if _is_elsewhere(like):
        return like
    if isinstance(like, Stacked):
        return _stacked.fill_like(np.asarray(restored), like)
    if isinstance(like, _NUMBERS):
        return type(like)(restored.item())
    return as_key(restored, like)


def _leaf_texts(tree: PyTree) -> dict[str, str]:
    """The shape and dtype of each leaf as it is saved, by path.

    The path does not tell containers apart: they are not saved.
    """
    texts = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        # A key is saved as its numbers.
        saved = jax.eval_shape(as_numbers, leaf) if is_key(leaf) else leaf
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        texts[name] = shape_text(saved)
    return texts


def __dir__() -> list[str]:
    return __all__
