"""States on disk: saved by one pipeline, gone on with by any other.

A state is keyed by layer and knows nothing of stages, devices or meshes, so what four
stages saved goes on in two, on one device or on a mesh. The files are those of Orbax,
which writes all of a state or none of it, and which other programs read too.
"""

import os
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from ._faults import refuse
from ._instructions._transfer import put_as
from ._processes._elsewhere import is_elsewhere
from ._processes._gather import agree_on, at_first
from ._processes._group import group
from ._processes._keys import as_key, as_numbers, is_key
from ._run import _variables
from ._train._state import TrainState, note_chosen

__all__ = ["restore", "save"]
PyTree = Any
_ARRAYS = jax.Array | np.ndarray
_NUMBERS = bool | int | float | complex | np.generic
# Seconds that a process waits while another one writes: a day.
_LONG = 86_400.0


def save(
    path: str | os.PathLike[str], state: PyTree, *, overwrite: bool = False
) -> None:
    """Saves a state; returns when all of it is written.

    Args:
      path: a folder that is not there yet.
      state: a `TrainState`, or variables, or any pytree of arrays and numbers, such as
        ``{"state": state, "position": 1200}`` with the position in the data.
      overwrite: whether it may be there, and is replaced.

    Raises:
      FileExistsError: if it is there.
      OSError: if it cannot be made.
      TypeError: with what of it is neither an array nor a number.
      ValueError: if a step overwrote the state; of several processes, if they are not
        at the same step, or save different things.
      RuntimeError: of several processes, if one cannot do its part.

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
    _variables.check_alive(jax.tree.leaves(state))
    state = _as_arrays(state)
    folder = _absolute(path)
    is_there = folder.exists()
    if jax.process_count() > 1:
        said = _meet("save", {"path": str(folder), "is there": str(is_there)})
        is_there = said[0]["is there"] == str(True)
    if is_there and not overwrite:
        raise FileExistsError(
            f"{folder} is there already; give another path, or overwrite=True"
        )
    if jax.process_count() == 1:
        _write(folder, state, overwrite)
        return
    flat, tree = jax.tree_util.tree_flatten_with_path(state)
    leaves = [(jax.tree_util.keystr(path), leaf) for path, leaf in flat]
    number = agree_on(leaves)

    def work() -> None:
        whole = jax.tree.unflatten(tree, at_first(leaves, number))
        if jax.process_index() == 0:
            _write(folder, whole, overwrite)

    _together("saved", work, _LONG)


def _write(folder: pathlib.Path, state: PyTree, overwrite: bool) -> None:
    # Orbax, which would make it too, keeps threads for minutes that wait for what has
    # failed, and the program could not end.
    parent = folder.parent
    if parent.exists() and not parent.is_dir():
        raise NotADirectoryError(f"{parent} is not a folder")
    parent.mkdir(parents=True, exist_ok=True)
    if not os.access(parent, os.W_OK | os.X_OK):
        raise PermissionError(f"{parent} may not be written to")
    with _checkpointer() as checkpointer:
        checkpointer.save(folder, state, force=overwrite)
        checkpointer.wait_until_finished()


def _together(what: str, work: Callable[[], Any], seconds: float = 0.0) -> Any:
    """What a process does of something that fails in all if it fails in one.

    Args:
      what: it is called.
      work: what this process does.
      seconds: how long others may take; default: the timeout.

    Raises:
      RuntimeError: with what failed in another process.
    """
    try:
        found = work()
    except BaseException as error:
        _meet(what, {"fault": f"{type(error).__name__}: {error}"}, seconds)
        raise
    said = _meet(what, {"fault": ""}, seconds)
    faults = (f"process {p}: {x['fault']}" for p, x in enumerate(said) if x["fault"])
    refuse(f"this could not be {what}", faults, RuntimeError)
    return found


def _meet(what: str, words: dict[str, str], seconds: float = 0.0) -> list[Any]:
    """Waits for all processes, and gives what they say."""
    name = f"{what}/{group().next_number()}"
    return group().meet(name, words, f"jpipe.checkpoint, {what}", seconds)


def _checkpointer() -> Any:
    """That of Orbax, which waits for no other process."""
    import orbax.checkpoint as ocp  # takes a second, which a step has no use for

    return ocp.StandardCheckpointer(**_alone())


def _alone() -> dict[str, Any]:
    """What tells Orbax to leave other processes alone."""
    import orbax.checkpoint as ocp

    if jax.process_count() == 1:
        return {}
    me = jax.process_index()
    alone = ocp.options.MultiprocessingOptions(
        primary_host=me, active_processes={me}, barrier_sync_key_prefix=f"process{me}"
    )
    return {"multiprocessing_options": alone}


def restore(path: str | os.PathLike[str], like: PyTree) -> PyTree:
    """Reads what `save` wrote, and puts it where another state is.

    Args:
      path: the folder.
      like: a state of the pipeline that goes on, such as what its `init_train_state`
        returned: its structure, shapes, dtypes and places are taken, not its values.

    Returns:
      The state, in place.

    Raises:
      FileNotFoundError: if there is no such folder.
      TypeError: with what of ``like`` is neither an array nor a number.
      ValueError: if it holds another kind of state: with every difference.
      RuntimeError: of several processes, if one cannot do its part.
    """
    folder = _absolute(path)
    arrays = _as_arrays(like)
    if jax.process_count() == 1:
        found = _read(folder, arrays)
    else:
        found = _together("restored", lambda: _read(folder, arrays))
    restored = jax.tree.map(_as_given, found, like)
    _note_chosen(restored, like)
    return restored


def _note_chosen(restored: PyTree, like: PyTree) -> None:
    """States were made to train what those are made to train that they go on as."""

    def of_states(tree: PyTree) -> list[TrainState]:
        leaves = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, TrainState))
        return [leaf for leaf in leaves if isinstance(leaf, TrainState)]

    for state, given in zip(of_states(restored), of_states(like), strict=True):
        note_chosen(state, given.chosen)


def _read(folder: pathlib.Path, like: PyTree) -> PyTree:
    if not folder.exists():
        here = f" in process {jax.process_index()}" * (jax.process_count() > 1)
        raise FileNotFoundError(f"{folder} is not there{here}")
    wanted = _kinds(jax.tree.map(_as_saved, like))
    with _checkpointer() as checkpointer:
        try:
            tree = checkpointer.metadata(folder).item_metadata.tree
        except (AttributeError, ValueError, FileNotFoundError) as error:
            raise ValueError(
                f"{folder} holds no state that jpipe.checkpoint.save wrote: {error}"
            ) from None
        other = "{path} is {found}, like= has {wanted}"
        refuse(
            f"{folder} holds another state than like=",
            _variables.differences(wanted, _kinds(tree), other),
        )
        if jax.process_count() > 1:
            return _own_part(folder, like)
        # Several processes save a key as its numbers.
        return jax.tree.map(as_key, checkpointer.restore(folder, like), like)


def _own_part(folder: pathlib.Path, like: PyTree) -> PyTree:
    """What this process has of a state; of the rest what stands for it."""
    import orbax.checkpoint as ocp

    wanted = jax.tree.map(
        lambda leaf: ocp.PLACEHOLDER if is_elsewhere(leaf) else _as_saved(leaf), like
    )
    handler = ocp.PyTreeCheckpointHandler(**_alone())
    with ocp.Checkpointer(handler, **_alone()) as checkpointer:
        arguments = ocp.args.PyTreeRestore(
            item=wanted,
            restore_args=jax.tree.map(
                lambda leaf: ocp.RestoreArgs(restore_type=np.ndarray), wanted
            ),
        )
        found = checkpointer.restore(folder, args=arguments)
    return jax.tree.map(put_as, found, like)


def _absolute(path: str | os.PathLike[str]) -> pathlib.Path:
    return pathlib.Path(path).expanduser().absolute()


def _as_arrays(tree: PyTree) -> PyTree:
    """The same tree with an array of NumPy in place of each number.

    Raises:
      TypeError: with what is neither.
    """
    faults = [
        f"{jax.tree_util.keystr(path)} is {leaf!r:.60}, a {type(leaf).__name__}"
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
        if not isinstance(leaf, _ARRAYS | _NUMBERS)
    ]
    refuse("a state is a pytree of arrays and numbers", faults, TypeError)
    return jax.tree.map(
        lambda leaf: np.asarray(leaf) if isinstance(leaf, _NUMBERS) else leaf, tree
    )


def _as_given(found: Any, like: Any) -> Any:
    """What was read, as a number where a number is meant."""
    if isinstance(like, np.generic):
        return found[()]
    return type(like)(found.item()) if isinstance(like, _NUMBERS) else found


def _as_saved(leaf: Any) -> Any:
    """A spec of what is written of a leaf: of a key the numbers that it is made of."""
    spec = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
    return jax.eval_shape(as_numbers, spec) if is_key(leaf) else spec


def _kinds(tree: PyTree) -> dict[str, str]:
    """The shape and dtype of each leaf, by its path, whatever containers it is in."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): (
            f"{leaf.dtype}{list(leaf.shape)}"
        )
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def __dir__() -> list[str]:
    return __all__
