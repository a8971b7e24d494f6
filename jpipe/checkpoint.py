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
from ._layers._stage import shapes
from ._processes._elsewhere import is_elsewhere
from ._processes._gather import agree_on, at_first
from ._processes._group import group
from ._processes._keys import as_key, as_numbers, is_key
from ._run import _variables

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
      TypeError: with what of it is neither an array nor a number, or if it holds none
        of these; if ``path`` is no path.
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
    folder = _folder(path, "save", "state")
    _variables.check_alive(jax.tree.leaves(state))
    state = _as_arrays(state, "state")
    several, exists = jax.process_count() > 1, folder.exists()
    if several:  # the first one writes
        exists = group().gather({"exists": exists}, "jpipe.checkpoint")[0]["exists"]
    if exists and not overwrite:
        raise FileExistsError(
            f"{folder} is there already; give another path, or overwrite=True"
        )
    if several:
        agree_on(state)
    _together("saved", lambda: _write(folder, state, overwrite), _LONG)


def _write(folder: pathlib.Path, state: PyTree, overwrite: bool) -> None:
    import orbax.checkpoint as ocp  # takes a second, which a step does not need

    if jax.process_count() > 1:
        state = at_first(state)
    if jax.process_index() == 0:
        with _checkpointer() as checkpointer:
            checkpointer.save(folder, ocp.args.PyTreeSave(state), force=overwrite)


def _together(what: str, work: Callable[[], Any], limit: float = 0.0) -> Any:
    """Does the part of this process of what fails in all if it fails in one.

    Args:
      what: it is called.
      work: the part of this process.
      limit: how many seconds others may take; default: the timeout.

    Raises:
      RuntimeError: with what failed in another process.
    """
    if jax.process_count() == 1:
        return work()
    fault = ""
    try:
        found = work()
    except BaseException as error:
        fault = f"{type(error).__name__}: {error}"
        raise
    finally:
        every = group().gather({"fault": fault}, f"jpipe.checkpoint, {what}", limit)
    faults = [f"process {i}: {x['fault']}" for i, x in enumerate(every) if x["fault"]]
    refuse(f"this could not be {what}", faults, RuntimeError)
    return found


def _checkpointer() -> Any:
    """That of Orbax, which in several processes waits for no other one."""
    import orbax.checkpoint as ocp

    process = jax.process_index()
    alone = ocp.options.MultiprocessingOptions(
        primary_host=process,
        active_processes={process},
        barrier_sync_key_prefix=f"process{process}",
    )
    handler = ocp.PyTreeCheckpointHandler(multiprocessing_options=alone)
    return ocp.Checkpointer(handler, multiprocessing_options=alone)


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
      TypeError: with what of ``like`` is neither an array nor a number, or if it holds
        none of these; if ``path`` is no path.
      ValueError: if it holds another kind of state: with every difference.
      RuntimeError: of several processes, if one cannot do its part.
    """
    folder = _folder(path, "restore", "like")
    arrays = _as_arrays(like, "like")
    found = _together("restored", lambda: _read(folder, arrays))
    return jax.tree.map(_as_like, found, like)


def _read(folder: pathlib.Path, like: PyTree) -> PyTree:
    """What this process has of a state; of the rest what stands for it."""
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
        other = "{path} is {found}, like= has {wanted}"
        refuse(
            f"{folder} holds another state than like=",
            _variables.differences(_kinds(like), _kinds(tree), other),
        )
        here = jax.tree.map(
            lambda leaf: ocp.PLACEHOLDER if is_elsewhere(leaf) else leaf, like
        )
        how = ocp.checkpoint_utils.construct_restore_args(here)
        return checkpointer.restore(folder, ocp.args.PyTreeRestore(here, how))


def _folder(path: Any, function: str, second: str) -> pathlib.Path:
    """The path as an absolute one.

    Args:
      path: what the caller passed first.
      function: what was called.
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
    """The same tree with an array of NumPy in place of each number.

    Args:
      tree: what the caller passed.
      name: how errors call it.

    Raises:
      TypeError: with what is neither, or if there are no leaves.
    """
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    faults = [
        f"{name}{jax.tree_util.keystr(path)} is {leaf!r:.60}, a {type(leaf).__name__}"
        for path, leaf in leaves
        if not isinstance(leaf, _ARRAYS | _NUMBERS)
    ]
    if not leaves:
        faults = [f"{name} is {tree!r:.60}, without any array"]
    refuse(
        f"{name} must be a pytree of arrays and numbers, such as the state that "
        f"pipe.init_train_state or a step returned",
        faults,
        TypeError,
    )
    return jax.tree.map(
        lambda leaf: np.asarray(leaf) if isinstance(leaf, _NUMBERS) else leaf, tree
    )


def _as_like(found: Any, like: Any) -> Any:
    """A leaf that was read, where a number or a key is meant as such."""
    if is_elsewhere(like):
        return like
    if isinstance(like, _NUMBERS):
        return type(like)(found.item())
    return as_key(found, like)


def _kinds(tree: PyTree) -> dict[str, str]:
    """The shape and dtype of each leaf as it is saved, whatever containers it is in."""
    kinds = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        # The numbers are saved of which a key is made.
        saved = jax.eval_shape(as_numbers, leaf) if is_key(leaf) else leaf
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        kinds[name] = shapes(saved)
    return kinds


def __dir__() -> list[str]:
    return __all__
