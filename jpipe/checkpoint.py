"""States on disk: saved by one pipeline, restored by any other.

A state is keyed by layer and knows nothing of stages, devices or meshes, so the state
of four stages goes on in two stages, on one device or on a mesh. Orbax writes the
files, which other programs can read, and deletes the oldest:

    <folder>/1100/default/_METADATA       the tree, and the digest of each leaf
                          ...             the values
             1200/default/...
             1300.orbax-checkpoint-tmp    a save that has not ended: no state

A folder gets its name when all of it is written, so whenever a program ends, each state
is there or is not. What is read is compared with the digests: where a file is damaged,
`restore_latest` takes the state before that one.
"""

import os
import pathlib
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath

from ._arguments import _stacked, _variables
from ._arguments._stacked import Stacked
from ._disk._leaf_entries import path_text
from ._disk._state_reader import DamagedError, is_state, list_steps, read_leaves
from ._disk._state_writer import StateWriter
from ._messages import raise_all, warn
from ._processes._arrays import as_key, is_key
from ._processes._gather import agree_on_tree, gather_to_first
from ._processes._group import group
from ._processes._watch import await_fault

__all__ = ["DamagedError", "restore", "restore_latest", "save", "wait"]
PyTree = Any
_ARRAYS = jax.Array | np.ndarray
_NUMBERS = bool | int | float | complex | np.generic
# ``gs://bucket/folder``; ``gs:/bucket/folder`` is what pathlib makes of it.
_URL = re.compile("([a-z][a-z0-9]+):/(/?)")
# Seconds that a process waits while another one writes: a day.
_WRITE_TIMEOUT = 86_400.0
_writer = StateWriter()


def save(
    path: str | os.PathLike[str],
    state: PyTree,
    *,
    step: int | None = None,
    keep: int = 3,
    background: bool = False,
) -> None:
    """Saves a state; all of it is written, or nothing is.

    Args:
      path: a folder, or ``"gs://bucket/folder"``. With ``step`` it holds the states of
        a training; without, it is that of this state, and does not exist yet.
      state: a `TrainState`, or variables, or any pytree of arrays and numbers, such as
        ``{"state": state, "position": 1200}`` with the position in the data.
      step: the number of the step, later than all in the folder: the state is written
        to ``<path>/<step>``.
      keep: the number of states of the folder that stay; older ones are deleted. With 1
        there is none to go back to if a file is damaged.
      background: True to return when the values are on the host, and write them while
        the next steps run. The next `save`, `wait` or the end of the program waits for
        that, and the first two raise what has failed.

    Raises:
      FileExistsError: if the state, or that of a later step, is there.
      OSError: if it cannot be written; what was there still is.
      TypeError: with the leaves that are neither arrays nor numbers that can be saved,
        or if there are no leaves; if ``path`` is no path.
      ValueError: if a step overwrote the state; if several processes are not at the
        same step, or save different states; if the path has a bracket, ``[``; if
        ``step`` or ``keep`` is no such number, or ``step`` is missing.
      RuntimeError: if one of several processes cannot do its part.

    Example:
      >>> import jax, jax.numpy as jnp, jpipe, optax, tempfile
      >>> from flax import linen as nn
      >>> layers, x, tx = [nn.Dense(3), nn.Dense(2)], jnp.ones((4, 5)), optax.adam(1e-3)
      >>> pipe = jpipe.sequential(layers)
      >>> state = pipe.init_train_state(jax.random.key(0), x, tx)
      >>> folder = tempfile.mkdtemp()
      >>> jpipe.checkpoint.save(folder, state, step=100)
      >>> other = jpipe.pipeline(layers, num_microbatches=2, balance=[2])
      >>> like = other.init_train_state(jax.random.key(1), x, tx)
      >>> state = jpipe.checkpoint.restore_latest(folder, like)
      >>> int(state.step)
      0
    """
    folder = _folder(path, "save", "state")
    _check_numbers(step=step, keep=keep, background=background)
    if "[" in str(folder):
        raise ValueError(f"{folder} has a bracket: Orbax could not read it again")
    _variables.check_alive(jax.tree.leaves(state))
    is_multi_process = jax.process_count() > 1
    if is_multi_process:  # each piece is sent by the process that has it
        state = _stacked.split_placed(state)
    state = _as_arrays(_stacked.gather_tree(state), "state")

    wait()
    _run_in_all_processes(
        lambda: _make_room(folder, step),
        participle="saved",
        timeout=_WRITE_TIMEOUT,
    )
    if is_multi_process:
        agree_on_tree(state)

    def write() -> None:
        whole = state
        if is_multi_process:
            whole = _stacked.join_pieces(gather_to_first(state))
        if jax.process_index() != 0:
            return
        if step is None:
            _writer.write(folder, whole)
        else:
            _writer.write_step(
                folder, whole, step=int(step), keep=int(keep), background=background
            )

    _run_in_all_processes(write, participle="saved", timeout=_WRITE_TIMEOUT)


def _check_numbers(*, step: int | None, keep: int, background: bool) -> None:
    """Checks the options of `save`."""
    for name, number, least in (("step", step, 0), ("keep", keep, 1)):
        is_int = isinstance(number, int | np.integer) and not isinstance(number, bool)
        if number is not None and not (is_int and number >= least):
            example = "step=int(state.step)" if name == "step" else "keep=3"
            raise ValueError(
                f"{name}={number!r} is no whole number from {least} on; needs one, "
                f"such as {example}"
            )
    if background and step is None:
        raise ValueError("background=True needs step=, as in step=int(state.step)")


