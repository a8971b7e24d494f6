"""States on disk: saved by one pipeline, restored by any other.

A state is keyed by layer and knows nothing of stages, devices or meshes, so the state
of four stages goes on in two stages, on one device or on a mesh. Orbax writes the
files, which other programs can read.

A state is written beside the one that it replaces:

    write <path>.jpipe-new               <path> is whole
    empty <path>                         <path>.jpipe-new is whole
    rename <path>.jpipe-new to <path>    at once: an empty folder makes way for another

So whenever a program ends, one of the two is whole. `restore` reads the new one if that
is whole, and the next `save` goes on from there.
"""

import contextlib
import glob
import json
import os
import pathlib
import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath

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
# The file in which Orbax keeps the tree of a state.
_METADATA = "_METADATA"
# The end of the name of a folder that Orbax has not written all of.
_UNFINISHED = ".orbax-checkpoint-tmp"
# ``gs://bucket/folder``; ``gs:/bucket/folder`` is what pathlib makes of it.
_URL = re.compile("([a-z][a-z0-9]+):/(/?)")
# Seconds that a process waits while another one writes: a day.
_WRITE_TIMEOUT = 86_400.0


def save(
    path: str | os.PathLike[str], state: PyTree, *, overwrite: bool = False
) -> None:
    """Saves a state; returns when all of it is written.

    Args:
      path: a folder that does not exist yet, or ``"gs://bucket/folder"``.
      state: a `TrainState`, or variables, or any pytree of arrays and numbers, such as
        ``{"state": state, "position": 1200}`` with the position in the data.
      overwrite: True if a folder that exists is replaced, after the new state is whole
        on the disk. A bucket cannot rename a folder at once: there, give each state a
        path of its own.

    Raises:
      FileExistsError: if the folder exists.
      OSError: if it cannot be written, or is a file; the state that was there still is.
      TypeError: with the leaves that are neither arrays nor numbers that can be saved,
        or if there are no leaves; if ``path`` is no path.
      ValueError: if a step overwrote the state; if several processes are not at the
        same step, or save different states; if the path has a bracket, ``[``.
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
    if "[" in str(folder):
        raise ValueError(f"{folder} has a bracket: Orbax could not read it again")
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(f"{folder} is a file; give the path of a folder")
    _variables.check_alive(jax.tree.leaves(state))
    is_multi_process = jax.process_count() > 1
    if is_multi_process:  # each piece is sent by the process that has it
        state = _stacked.split_placed(state)
    state = _as_arrays(_stacked.gather_tree(state), "state")

    exists = folder.exists() or _is_whole(_new_folder(folder))
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
        lambda: _write(folder, state),
        participle="saved",
        timeout=_WRITE_TIMEOUT,
    )


def _write(folder: epath.Path, state: PyTree) -> None:
    """Writes a state, in the first process, in place of the one that is there."""
    import orbax.checkpoint as ocp  # takes a second, which a step does not need

    if jax.process_count() > 1:
        state = _stacked.join_pieces(gather_to_first(state))
    if jax.process_index() != 0:
        return

    _put_new_in_place(folder)
    target = _new_folder(folder) if folder.exists() else folder
    try:
        with ocp.Checkpointer(
            _handler(), multiprocessing_options=_options()
        ) as checkpointer:
            checkpointer.save(target, ocp.args.PyTreeSave(state), force=True)
    except Exception as error:
        name = glob.escape(target.name)
        with contextlib.suppress(OSError):  # the next save removes it too
            for unfinished in folder.parent.glob(f"{name}{_UNFINISHED}*"):
                unfinished.rmtree()
        if isinstance(error, OSError):
            raise
        raise OSError(
            f"{folder} could not be written, and what was there before still is: "
            f"{error}"
        ) from error
    _put_new_in_place(folder)


def _new_folder(folder: epath.Path) -> epath.Path:
    """The folder beside another one in which its next state is written."""
    return folder.parent / f"{folder.name}.jpipe-new"


def _is_whole(folder: epath.Path) -> bool:
    """True if all of a state is in a folder."""
    import orbax.checkpoint as ocp

    return folder.exists() and ocp.path.step.is_path_finalized(folder)


def _put_new_in_place(folder: epath.Path) -> None:
    """Puts the next state of a folder in its place, if there is one and it is whole."""
    new_folder = _new_folder(folder)
    if not _is_whole(new_folder):
        return
    if folder.exists():
        for path in folder.iterdir():
            if path.is_dir():
                path.rmtree()
            else:
                path.unlink()
    if folder.exists():  # a bucket has no empty folders
        os.rename(new_folder, folder)
    else:
        new_folder.rename(folder)


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


def _options() -> Any:
    """Options of Orbax, which does not wait for other processes."""
    import orbax.checkpoint as ocp

    process_index = jax.process_index()
    return ocp.options.MultiprocessingOptions(
        primary_host=process_index,
        active_processes={process_index},
        barrier_sync_key_prefix=f"process{process_index}",
    )


def _handler() -> Any:
    """The handler of Orbax for pytrees."""
    import orbax.checkpoint as ocp

    return ocp.PyTreeCheckpointHandler(multiprocessing_options=_options())


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


def _read(folder: epath.Path, like: PyTree) -> PyTree:
    """The leaves of a state with a part in this process; placeholders of all others."""
    import orbax.checkpoint as ocp

    new_folder = _new_folder(folder)
    if _is_whole(new_folder):  # a save ended before it was put in place
        folder = new_folder
    if not folder.exists():
        raise FileNotFoundError(f"{folder} is not there")
    if not (folder / _METADATA).exists():
        raise ValueError(
            f"{folder} holds no state that jpipe.checkpoint.save wrote: it has no file "
            f"{_METADATA}; give the path that save was given"
        )
    with contextlib.closing(_handler()) as handler:
        try:
            tree = handler.metadata(folder).tree
        except Exception as error:
            raise _damaged(folder, error) from error

        # In the containers of the file: optimizers differ in empty ones alone.
        expected = _leaves_by_path(like)
        _check_equal(folder, saved=_leaves_by_path(tree), like=expected)
        targets = jax.tree_util.tree_map_with_path(
            lambda path, _: _read_target(expected[_path_text(path)]), tree
        )
        restore_args = ocp.checkpoint_utils.construct_restore_args(targets)
        args = ocp.args.PyTreeRestore(targets, restore_args)
        try:
            restored = handler.restore(folder, args=args)
        except Exception as error:
            raise _damaged(folder, error) from error
    leaves = _leaves_by_path(restored)
    return jax.tree_util.tree_map_with_path(
        lambda path, _: leaves[_path_text(path)], like
    )


def _check_equal(
    folder: epath.Path, *, saved: Mapping[str, Any], like: Mapping[str, Any]
) -> None:
    """Checks that a folder holds the leaves of `like`.

    Args:
      folder: the folder.
      saved: path -> metadata of the leaf in the folder.
      like: path -> leaf of `like`.

    Raises:
      ValueError: with every leaf that is missing, surplus, or different.
    """
    raise_all(
        f"{folder} holds another state than like=; make like= with the model and the "
        f"optimizer of the state that was saved",
        _variables.differences(
            {path: _leaf_text(leaf) for path, leaf in like.items()},
            {path: _leaf_text(leaf) for path, leaf in saved.items()},
            "{path} is {actual}, like= has {expected}",
        ),
    )


def _damaged(folder: epath.Path, error: Exception) -> ValueError:
    """The error for a folder that cannot be read, which names files that are no JSON.

    Args:
      folder: the folder.
      error: the error of Orbax, which names other files.
    """
    damaged_files = list[str]()
    for name in (_METADATA, "_sharding", "array_metadatas/*"):
        for path in folder.glob(name):
            try:
                json.loads(path.read_text())
            except ValueError:
                damaged_files.append(f"{path} is no JSON")
    cause, _, _ = str(error).partition(" [tensorstore_spec=")
    return ValueError(
        f"{folder} cannot be read: {', '.join(damaged_files) or cause}; if a file is "
        f"damaged or missing, restore another state, or copy the folder again from "
        f"where it is whole"
    )


def _folder(path: Any, function: str, second: str) -> epath.Path:
    """The absolute path of a folder; links are followed.

    Args:
      path: the first argument of the caller.
      function: the name of the function that was called.
      second: the name of its second argument.

    Raises:
      TypeError: if it is no path, as where the arguments are swapped.
      ValueError: if it is a URL that was made a local path, or of another scheme.
    """
    if not isinstance(path, str | os.PathLike):
        raise TypeError(
            f"path is of type {type(path).__name__}; needs a str or a pathlib.Path, "
            f"which comes first: jpipe.checkpoint.{function}(path, {second})"
        )
    text = os.fspath(path)
    url = _URL.match(text)
    if url is None:
        return epath.Path(os.path.realpath(pathlib.Path(text).expanduser()))
    if not url[2]:
        raise ValueError(
            f"path={path!r}: pathlib makes a local path of a URL; give it as a str, "
            f"{url[1]}://..., or as an etils.epath.Path"
        )
    try:
        return epath.Path(text)
    except KeyError:
        raise ValueError(
            f"path={path!r}: {url[1]}:// is none of the schemes that etils.epath "
            f"reads, such as gs:// and s3://"
        ) from None


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
        f"{name}{jax.tree_util.keystr(path)} is {leaf!r:.60}, {fault}"
        for path, leaf in leaves
        if (fault := _fault_of_leaf(leaf))
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


def _fault_of_leaf(leaf: Any) -> str:
    """The reason why a leaf cannot be saved; empty if it can."""
    if isinstance(leaf, Stacked):
        return ""
    if not isinstance(leaf, _ARRAYS | _NUMBERS):
        return f"a {type(leaf).__name__}"
    dtype = leaf.dtype if isinstance(leaf, _ARRAYS) else np.asarray(leaf).dtype
    is_number = any(jnp.issubdtype(dtype, scalar) for scalar in (np.number, np.bool_))
    if is_number or is_key(leaf):
        return ""
    if isinstance(leaf, int):
        return "an int of more than 64 bits"
    return f"a {type(leaf).__name__} of dtype {dtype}"


def _is_elsewhere(leaf: Any) -> bool:
    """True if a leaf has no part in this process."""
    arrays = leaf.arrays if isinstance(leaf, Stacked) else [leaf]
    return all(map(is_non_addressable, arrays))


def _read_target(leaf: Any) -> Any:
    """The array that Orbax reads for a leaf: its spec; its values are not read."""
    import orbax.checkpoint as ocp

    if _is_elsewhere(leaf):
        return ocp.PLACEHOLDER
    if isinstance(leaf, jax.Array):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
    return np.empty(leaf.shape, leaf.dtype)


def _as_like(restored: Any, like: Any) -> Any:
    """A leaf that was read, as a number or a key where the leaf of `like` is one."""
    if _is_elsewhere(like):
        return like
    if isinstance(like, Stacked):
        return _stacked.fill_like(np.asarray(restored), like)
    if isinstance(like, _NUMBERS):
        return type(like)(restored.item())
    return as_key(restored, like)


def _leaves_by_path(tree: PyTree) -> dict[str, Any]:
    """Path -> leaf. It does not tell containers apart: they are not saved."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {_path_text(path): leaf for path, leaf in leaves}


def _path_text(path: jax.tree_util.KeyPath) -> str:
    """The keys of a path, as one text, another for each path."""
    keys = [jax.tree_util.keystr((key,), simple=True) for key in path]
    return "/".join(key.replace("/", r"\/") for key in keys)


def _leaf_text(leaf: Any) -> str:
    """The shape and dtype of a leaf as it is saved: a key is saved as its numbers."""
    return shape_text(jax.eval_shape(as_numbers, leaf) if is_key(leaf) else leaf)


def __dir__() -> list[str]:
    return __all__