def wait() -> None:
    """Waits until what `save` writes in the background is on the disk.

    Several processes all call it.

    Raises:
      OSError: if it could not be written; the states before it are still there.
      RuntimeError: if another process could not.
    """
    _run_in_all_processes(_writer.finish, participle="saved", timeout=_WRITE_TIMEOUT)


def _make_room(folder: epath.Path, step: int | None) -> None:
    """Checks, in the first process, that a state can be written; deletes damaged ones.

    After `restore_latest` has gone back to an earlier step, the steps after it are
    taken again.

    Raises:
      FileExistsError: if a state is there that is whole.
      NotADirectoryError: if a file is there.
    """
    if jax.process_index() != 0 or not folder.exists():
        return
    if not folder.is_dir():
        raise NotADirectoryError(f"{folder} is a file; give the path of a folder")
    if step is None:
        raise FileExistsError(f"{folder} is there already; give another path, or step=")
    for later_step in list_steps(folder):
        if later_step < step:
            continue
        later_folder = folder / str(later_step)
        try:
            read_leaves(later_folder)
        except DamagedError:
            later_folder.rmtree()
            continue
        raise FileExistsError(
            f"{later_folder} is there already, and step={step} is not later: go on "
            f"from it with restore_latest, or give another folder, or delete the steps "
            f"from {step} on"
        )


def _run_in_all_processes(
    function: Callable[[], Any], *, participle: str, timeout: float = 0.0
) -> Any:
    """Runs this process's part; if any process fails, all raise.

    Args:
      function: the part of this process.
      participle: ``"saved"`` or ``"restored"``, for errors.
      timeout: seconds to wait for other processes; 0 for the timeout of the group.

    Raises:
      DamagedError: if all that failed in any process is that files are damaged.
      RuntimeError: with the error of each other process that failed.
    """
    if jax.process_count() == 1:
        return function()
    result = None
    error: BaseException | None = None
    try:
        result = function()
    except BaseException as raised:
        error = raised
        # A transfer failed, as its other end is gone: all know that by their lines.
        if isinstance(raised, jax.errors.JaxRuntimeError) and await_fault():
            raise
    facts = {
        "fault": "" if error is None else f"{type(error).__name__}: {error}",
        "is_damage": isinstance(error, DamagedError),
    }
    purpose = f"jpipe.checkpoint, {participle}"
    failed = {
        f"process {index}: {facts['fault']}": facts["is_damage"]
        for index, facts in enumerate(group().gather(facts, purpose, timeout))
        if facts["fault"]
    }
    is_damage = all(failed.values())
    if error is not None and (is_damage or not isinstance(error, DamagedError)):
        raise error
    raise_all(
        f"this could not be {participle}",
        failed,
        error=DamagedError if is_damage else RuntimeError,
    )
    return result


def restore(path: str | os.PathLike[str], like: PyTree) -> PyTree:
    """Reads a state that `save` wrote, and puts it where another state is.

    Args:
      path: its folder; ``<folder>/1200`` of a state that was saved with ``step=1200``.
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
      DamagedError: if a file is damaged, or the folder holds no state.
      RuntimeError: if one of several processes cannot do its part.
    """
    folder = _folder(path, "restore", "like")
    arrays = _as_arrays(like, "like")
    wait()
    leaves = _run_in_all_processes(
        lambda: read_leaves(folder, arrays), participle="restored"
    )
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: _as_like(leaves.get(path_text(path)), leaf), like
    )


def restore_latest(folder: str | os.PathLike[str], like: PyTree) -> PyTree:
    """Reads the state of the last step that `save` wrote to a folder.

    If a file of it is damaged, a warning names that, and the state before it is read.

    Args:
      folder: the folder that `save` was given with ``step=``.
      like: as for `restore`.

    Returns:
      The state, in place; ``like``, unchanged, if no state was saved there.

    Raises:
      DamagedError: if all states are damaged: with the reason for each.
      RuntimeError, TypeError, ValueError: as for `restore`; or if the folder is a
        state that was saved without ``step=``.
    """
    path = _folder(folder, "restore_latest", "like")
    wait()
    steps = _run_in_all_processes(lambda: list_steps(path), participle="restored")
    if jax.process_count() > 1:  # another process may see an older list
        steps = group().gather({"steps": steps}, "jpipe.checkpoint")[0]["steps"]
    faults = list[str]()
    for step in reversed(steps):
        try:
            state = restore(path / str(step), like)
        except DamagedError as error:
            faults.append(str(error))
            continue
        if faults:
            listed = "; ".join(faults)
            warn(f"{listed}. Training goes on from {path / str(step)}")
        return state
    raise_all(f"{path} holds no state that is whole", faults, error=DamagedError)
    if is_state(path):
        raise ValueError(
            f"{path} is one state, which was saved without step=; type "
            f"jpipe.checkpoint.restore(path, like)"
        )
    return like


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
    if isinstance(leaf, _ARRAYS) and leaf.size == 0:
        return f"an array of shape {leaf.shape}, without any number"
    if is_number or is_key(leaf):
        return ""
    if isinstance(leaf, int):
        return "an int of more than 64 bits"
    return f"a {type(leaf).__name__} of dtype {dtype}"


def _as_like(values: np.ndarray | None, like: Any) -> Any:
    """The values of a leaf as it is in `like`: there, and a number or a key if it is.

    Args:
      values: the values; ``None`` if the leaf has no part in this process.
      like: the leaf of `like`.
    """
    if values is None:
        return like
    if isinstance(like, Stacked):
        return _stacked.fill_like(values, like)
    if isinstance(like, _NUMBERS):
        return type(like)(values.item())
    if isinstance(like, np.ndarray):
        return values
    array = jax.make_array_from_callback(
        values.shape, like.sharding, lambda index: values[index]
    )
    return as_key(array, like)


def __dir__() -> list[str]:
    return __all__
